"""Printing of findings, and failures as folders."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord.backends import machine
from concord.conformance.fuzz.findings import KINDS, Failure, Findings, Statistics
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.verdict import number, result_lines
from concord.conformance.run import record
from concord.conformance.run.campaign import Setup
from concord.conformance.run.dump import case_files
from concord.conformance.run.report import SHORT, STYLES, indented
from concord.conformance.wording import counted
from concord.spec.errors import collecting
from concord.spec.folders import write_folder

# Settings that are needed to repeat a failure.
SETTINGS = ("device", "implementation", "execution", "precision")


def table(findings: Findings) -> Table:
    """Statuses and largest errors."""
    title = "Random cases; largest error of an element in sigma / of a tensor in RMS sigma"
    result = Table(title=title, title_justify="left", title_style="bold")
    result.add_column("backend", overflow="fold")
    for name in ("", "cases", "tensors", *KINDS):
        result.add_column(name, justify="right")
    for backend, dtype, tally in findings.each():
        statuses = tally.statuses.items()
        cases = [Text(f"{count} {status}", STYLES.get(status, "bold magenta")) for status, count in statuses]
        errors = (_error(tally.statistics[kind]) for kind in KINDS)
        result.add_row(backend, SHORT.get(dtype, dtype), Group(*cases), str(tally.tensors), *errors)
    return result


def _error(statistics: Statistics) -> Text:
    beyond = statistics.z.value > Z or statistics.rms.value > R
    text = f"{number(statistics.z.value)} / {number(statistics.rms.value)}" if statistics.tensors else "–"
    return Text(text, style="bold red" if beyond else "")


def show(findings: Findings, console: Console, settings: Setup) -> None:
    """Print all findings."""
    if findings.tallies:
        console.print(table(findings))
    console.print(
        f"Limits for the error of each step: {Z:g} sigma for an element, {R:g} RMS sigma for a tensor.",
        style="dim",
    )
    for failure in findings.failures:
        head, *rest = result_lines(failure.result)
        console.print(Text(head, style="bold red"))
        for line in (*rest, f"  {counted(failure.times, 'case')} failed in this way"):
            console.print(indented(line))
        if failure.folder:
            console.print(Text(f"  {command(failure, settings)}"), soft_wrap=True)
    for note in findings.notes:
        console.print(Text(note, style="magenta"))
    judged = findings.judged or findings.failures
    outcome = f"{counted(len(findings.failures), 'failure')} found" if judged else "nothing was judged"
    console.print(
        f"{counted(findings.cases, 'random case')} in {findings.seconds:.0f} s: {outcome}",
        style="bold",
    )


def command(failure: Failure, settings: Setup) -> str:
    """The command that repeats a failure."""
    usual = vars(Setup())
    options = [
        f"--{name} {value}"
        for name, value in vars(settings).items()
        if name in SETTINGS and value != usual[name]
    ]
    arguments = " ".join([*options, f"--backend {shlex.quote(failure.result.backend)}"])
    return f"concord case run {shlex.quote(failure.folder)} {arguments}"


def write_failures(folder: Path, findings: Findings, settings: Setup) -> list[str]:
    """Write failures as folders for ``concord case run``; return problems."""
    problems: list[str] = []
    options = {name: getattr(settings, name) for name in SETTINGS}
    for failure in findings.failures:
        backend, dtype = failure.result.backend, failure.result.dtype
        version = findings.environments.get(backend, {}).get("version")
        about = {"versions": {**machine.describe(), backend: version}, "settings": options}
        case = case_files(failure.case.job(failure.name))
        # Folders are named by content: the same finding with the same settings is written once, and folders
        # are never replaced.
        content = hashlib.sha256(b"".join([*case.values(), str([backend, options]).encode()]))
        target = folder / f"{failure.name}-{dtype}-{content.hexdigest()[:8]}"
        text = record.lines({**record.plain(failure), **about}).encode()
        with collecting(problems):
            with contextlib.suppress(FileExistsError):
                write_folder(target, {**case, "found.json": text})
            failure.folder = str(target)
    return problems
