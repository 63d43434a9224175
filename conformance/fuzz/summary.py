"""Findings as a person reads them: counts and largest errors, then each failure in words."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord.conformance.campaign import Setup
from concord.conformance.estimate import R, Z
from concord.conformance.fuzz.findings import FAILED, Findings
from concord.conformance.fuzz.replay import command
from concord.conformance.report import SHORT, indented
from concord.conformance.tally import KINDS, WAYS, Kind, Tally, Way
from concord.conformance.verdict import number
from concord.conformance.wording import counted

WIDE = 140
"""Columns of a terminal from which counts and errors stand in one table."""

Column = tuple[str, Callable[[Tally], Text]]


def _count(status: str) -> Callable[[Tally], Text]:
    style = {"diverges": "bold red", "undetermined": "yellow"}.get(status, "")
    return lambda tally: Text(str(tally.statuses[status]), style=style if tally.statuses[status] else "dim")


def _failed(tally: Tally) -> Text:
    count = sum(tally.statuses[status] for status in FAILED if status != "diverges")
    return Text(str(count), style="bold magenta" if count else "dim")


def _largest(way: Way, kind: Kind) -> Callable[[Tally], Text]:
    def cell(tally: Tally) -> Text:
        found = tally.statistics[way][kind]
        if not found.tensors:
            return Text("–", style="dim")
        beyond = found.z.value > Z or found.rms.value > R
        return Text(
            f"{number(found.z.value)} / {number(found.rms.value)}", style="bold red" if beyond else ""
        )

    return cell


COUNTS: tuple[Column, ...] = (
    ("cases", lambda tally: Text(str(tally.cases))),
    ("agree", _count("agrees")),
    ("diverge", _count("diverges")),
    ("undet.", _count("undetermined")),
    ("unsupp.", _count("unsupported")),
    ("failed", _failed),
    ("tensors", lambda tally: Text(str(tally.tensors))),
)
ERRORS: tuple[Column, ...] = tuple(
    (f"{kind}\n{'at its step' if way == 'local' else 'end to end'}", _largest(way, kind))
    for way in WAYS
    for kind in KINDS
)


def _table(findings: Findings, columns: tuple[Column, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", padding=(0, 1), expand=False)
    table.add_column("backend", overflow="fold")
    table.add_column("", no_wrap=True)
    for name, _ in columns:
        table.add_column(Group(*name.split("\n")), justify="right", no_wrap=True)
    for backend, dtype, tally in sorted(findings.each(), key=lambda one: one[:2]):
        table.add_row(backend, SHORT.get(dtype, dtype), *(cell(tally) for _, cell in columns))
    return table


def show(findings: Findings, console: Console, settings: Setup) -> None:
    """Print counts, largest errors, failures and notes."""
    errors = "Largest error of an element in sigma / of a tensor in RMS sigma"
    columns = ERRORS if any(tally.end_to_end for _, _, tally in findings.each()) else ERRORS[: len(KINDS)]
    if findings.tallies and console.width >= WIDE:
        console.print(_table(findings, COUNTS + columns, f"Random cases. {errors}"))
    elif findings.tallies:
        console.print(_table(findings, COUNTS[:-1], "Random cases"))
        console.print(_table(findings, columns, errors))
    console.print(
        f"An element may err by {Z:g} sigma, a tensor by {R:g} RMS sigma; what happens at its step decides.",
        style="dim",
        highlight=False,
    )
    for failure in findings.failures:
        head, *rest = failure.lines
        console.print(Text(head, style="bold red"))
        for line in rest:
            console.print(indented(line))
        smaller = f"the smallest of {failure.attempts + 1} tried" if failure.attempts else "as found"
        times = f"{counted(failure.times, 'case')} failed in this way"
        console.print(indented(f"  {times}; this one is {smaller}"))
        if folder := findings.folders.get(failure.name):
            console.print(Text(f"  {command(folder, failure.backend, settings)}"), soft_wrap=True)
    for note in findings.notes:
        console.print(Text(note, style="magenta"))
    found = (
        f"{counted(len(findings.failures), 'failure')} found"
        if findings.judged or findings.failures
        else "nothing was judged"
    )
    console.print(
        f"{findings.cases} random cases in {findings.seconds:.0f} s: {found}", style="bold", highlight=False
    )
