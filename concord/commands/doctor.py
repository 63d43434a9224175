"""``concord doctor``: installed backends, and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich.table import Table
from rich.text import Text

from concord import options
from concord.conformance.run import environment as diagnoses
from concord.conformance.wording import plain
from concord.terminal import Terminal

SUMMARY = ("version", "devices", "threads", "dtypes")  # facts in the table of all backends


def doctor(*, workers: options.Workers) -> None:
    """Show what is installed, and how to fix what is not.

    Examples: concord doctor --backend torch
    """
    console, settings, names = Terminal(), workers.settings(), workers.names()
    with console.status("starting each backend to query it", spinner="line"):
        installed = diagnoses.diagnose(names, settings)
    advice = [f"{entry.backend}: {line}" for entry in installed for line in entry.advice]
    for line in (*diagnoses.conclusions(installed, settings), *advice):
        console.tell(line, style="yellow")
    console.print()
    console.print(_facts(diagnoses.machine()))
    console.print()
    if workers.backend:
        for entry in installed:
            console.tell(f"{entry.backend}: {entry.status}", style="bold")
            console.print(_facts(entry.facts))
    else:
        console.print(_summary(installed))
        console.tell("concord doctor --backend NAME shows full details of a backend")
    ready = all(
        entry.status == "ready" or (entry.status == "absent" and not workers.backend) for entry in installed
    )
    raise typer.Exit(0 if ready else 3)


def _facts(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for fact, value in facts.items():
        table.add_row(fact, Text(plain(value)))
    return table


def _summary(installed: Sequence[diagnoses.Installed]) -> Table:
    table = Table("backend", "", *SUMMARY, box=None)
    for entry in installed:
        ready = entry.status == "ready"
        facts = [entry.facts.get(name) for name in SUMMARY] if ready else [entry.facts["message"]]
        table.add_row(entry.backend, entry.status, *(Text(plain(fact)) for fact in facts))
    return table
