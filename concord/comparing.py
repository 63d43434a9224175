"""``concord mutants --criteria``: the field's usual criteria beside the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from concord.conformance import criteria, record, report
from concord.conformance.campaign import Settings
from concord.conformance.faults.fault import Fault
from concord.progress import counting


def compare(mutants: Sequence[Fault], names: Sequence[str], settings: Settings, console: Console, json: Path | None, markdown: Path | None) -> int:
    """Run the comparison, show it and write it; return the exit code.

    Raises:
        SpecError: if the file for the table, or its markers, are missing, before anything runs.
    """
    if markdown is not None:
        report.around(markdown, "criteria")
    amounts = criteria.Amounts()
    with counting(names, criteria.runs_of_each(mutants, names, amounts)) as progress:
        result = criteria.compare(mutants, names, settings, amounts, progress)
    show(result, console)
    if json is not None:
        record.write(json, result.as_dict())
        console.print(f"written: {json}", highlight=False)
    if markdown is not None:
        report.put_into(markdown, "criteria", criteria.markdown(result))
        console.print(f"written: {markdown}", highlight=False)
    return result.exit_code


def show(result: criteria.Comparison, console: Console) -> None:
    """Print the table, and what the judge was wrong about."""
    head, *body = criteria.rows(result)
    table = Table(*head, title="Flagged: by outputs alone / by any tensor", title_justify="left", title_style="bold")
    for cells in body:
        table.add_row(*cells, style="bold" if cells[0] == criteria.OURS else None)
    console.print(table)
    console.print(criteria.summary(result), highlight=False)
    for kind, runs in result.exceptions.items():
        for run in runs:
            console.print(f"{kind}: {run}", style="red", highlight=False)
    for name, failure in result.failures.items():
        console.print(f"{name}: {failure}", style="magenta", highlight=False)
