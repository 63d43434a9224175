"""The detection matrix as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.mutants.matrix import Finding, Matrix
from concord.conformance.verdict import number

STYLES = {"found": "green", "equivalent": "dim", "absent": "dim", "failed": "bold magenta"}


def cell(finding: Finding) -> str:
    """Return what a cell of the matrix says."""
    return (
        f"{number(finding.margin)} ✓"
        if finding.status == "found"
        else "–"
        if finding.status == "equivalent"
        else finding.status
    )


def matrix_table(matrix: Matrix) -> Table:
    """Return the matrix: a row for each mutant, with its margin over the tolerance on each backend."""
    names, mutants = _ordered(f.backend for f in matrix.findings), _ordered(f.mutant for f in matrix.findings)
    table = Table(
        title="Mutants: first error in tolerances", title_justify="left", title_style="bold", padding=(0, 1)
    )
    table.add_column("mutant, and the input that shows it", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    cells = {(finding.mutant, finding.backend): finding for finding in matrix.findings}
    group = ""
    for name in mutants:
        mutant = KNOWN[name]
        if mutant.group != group:
            group = mutant.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        found = [
            Text(cell(f), style=STYLES.get(f.status, "bold red"))
            if (f := cells.get((name, backend)))
            else Text("")
            for backend in names
        ]
        shown_by = mutant.input if mutant.precisions else "none"
        table.add_row(Group(Text(name), Text(shown_by, style="dim")), *found)
    return table


def summaries(matrix: Matrix) -> list[str]:
    """Return a line for each backend: how many are found, and how often the right tensor is named first."""
    lines = []
    for name in _ordered(finding.backend for finding in matrix.findings):
        findings = [finding for finding in matrix.of(backend=name) if KNOWN[finding.mutant].precisions]
        found = [finding for finding in findings if finding.status in ("found", "misplaced")]
        right = sum(finding.status == "found" for finding in found)
        share = f"; first tensor right in {100 * right / len(found):.0f} %" if found else ""
        causes = [finding.cause for finding in found if finding.cause]
        counted = ", ".join(f"{word} {causes.count(word)}" for word in ("right", "none", "wrong"))
        clauses = [finding.clause for finding in found if finding.clause]
        share += f"; clause right in {100 * clauses.count('right') / len(clauses):.0f} %" if clauses else ""
        lines.append(
            f"{name}: found {len(found)} of {len(findings)}{share}"
            + (f"; cause: {counted} of {len(causes)}" if causes else "")
        )
    return lines


def catalogue(bugs: Iterable[Bug]) -> Table:
    """Return what each bug is.

    Its sentence, the clause that it breaks, the case that shows it, and where it was seen.
    """
    table = Table(title="Bugs", title_justify="left", title_style="bold", padding=(0, 1))
    table.add_column("bug", overflow="fold")
    table.add_column("what it is", overflow="fold", ratio=1)
    group = ""
    for bug in bugs:
        if bug.group != group:
            group = bug.group
            table.add_section()
        more = [bug.clause, f"{bug.variant}-{bug.scenario}", bug.source.removeprefix("https://github.com/")]
        table.add_row(Text(bug.name), Group(bug.what, *filter(None, more)))
    return table


def show(matrix: Matrix, console: Console) -> None:
    """Print the matrix, what is wrong in it, what no input can show, and a summary."""
    console.print(matrix_table(matrix))
    for finding in matrix.findings:
        if finding.status not in ("found", "equivalent", "absent"):
            console.print(Text(_explained(finding), style="red"), soft_wrap=False)
    for name, backend_detail in {f.backend: f.detail for f in matrix.of(status="absent")}.items():
        console.print(Text(f"{name} is not installed: {backend_detail}", style="dim"))
    for finding in matrix.findings:
        if finding.cause == "wrong":
            console.print(
                Text(f"{finding.backend}: {finding.mutant} is explained by {finding.said}", style="yellow")
            )
    for name in _ordered(finding.mutant for finding in matrix.findings):
        for reason, precisions in _reasons(name).items():
            console.print(Text(f"equivalent in {precisions}: {name}: {reason}", style="dim"))
    for line in summaries(matrix):
        console.print(line, highlight=False)


def _explained(finding: Finding) -> str:
    mutant = KNOWN[finding.mutant]
    detail = f": {finding.detail.replace(chr(10), '; ')}" if finding.detail else ""
    where = f" ({finding.case}, {finding.dtype})" if finding.case else ""
    named = f" at {finding.tensor}, not {' or '.join(mutant.first)}" if finding.status == "misplaced" else ""
    return f"{finding.backend}: {finding.mutant} {finding.status}{named}{where}{detail}"


def _reasons(name: str) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for dtype, reason in KNOWN[name].equivalent.items():
        reasons[reason] = f"{reasons[reason]} and {dtype}" if reason in reasons else dtype
    return reasons


def _ordered(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
