"""``concord doctor``: what is installed, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from rich.table import Table
from rich.text import Text

from concord import options
from concord.conformance import doctor as diagnoses
from concord.conformance.wording import plain
from concord.terminal import Terminal


def doctor(workers: options.Places) -> None:
    """Show what is installed, how it is set, and what to do."""
    console, settings, names = Terminal(), workers.settings(), workers.names()
    console.print(_facts(diagnoses.machine()))
    with console.status("starting each backend to ask it", spinner="line"):
        found = diagnoses.diagnose(names, settings)
    for one in found:
        console.print()
        console.tell(f"{one.backend}: {one.status}", style="bold")
        table = _facts(one.facts)
        for advice in one.advice:
            table.add_row("advice", Text(advice), style="yellow")
        console.print(table)
    for line in diagnoses.conclusions(found, settings):
        console.print()
        console.tell(line, style="yellow")
    ready = all(one.status == "ready" or (one.status == "absent" and not workers.backend) for one in found)
    raise typer.Exit(0 if ready else 3)


def _facts(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for fact, value in facts.items():
        table.add_row(fact, Text(plain(value)))
    return table
