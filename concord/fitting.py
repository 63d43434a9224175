"""What ``concord train`` and ``concord show curves`` do with their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concord import options, spec, writing
from concord.ending import halting
from concord.progress import bars
from concord.spec import runs
from concord.spec.config import FIELDS, EncoderConfig, from_toml
from concord.spec.errors import SpecError, unknown
from concord.spec.files import parse_toml, read_text
from concord.spec.training.recipe import Recipe, recipe, rounded_hyperparameters
from concord.terminal import Terminal
from concord.terminal import figures as show_figures
from concord.training import checkpoint
from concord.training.ordinary import Outcome, fit

if TYPE_CHECKING:
    from concord.conformance.campaign import Settings
    from concord.training.checkpoint import Checkpoint
    from concord.training.data import Corpus


def one_backend(asked: list[str] | None, *elsewhere: list[str] | None) -> str:
    """Return the backend that trains.

    Args:
        elsewhere: options that place a backend, as :func:`concord.options.names` takes them.

    Raises:
        SpecError: if there is not exactly one, or none of that name, or another one is placed.
    """
    if len(asked or ()) != 1:
        raise SpecError(
            f"--backend is given {len(asked or ())} times but must be given once: one framework trains the model"
        )
    return options.names(asked, *elsewhere)[0]


def named_recipe(text: str) -> str:
    """Take the name of a recipe; one that is a file is read."""
    return str(writing.path(text)) if text.endswith(".toml") else text


def refuse_used(out: Path) -> None:
    """Refuse a folder in which there is a run, or that the command reads.

    Raises:
        SpecError: if it is one.
    """
    writing.check_apart(out)
    if runs.steps(out):
        raise SpecError(
            f"{out}: holds a run already; --resume {out} goes on with it, --out names another folder"
        )


def described(
    variant: str | None,
    config: Path | None,
    named: str,
    changes: Sequence[str],
    pretrained: EncoderConfig | None = None,
) -> tuple[EncoderConfig, Recipe]:
    """Return the model and the recipe that the options describe.

    Args:
        named: a known recipe, or a TOML file.
        changes: as ``NAME=VALUE``: fields of either; of the recipe alone, where the model has weights already.
        pretrained: the model of a checkpoint.

    Raises:
        SpecError: listing what is unknown or wrong.
    """
    if (variant is not None) + (config is not None) + (pretrained is not None) != 1:
        raise SpecError("give one of --variant, --config and --checkpoint")
    model = (
        spec.variant(variant)
        if variant
        else from_toml(read_text(config), str(config))
        if config
        else pretrained
    )
    assert model is not None
    how = checkpoint.read_recipe(Path(named)) if named.endswith(".toml") else recipe(named)
    of_recipe = [field.name for field in fields(Recipe)]
    chosen: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or name not in (*FIELDS, *of_recipe):
            raise unknown("field in --set NAME=VALUE:", name, [*FIELDS, *of_recipe])
        chosen[name] = _value(value)
    if pretrained is not None and (fixed := [name for name in chosen if name in FIELDS]):
        raise SpecError(
            [
                f"--set {name} is given but --checkpoint is too: the checkpoint says what the model is"
                for name in fixed
            ]
        )
    return model.replace(**{n: v for n, v in chosen.items() if n in FIELDS}), how.replace(
        **{n: v for n, v in chosen.items() if n not in FIELDS}
    )


def _value(text: str) -> Any:
    """Return what a value on the command line means: as in TOML, or a word."""
    try:
        value = parse_toml(f"value = {text}", "--set")["value"]
    except SpecError:
        return text
    return tuple(value) if isinstance(value, list) else value


def going_on(
    run: Path, limits: dict[str, Any], *elsewhere: list[str] | None
) -> tuple[Checkpoint, dict[str, Corpus]]:
    """Return the last checkpoint of a run, with limits given anew, and its samples.

    Args:
        elsewhere: options that place its backend, as :func:`concord.options.names` takes them.

    Raises:
        SpecError: if there is none, another backend is placed, or the samples are others now.
    """
    from concord.training.beginning import again

    start = checkpoint.read(run, "last")
    anew = {name: value for name, value in limits.items() if value is not None}
    if start.progress.plan is not None:
        options.names([start.progress.plan.backend], *elsewhere)
    if start.progress.plan is not None and anew:
        start = replace(
            start, progress=replace(start.progress, plan=replace(start.progress.plan, **anew), ended="")
        )
    return start, again(start)


def warn(recipe: Recipe, dtype: str) -> None:
    """Say before the first step what of a recipe the precision does not hold as it is meant (SPEC OPT-11)."""
    for lost in rounded_hyperparameters(recipe, dtype):
        Terminal(stderr=True).print(
            f"warning: {lost.text}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )


def run(start: Checkpoint, corpora: dict[str, Corpus], folder: Path, settings: Settings) -> Outcome:
    """Train, and say how far it has come.

    Args:
        settings: of the worker; device, threads and determinism are the plan's.

    Raises:
        SpecError, WorkerFailure, Unsupported: as :func:`concord.training.ordinary.fit` does.
        KeyboardInterrupt: when interrupted, after a checkpoint was kept.
    """
    from concord.training.beginning import planned_steps, source

    plan, recipe = start.progress.plan, start.recipe
    assert plan is not None
    assert recipe is not None
    if start.progress.ended:
        return Outcome(start)
    total = planned_steps(recipe, plan, corpora["train"])
    warn(recipe, plan.dtype)
    place = replace(settings, device=plan.device, threads=plan.threads, deterministic=plan.deterministic)
    with (
        place.open(plan.backend) as worker,
        bars([plan.backend], total, "steps") as reached,
        halting() as halted,
    ):
        outcome = fit(worker, start, source(start, corpora), folder, halted, partial(reached, plan.backend))
        if not outcome.last.progress.ended:
            Terminal(stderr=True).print(
                f"a checkpoint of step {outcome.last.progress.step} was kept; --resume {folder} goes on",
                soft_wrap=True,
            )
    return outcome


def compare(runs: Sequence[Path], picture: Path | None) -> None:
    """Print figures of runs, and draw curves.

    Raises:
        SpecError: if a run cannot be read, or something cannot be written.
    """
    runs = list(dict.fromkeys(runs))
    from concord.training import curves  # what draws them need not be installed where nothing is drawn

    console, logs = Terminal(), curves.of_runs(runs)
    rows = [curves.row(run, *named) for run, named in zip(runs, logs.items(), strict=True)]
    show_figures(console, curves.HEADINGS, rows, curves.LESS, ("run", "backend", "ended by"))
    writing.write(console, (picture, lambda: curves.figure(logs)))
