"""``concord lockstep``: the same training in every framework, each step judged."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import typer

from concord import options, spec
from concord.conformance.judging.expectation import JudgedTraining
from concord.conformance.lockstep import training_cases
from concord.conformance.lockstep.outcome import MODES
from concord.conformance.lockstep.running import conduct, require_memory
from concord.conformance.lockstep.steps_report import show
from concord.options import Named
from concord.own_model import PARTS, weights_of
from concord.spec.config import from_toml
from concord.spec.errors import SpecError, collect, refuse, unknowns
from concord.spec.files import parse_toml, read_text
from concord.spec.precision import PRECISIONS
from concord.spec.training.recipe import Recipe, recipe_from_mapping, rounded_hyperparameters
from concord.spec.training.recipe import recipe as known_recipe
from concord.terminal import Terminal, bars

STEPS, BATCH, TOKENS = 20, 4, 11  # by default


def lockstep(
    checkpoint: Path | None = None,
    *,
    variant: Named | None = None,
    recipe: Named | None = None,
    steps: int | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    free_running: bool = False,
    dtype: str = "float32",
    workers: options.Runs,
    outputs: options.Outputs,
) -> None:
    """Train on the same batches in every framework, and judge each step.

    Args:
        checkpoint ([CHECKPOINT]): A checkpoint in any format, whose weights are trained.
        variant (V): A variant, or a model of your own as a TOML file. Without --variant or CHECKPOINT: the
            standard case, with its own batches and recipe.
        recipe (R): A known recipe, or a TOML file. Default: adamw.
        steps: Training steps. Default: {STEPS}; {training_cases.STEPS} in the standard case.
        batch: Samples in a batch. Default: {BATCH}.
        tokens: Tokens in a sample. Default: {TOKENS}.
        seed: The seed of weights, batches and dropout.
        free_running: Let each backend continue from its own last step; show curves, and judge
            nothing.

    Examples: concord lockstep --steps 50 --backend torch --backend jax
    """
    outputs.check()
    problems = options.outside(
        *((name, size, 1, inf) for name, size in (("steps", steps), ("batch", batch), ("tokens", tokens))),
        ("seed", seed, 0, inf),
    ) + unknowns("dtype", [dtype], PRECISIONS)

    def case() -> JudgedTraining:
        refuse(problems)
        if checkpoint is None and variant is None:
            choices = {"recipe": recipe, "batch": batch, "tokens": tokens}
            reason = "neither --variant nor CHECKPOINT is: the standard case has its own batches and recipe"
            refuse(
                [f"--{name} is given but {reason}" for name, value in choices.items() if value is not None]
            )
            return training_cases.standard(steps or training_cases.STEPS, seed, dtype)
        model, training_recipe = _model(checkpoint, variant), _recipe(recipe or "adamw")
        config = model.pop("config")
        longest = config.max_tokens
        if tokens is not None and tokens > longest:
            raise SpecError(
                f"--tokens is {tokens} but must be at most {longest}: the model has no more positions"
            )
        # A classifier of all positions has weights for each.
        usual = longest if config.pooling == "flatten" else min(TOKENS, longest)
        size = (steps or STEPS, batch or BATCH, tokens or usual)
        return training_cases.example(config, training_recipe, *size, seed, dtype, **model)

    settings, names, training = collect(workers.settings, workers.names, case)
    require_memory(training, names)
    mode, count = MODES[free_running], len(training.training.steps)
    # For example, a beta2 of 0.999 is 1 in bfloat16, which affects the curves.
    for warning in rounded_hyperparameters(training.training.recipe, dtype):
        Terminal(stderr=True).tell(f"warning: {warning}", style="yellow")
    with bars(names, count, "steps") as advance:
        for name in names:
            advance(name, 0, "started")
        outcome = conduct(training, names, settings, mode, advance)
    title = f"Lockstep: {count} steps, {dtype}, {mode}, seed {seed}"
    raise typer.Exit(outputs.finish(outcome, "lockstep", title, lambda: show(outcome, Terminal(), title)))


def _recipe(name: str) -> Recipe:
    if name.endswith(".toml"):
        return recipe_from_mapping(parse_toml(read_text(Path(name)), name), name)
    return known_recipe(name)


def _model(checkpoint: Path | None, variant: str | None) -> dict[str, Any]:
    if checkpoint is None and variant is not None:
        if variant.endswith(".toml"):
            return {"config": from_toml(read_text(Path(variant)), variant)}
        return {"config": spec.variant(variant)}
    assert checkpoint is not None
    if variant is not None:
        raise SpecError("--variant is given, but CHECKPOINT already determines the variant; leave one out")
    from concord import porting

    source = porting.read(checkpoint)
    if source.part not in PARTS:
        raise SpecError(
            f"{checkpoint} holds the part {source.part!r} but must hold one of {', '.join(PARTS)}"
        )
    return {"config": source.config, "weights": weights_of(source, source.part), "part": source.part}
