"""``concord mutants``: plant bugs in backends, and show which ones are found."""

from __future__ import annotations

from dataclasses import replace

import typer

from concord import options
from concord.conformance.mutants import detection_table, matrix
from concord.exit_codes import halting
from concord.spec.errors import collect
from concord.terminal import Terminal, counting


def mutants(
    *,
    mutant: list[str] | None = None,
    every: bool = False,
    workers: options.Workers,
    outputs: options.Outputs,
) -> None:
    """Plant porting bugs in each backend in turn, and show which ones are found.

    Args:
        mutant (M): A mutant by name, or an operation for all of its mutants; may be repeated.
            Default: all.
        every: Plant each mutant in every backend.

    Examples: concord mutants --mutant mask_missing --every
    """
    outputs.check()
    settings, names, bugs = collect(
        workers.settings,
        lambda: matrix.mutable(workers.backend),
        lambda: matrix.select_mutants(mutant),
    )
    settings = replace(settings, python={matrix.plugin(name): path for name, path in settings.python.items()})
    title = f"{len(bugs)} mutant{'' if len(bugs) == 1 else 's'}"
    with halting() as stopped:  # after the first signal, the findings so far are written and shown
        turns = matrix.turns(bugs, names, every)
        with counting(names, max(map(len, turns.values()))) as progress:
            outcome = matrix.conduct(turns, settings, progress, stopped)
        code = outcome.exit_code
        if outcome.findings or not stopped():
            code = outputs.finish(
                outcome, "mutants", title, lambda: detection_table.show(outcome, Terminal())
            )
    raise typer.Exit(code)
