"""What ``concord train --lockstep`` does with its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from concord import fitting, options, writing
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.cases import STEPS as STANDARD_STEPS
from concord.conformance.lockstep.cases import example, standard
from concord.conformance.lockstep.conduct import conduct
from concord.conformance.lockstep.outcome import MODES
from concord.conformance.lockstep.report import show
from concord.progress import bars
from concord.spec.errors import SpecError, unknowns
from concord.spec.precision import PRECISIONS
from concord.spec.training.trajectory import Training
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.training.checkpoint import Checkpoint
    from concord.training.data import Corpus

CASES = ("standard",)
"""What can be trained by name."""

OF_DATA = "without --data it trains on batches of its own, which need no samples"
OF_RECIPE = "without --data, --set NAME=VALUE changes the recipe there"
OF_RUNS = "it leaves no run that is evaluated, kept or gone on with"

WITH_DATA = {
    **dict.fromkeys(
        ("layout", "columns", "on_error", "tokenization", "vocabulary", "vocab_file", "bucketed", "pad_to"),
        OF_DATA,
    ),
    **dict.fromkeys(("learning_rate", "schedule", "warmup", "dropout", "accumulation"), OF_RECIPE),
}
"""Options of ordinary training that lockstep takes with ``--data`` alone, and why."""

ORDINARY = {
    **dict.fromkeys(("dev", "test"), OF_RUNS),
    "dropout_by": "what a framework's own dropout drops cannot be known to the oracle",
    **dict.fromkeys(("epochs", "minutes"), "--steps ends it"),
    **dict.fromkeys(
        (
            "patience",
            "log_every",
            "evaluate_every",
            "save_every",
            "best_by",
            "out",
            "resume",
            "curves_file",
        ),
        OF_RUNS,
    ),
}
"""Options of ordinary training that lockstep has no use for, and why."""

STEPS, BATCH, TOKENS = 20, 4, 11
"""How much is trained unless something else is asked for."""


def chosen(
    case: str | None, variant: str | None, config: Path | None, recipe_name: str, changes: Sequence[str], steps: int | None, batch: int | None, tokens: int | None, seed: int, dtype: str,
    data: Path | None = None,
) -> JudgedTraining:  # fmt: skip
    """Return the training that the options describe: a case by name, or a model and a recipe on random batches.

    Args:
        data: samples, which a case by name has no use for.
        recipe_name: a known recipe, or a TOML file.
        changes: as ``NAME=VALUE``: fields of configuration or recipe.

    Raises:
        SpecError: listing what is unknown, wrong or missing.
    """
    sizes = (("--steps", steps, 1), ("--batch", batch, 1), ("--tokens", tokens, 1), ("--seed", seed, 0))
    problems = [
        f"{option} is {size} but must be at least {least}"
        for option, size, least in sizes
        if size is not None and size < least
    ]
    problems += unknowns("dtype", [dtype], PRECISIONS)
    if (case is not None) + (variant is not None) + (config is not None) != 1:
        problems.append("give one of --case, --variant and --config")
    elif case is not None and case not in CASES:
        problems += unknowns("case of lockstep", [case], CASES)
    elif case is not None and (batch is not None or tokens is not None or changes or data):
        problems.append(
            f"--case {case} has batches and a recipe of its own: --data, --batch, --tokens and --set are for --variant and --config"
        )
    if problems:
        raise SpecError(problems)
    if case is not None:
        return standard(steps or STANDARD_STEPS, seed, dtype)
    model, recipe = fitting.described(variant, config, recipe_name, changes)
    longest = model.max_positions - model.position_start
    if tokens is not None and tokens > longest:
        raise SpecError(
            f"--tokens is {tokens} but must be at most {longest}: the model has no positions for more"
        )
    return example(model, recipe, steps or STEPS, batch or BATCH, tokens or min(TOKENS, longest), seed, dtype)


def refuse_ordinary(context: typer.Context, data: bool) -> None:
    """Refuse options of ordinary training where frameworks train in lockstep.

    Args:
        data: whether there are samples.

    Raises:
        SpecError: naming each.
    """
    refused = ORDINARY if data else {**WITH_DATA, **ORDINARY}
    problems = [
        f"{option} is given but --lockstep is too: {why}" for option, why in options.typed(context, refused)
    ]
    if problems:
        raise SpecError(problems)


def on_samples(start: Checkpoint, corpora: Mapping[str, Corpus]) -> JudgedTraining:
    """Return the training that a run begins with: its own batches in its own order, as many steps as its plan says."""
    from concord.training import beginning

    plan, recipe = start.progress.plan, start.recipe
    assert plan is not None
    assert recipe is not None
    training = Training(
        recipe, list(islice(beginning.accumulations(start, corpora), plan.steps)), start.progress.seed
    )
    return JudgedTraining(start.config, start.weights, training, dtype=plan.dtype)


def refuse_alone(case: str | None, free_running: bool, stop_first: bool, json: Path | None) -> None:
    """Refuse options of lockstep without it.

    Raises:
        SpecError: naming each.
    """
    given = {
        "--case": case is not None,
        "--free-running": free_running,
        "--stop-first": stop_first,
        "--json": json is not None,
    }
    if any(given.values()):
        raise SpecError(
            [
                f"{option} is given but --lockstep is not: it is for that alone"
                for option, there in given.items()
                if there
            ]
        )


def run(
    made: Callable[[], JudgedTraining],
    backend: list[str] | None,
    how: Sequence[Any],
    free: bool,
    stop_first: bool,
    json: Path | None,
    html: Path | None,
) -> int:
    """Train in lockstep, print what came of it, and write it; return the exit code.

    Args:
        made: gives the training.
        how: what :func:`concord.options.settings` takes after the backends; the fourth and fifth place them.

    Raises:
        SpecError: for options that describe no training, and if something cannot be written.
    """
    writing.check(json, html)
    settings, names, case = options.collect(
        lambda: options.settings(backend, *how), lambda: options.names(backend, *how[3:5]), made
    )
    mode, steps, console = MODES[free], len(case.training.windows), Terminal()
    fitting.warn(case.training.recipe, case.dtype)
    with bars(names, steps, "steps") as reached:
        found = conduct(case, names, settings, mode, stop_first, lambda name, done: reached(name, done, ""))
    title = f"Lockstep: {steps} steps, {case.dtype}, {mode}, seed {case.training.seed}"
    writing.outcome(found, "lockstep", title, console, json, html, lambda: show(found, console, title))
    return found.exit_code
