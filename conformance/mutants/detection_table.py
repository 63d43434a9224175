"""The detection matrix as a terminal table."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.mutants.matrix import Matrix
from concord.conformance.run.report import ordered
from concord.conformance.wording import counted, once

STYLES = {"found": "green", "absent": "dim", "failed": "bold magenta"}


def matrix_table(matrix: Matrix) -> Table:
    """A table with one row per mutant."""
    names = ordered(finding.backend for finding in matrix.findings)
    table = Table(title="Mutants: first error in tolerances", title_justify="left", title_style="bold")
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
            margins = (cells.get((mutant.name, backend)) for backend in names)
            table.add_row(Group(Text(mutant.name), Text(shown_by, style="dim")), *margins)
    return table


def summary(matrix: Matrix, backend: str) -> str:
    """Shares of found mutants and correct explanations."""
    findings = [finding for finding in matrix.findings if finding.backend == backend]
    detections = [finding for finding in findings if finding.status in ("found", "misplaced")]
    parts = [f"{backend}: found {len(detections)} of {len(findings)}"]
    checks = {
        "first tensor": [finding.status == "found" for finding in detections],
        "clause": [finding.clause == "right" for finding in detections if finding.clause],
    }
    parts += [
        f"{noun} correct in {100 * sum(flags) / len(flags):.0f} %" for noun, flags in checks.items() if flags
    ]
    causes = [finding.cause for finding in detections if finding.cause]
    counts = ", ".join(f"{causes.count(word)} {word}" for word in ("right", "wrong", "none"))
    return "; ".join(parts + ([f"named causes: {counts}"] if causes else []))


def show(matrix: Matrix, console: Console) -> None:
    """Print matrix, failures and summary."""
    console.print(matrix_table(matrix))
    messages = list[tuple[str, str, object]]()
    absent = dict[str, str]()
    for finding in matrix.findings:
        if finding.status == "absent":
            absent[finding.backend] = finding.detail
        elif finding.status != "found":
            tensors = " or ".join(KNOWN[finding.mutant].first)
            place = f" at {finding.tensor}, not {tensors}" if finding.status == "misplaced" else ""
            context = f" ({finding.case}, {finding.dtype})" if finding.case else ""
            detail = finding.detail.replace("\n", "; ")
            name = f"{finding.backend}: {finding.mutant} {finding.status}{place}{context}"
            messages.append(
                (name, detail, (finding.backend, finding.status, detail) if detail else len(messages))
            )
    for line in once(messages):
        console.print(Text(line.removesuffix(": "), style="red"), soft_wrap=False)
    for name, detail in absent.items():
        console.print(Text(f"{name} is not installed: {detail}", style="dim"))
    for finding in matrix.findings:
        if finding.cause == "wrong":
            console.print(
                Text(f"{finding.backend}: {finding.mutant} is explained by {finding.said}", style="yellow")
            )
    for backend in ordered(finding.backend for finding in matrix.findings):
        console.print(summary(matrix, backend))
    if matrix.unfinished:
        console.print(f"stopped with {counted(matrix.unfinished, 'mutant')} left", style="bold")
