"""``concord doctor``: what is installed, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich.table import Table
from rich.text import Text

from concord import options
from concord.conformance import doctor as diagnoses
from concord.conformance.wording import plain
from concord.terminal import Terminal

SUMMARY = ("version", "devices", "threads", "dtypes")
"""The facts that stand in one line for each backend."""


def doctor(*, workers: options.Workers) -> None:
    """Show what is installed and what to do; of each backend that is named, all that it says of itself."""
    console, settings, names = Terminal(), workers.settings(), workers.names()
    with console.status("starting each backend to ask it", spinner="line"):
        found = diagnoses.diagnose(names, settings)
    advice = [f"{one.backend}: {line}" for one in found for line in one.advice]
    for line in (*diagnoses.conclusions(found, settings), *advice):
        console.tell(line, style="yellow")
    console.print()
    console.print(_facts(diagnoses.machine()))
    console.print()
    if workers.backend:
        for one in found:
            console.tell(f"{one.backend}: {one.status}", style="bold")
            console.print(_facts(one.facts))
    else:
        console.print(_summary(found))
        console.tell("concord doctor --backend NAME shows all that a backend says of itself")
    ready = all(one.status == "ready" or (one.status == "absent" and not workers.backend) for one in found)
    raise typer.Exit(0 if ready else 3)


def _facts(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for fact, value in facts.items():
        table.add_row(fact, Text(plain(value)))
    return table


def _summary(found: Sequence[diagnoses.Installed]) -> Table:
    table = Table("backend", "", *SUMMARY, box=None)
    for one in found:
        ready = one.status == "ready"
        said = [one.facts.get(name) for name in SUMMARY] if ready else [one.facts["message"]]
        table.add_row(one.backend, one.status, *(Text(plain(fact)) for fact in said))
    return table
