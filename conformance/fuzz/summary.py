"""Findings as a person reads them: counts and largest errors, then each failure in words."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord.conformance.campaign import Setup
from concord.conformance.estimate import R, Z
from concord.conformance.fuzz.failures import commands
from concord.conformance.fuzz.findings import Findings
from concord.conformance.reducing import FAILED
from concord.conformance.report import SHORT, indented
from concord.conformance.tally import KINDS, Tally
from concord.conformance.verdict import number, result_lines
from concord.conformance.wording import counted

STYLES = {"diverges": "bold red", "undetermined": "yellow", "failed": "bold magenta"}


def _counts(tally: Tally) -> dict[str, Text]:
    """Return what became of the cases, by the heading of a column."""

    def count(status: str, *statuses: str) -> Text:
        found = sum(tally.statuses[one] for one in statuses or (status,))
        return Text(str(found), style=STYLES.get(status, "") if found else "dim")

    return {
        "cases": Text(str(tally.cases)),
        "agree": count("agrees"),
        "diverge": count("diverges"),
        "undet.": count("undetermined"),
        "unsupp.": count("unsupported"),
        "failed": count("failed", *(status for status in FAILED if status != "diverges")),
        "tensors": Text(str(tally.tensors)),
    }


def _errors(tally: Tally) -> dict[str, Text]:
    """Return the largest errors, by the heading of a column."""
    found = dict[str, Text]()
    for kind in KINDS:
        one = tally.statistics[kind]
        beyond = one.z.value > Z or one.rms.value > R
        found[kind] = (
            Text(f"{number(one.z.value)} / {number(one.rms.value)}", style="bold red" if beyond else "")
            if one.tensors
            else Text("–", style="dim")
        )
    return found


def _table(findings: Findings, cells: Callable[[Tally], dict[str, Text]], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", padding=(0, 1), expand=False)
    table.add_column("backend", overflow="fold")
    table.add_column("", no_wrap=True)
    for name in cells(Tally()):
        table.add_column(name, justify="right", no_wrap=True)
    for backend, dtype, tally in sorted(findings.each(), key=lambda one: one[:2]):
        table.add_row(backend, SHORT.get(dtype, dtype), *cells(tally).values())
    return table


def show(findings: Findings, console: Console, settings: Setup) -> None:
    """Print counts, largest errors, failures and notes."""
    if findings.tallies:
        console.print(_table(findings, _counts, "Random cases"))
        errors = "Largest error of an element in sigma / of a tensor in RMS sigma"
        console.print(_table(findings, _errors, errors))
    console.print(
        f"An element may err by {Z:g} sigma, a tensor by {R:g} RMS sigma; what happens at its step decides.",
        style="dim",
        highlight=False,
    )
    for failure in findings.failures:
        head, *rest = result_lines(failure.result)
        console.print(Text(head, style="bold red"))
        for line in rest:
            console.print(indented(line))
        console.print(indented(f"  {counted(failure.times, 'case')} failed in this way"))
        if failure.folder:
            for line in commands(failure, settings):
                console.print(Text(f"  {line}"), soft_wrap=True)
    for note in findings.notes:
        console.print(Text(note, style="magenta"))
    found = (
        f"{counted(len(findings.failures), 'failure')} found"
        if findings.judged or findings.failures
        else "nothing was judged"
    )
    console.print(
        f"{counted(findings.cases, 'random case')} in {findings.seconds:.0f} s: {found}",
        style="bold",
        highlight=False,
    )
