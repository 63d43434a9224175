"""``concord mutants``: bugs put into every backend, and which are found."""

from __future__ import annotations

from dataclasses import replace

import typer

from concord import options
from concord.conformance.mutants import matrix, table
from concord.progress import counting
from concord.spec.errors import collect
from concord.terminal import Terminal


def mutants(
    *,
    workers: options.Workers,
    outputs: options.Outputs,
    mutant: list[str] | None = None,
) -> None:
    """Put porting bugs into every backend, and show what is found.

    Args:
        mutant (M): A mutant by name, or a group of them; may be repeated. Default: all.
    """
    outputs.check()
    settings, names, chosen = collect(
        workers.settings,
        lambda: matrix.mutable(workers.backend),
        lambda: matrix.chosen(mutant),
    )
    elsewhere = {matrix.plugin(name): path for name, path in settings.python.items()}
    settings = replace(settings, python=elsewhere)
    with counting(names, len(chosen)) as progress:
        found = matrix.conduct(chosen, names, settings, progress)
    title = f"{len(chosen)} mutant{'' if len(chosen) == 1 else 's'}"
    raise typer.Exit(outputs.finish(found, "mutants", title, lambda: table.show(found, Terminal())))
