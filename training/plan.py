"""What a run of training was asked for: kept with each checkpoint, so that it can go on as it began."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from concord.backends.interface import Settings
from concord.spec.errors import refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.spec.training.dropout import GENERATORS
from concord.spec.training.recipe import RATES, Recipe

PAD_TO = 16
"""Tokens of a batch are a multiple of it: frameworks compile for each width, JAX each operation."""

DROPPED = (
    "dropout_embeddings",
    "dropout_weights",
    "dropout_attention",
    "dropout_feed_forward",
    "dropout_head",
)
"""Where ``--dropout`` drops, as BERT does."""

COUNTS = (
    "batch",
    "epochs",
    "steps",
    "log_every",
    "evaluate_every",
    "save_every",
    "patience",
    "threads",
    "tokens",
)
"""What is at least 1."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Settings):
    """How a model is trained, how long and on what, and what is looked at meanwhile.

    Attributes:
        backend: that trains it.
        data: the training samples, or a folder with ``train`` and ``dev``; None: there are none.
        dev: the samples to evaluate on, if they are elsewhere.
        columns, on_error: how samples are read (:func:`concord.training.data.read`).
        samples: SHA-256 of the training samples as they are encoded: a run goes on with these alone.
        tokenization: one of :data:`concord.training.data.TOKENIZATIONS`.
        vocabulary: tokens that are learnt at most; None: as many as the configuration has.
        tokens: of a sample; None: as many as the configuration has positions for.
        seed: of weights, order and dropout.
        batch: samples in a batch; a step accumulates as many as the recipe says.
        epochs, steps: whichever is reached first ends the run; None: no limit.
        log_every: steps between two lines of the log.
        evaluate_every: steps between two evaluations; None: after each epoch.
        save_every: steps between two checkpoints besides those at evaluations; None: no others.
        patience: evaluations without improvement that end the run; None: no number does.
        dropout_by: what decides which elements are dropped
            (:data:`concord.spec.training.dropout.GENERATORS`).
        threads: computing threads; None: one for each core.

    Raises:
        SpecError: listing every number that is out of range, and what is unknown.
    """

    backend: str = ""
    data: str | None = None
    dev: str | None = None
    columns: list[str] | None = None
    on_error: str = "fail"
    samples: str = ""
    tokenization: str = "characters"
    vocabulary: int | None = None
    tokens: int | None = None
    seed: int = 0
    batch: int = 32
    epochs: int | None = None
    steps: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int | None = None
    patience: int | None = None
    dropout_by: str = "spec"
    threads: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {value} but must be at least 1"
            for name in COUNTS
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.seed < 0:
            problems.append(f"--seed is {self.seed} but must be at least 0")
        if self.dropout_by not in GENERATORS:
            problems.append(f"--dropout-by is {self.dropout_by!r} but must be {' or '.join(GENERATORS)}")
        refuse(problems + unknowns("dtype", [self.dtype], PRECISIONS))

    @property
    def settings(self) -> Settings:
        """How it is computed."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})


def changed_recipe(
    recipe: Recipe,
    learning_rate: float | None = None,
    schedule: str | None = None,
    warmup: int | None = None,
    dropout: float | None = None,
    accumulation: int | None = None,
) -> Recipe:
    """Return a recipe with what is usually chosen anew.

    Args:
        dropout: the rate at each of :data:`DROPPED`; nothing is dropped elsewhere.

    Raises:
        ConfigError: if the result describes no training.
    """
    fields: dict[str, Any] = {
        "learning_rate": learning_rate,
        "schedule": schedule,
        "warmup_steps": warmup,
        "accumulation": accumulation,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if schedule is not None:
        ends = schedule in ("linear", "cosine")
        fields["total_steps"] = (
            (recipe.total_steps or fields.get("warmup_steps", recipe.warmup_steps) + 1) if ends else None
        )
    if dropout is not None:
        fields |= {name: dropout if name in DROPPED else 0.0 for name in RATES}
    return recipe.replace(**fields)
