"""The detection matrix as a person reads it."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.mutants.matrix import Matrix
from concord.conformance.run.report import ordered
from concord.conformance.wording import once

STYLES = {"found": "green", "absent": "dim", "failed": "bold magenta"}


def matrix_table(matrix: Matrix) -> Table:
    """Return the matrix: a row for each mutant, with its margin over the tolerance on each backend."""
    names = ordered(finding.backend for finding in matrix.findings)
    table = Table(
        title="Mutants: first error in tolerances", title_justify="left", title_style="bold", padding=(0, 1)
    )
    table.add_column("mutant, and the case that shows it", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    cells = {
        (finding.mutant, finding.backend): Text(finding.cell, style=STYLES.get(finding.status, "bold red"))
        for finding in matrix.findings
    }
    mutants = [KNOWN[name] for name in ordered(finding.mutant for finding in matrix.findings)]
    for operation, of_operation in groupby(mutants, lambda mutant: mutant.operation):
        table.add_section()
        table.add_row(Text(operation, style="bold"))
        for mutant in of_operation:
            shown_by = f"{mutant.variant}-{mutant.scenario}"
            found = (cells.get((mutant.name, backend)) for backend in names)
            table.add_row(Group(Text(mutant.name), Text(shown_by, style="dim")), *found)
    return table


def summary(matrix: Matrix, backend: str) -> str:
    """Return how many are found in a backend, and how often the right tensor, clause and cause are named."""
    asked = [one for one in matrix.findings if one.backend == backend]
    found = [one for one in asked if one.status in ("found", "misplaced")]
    said = [f"{backend}: found {len(found)} of {len(asked)}"]
    right = {
        "first tensor": [one.status == "found" for one in found],
        "clause": [one.clause == "right" for one in found if one.clause],
    }
    said += [f"{what} right in {100 * sum(of) / len(of):.0f} %" for what, of in right.items() if of]
    causes = [one.cause for one in found if one.cause]
    counted = ", ".join(f"{word} {causes.count(word)}" for word in ("right", "none", "wrong"))
    return "; ".join(said + ([f"cause: {counted} of {len(causes)}"] if causes else []))


def show(matrix: Matrix, console: Console) -> None:
    """Print the matrix, what is wrong in it, what no input can show, and a summary."""
    console.print(matrix_table(matrix))
    told = list[tuple[str, str, object]]()
    absent = dict[str, str]()
    for one in matrix.findings:
        if one.status == "absent":
            absent[one.backend] = one.detail
        elif one.status != "found":
            first = " or ".join(KNOWN[one.mutant].first)
            named = f" at {one.tensor}, not {first}" if one.status == "misplaced" else ""
            where = f" ({one.case}, {one.dtype})" if one.case else ""
            detail = one.detail.replace("\n", "; ")
            name = f"{one.backend}: {one.mutant} {one.status}{named}{where}"
            told.append((name, detail, (one.backend, one.status, detail) if detail else len(told)))
    for line in once(told):
        console.print(Text(line.removesuffix(": "), style="red"), soft_wrap=False)
    for name, detail in absent.items():
        console.print(Text(f"{name} is not installed: {detail}", style="dim"))
    for one in matrix.findings:
        if one.cause == "wrong":
            console.print(Text(f"{one.backend}: {one.mutant} is explained by {one.said}", style="yellow"))
    for backend in ordered(one.backend for one in matrix.findings):
        console.print(summary(matrix, backend), highlight=False)
    if matrix.unfinished:
        console.print(f"ended before {matrix.unfinished} more", style="bold")
