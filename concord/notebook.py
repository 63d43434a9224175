"""Verdict pages in a notebook."""

from __future__ import annotations

import html

from concord.conformance.judging.verdict import Result, Verdict
from concord.conformance.run import record
from concord.conformance.run.campaign import Report, Setup
from concord.conformance.run.results_page import results_page


class Page(str):
    """An HTML page that a notebook shows in a frame."""

    def _repr_html_(self) -> str:
        frame = "width:100%;height:40em;border:1px solid #8884"
        # Without a frame, the page's styles and scripts would affect the notebook.
        return f'<iframe style="{frame}" srcdoc="{html.escape(self)}"></iframe>'


def show(*verdicts: Verdict, title: str = "Verdict") -> Page:
    """Page of verdicts."""
    results = [
        Result(
            "the run",
            title,
            f"verdict {number}" if len(verdicts) > 1 else "verdict",
            "its own precision",
            verdict.status,
            verdict=verdict,
        )
        for number, verdict in enumerate(verdicts, start=1)
    ]
    report = Report(results, {"the run": {}}, Setup())
    return Page(results_page(record.make_record(report, "compare", title)))
