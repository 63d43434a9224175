"""``concord mutants --criteria``: the field's usual criteria beside the judge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from concord import writing
from concord.conformance import criteria
from concord.conformance.bugs.bug import Bug
from concord.conformance.campaign import Settings
from concord.conformance.report import within
from concord.progress import counting


def compare(
    mutants: Sequence[Bug],
    names: Sequence[str],
    settings: Settings,
    console: Console,
    json: Path | None,
    html: Path | None,
    markdown: Path | None,
) -> int:
    """Run the comparison, show it and write it; return the exit code.

    Raises:
        SpecError: if something cannot be written.
    """
    amounts = criteria.Amounts()
    with counting(names, criteria.runs_of_each(mutants, names, amounts)) as progress:
        result = criteria.compare(mutants, names, settings, amounts, progress)
    put = partial(within, markdown, "criteria") if markdown else str
    title = "Usual criteria beside the judge"
    writing.outcome(
        result.as_dict(),
        "criteria",
        title,
        console,
        json,
        html,
        lambda: show(result, console),
        (markdown, lambda: put(criteria.markdown(result))),
    )
    return result.exit_code


def show(result: criteria.Comparison, console: Console) -> None:
    """Print the table, and what the judge was wrong about."""
    head, *body = criteria.rows(result)
    table = Table(
        *head, title="Flagged: by outputs alone / by any tensor", title_justify="left", title_style="bold"
    )
    for cells in body:
        table.add_row(*cells, style="bold" if cells[0] == criteria.OURS else None)
    console.print(table)
    console.print(criteria.summary(result), highlight=False)
    for kind, runs in result.exceptions.items():
        for run in runs:
            console.print(f"{kind}: {run}", style="red", highlight=False)
    for name, failure in result.failures.items():
        console.print(f"{name}: {failure}", style="magenta", highlight=False)
