"""The runs that make bugs of training visible.

A small model, batches of unequal sizes, labels that do not count, a short last accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.training.step import Batches
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, variant
from concord.spec.parameters import Weights, initialize
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

VARIANT = "bert"
SIZES = {
    "vocab_size": 17,
    "max_positions": 7,
    "d_model": 6,
    "num_heads": 2,
    "d_ff": 11,
    "num_layers": 1,
    "num_classes": 3,
    "ignore_label": 0,
}
TOKENS = 5
SEED = 2**40 + 11

SAMPLES = (5, 2, 5, 2, 5, 2, 5)
"""Of each batch; of every three samples one has a label that does not count. Two sizes: JAX compiles every
step for each.
"""

IN_ORDER = ((0, 1), (2, 3), (4, 5), (6,))
TWO_EPOCHS = ((0, 1), (2, 3), (3, 0), (1, 2))

COMMON: Mapping[str, Any] = {
    "learning_rate": 0.02,
    "accumulation": 2,
    "accumulation_mean": "labels",
    "clipping": "global_norm",
    "clip_at": 0.9,
    "schedule": "linear",
    "warmup_steps": 3,
    "total_steps": 7,
    "final_share": 0.1,
}
DECAY: Mapping[str, Any] = {
    "weight_decay": 0.3,
    "decay_form": "times_rate",
    "undecayed": ("bias", "gamma", "beta"),
}
DROPOUT = {
    f"dropout_{site}": 0.1 + 0.03 * place
    for place, site in enumerate(
        ("embeddings", "weights", "attention", "activation", "feed_forward", "output", "head")
    )
}


@dataclass(frozen=True)
class TrainingRun:
    """A run of training.

    Attributes:
        recipe: fields of its recipe.
        order: of each step, which batches it accumulates.
        resume: the step before which training stops and goes on from a checkpoint; 0: it does not.
    """

    recipe: Mapping[str, Any]
    order: tuple[tuple[int, ...], ...] = IN_ORDER
    resume: int = 0


ADAM: Mapping[str, Any] = {**COMMON, "algorithm": "adam"}
ADAMW: Mapping[str, Any] = {**ADAM, **DECAY}
OUTSIDE: Mapping[str, Any] = {"epsilon": 1e-3, "epsilon_placement": "uncorrected"}

RUNS: dict[str, TrainingRun] = {
    "adamw": TrainingRun(ADAMW),
    "keras-adam": TrainingRun({**ADAM, **OUTSIDE}),
    "adam-l2": TrainingRun(
        {**ADAMW, "decay_form": "coupled", "amsgrad": True, "epsilon": 1e-3, "beta2": 0.7}
    ),
    "lazy-adam": TrainingRun({**ADAMW, "embedding_updates": "lazy", "embedding_gradients": "slices"}),
    "sgd": TrainingRun(
        {
            **{**COMMON, **DECAY, "algorithm": "sgd", "momentum": 0.9, "dampening": 0.3},
            **{"clipping": "none", "clip_at": None, "decay_form": "coupled"},
        }
    ),
    "nesterov": TrainingRun(
        {**COMMON, "algorithm": "sgd", "momentum": 0.9, "nesterov": True, "schedule": "cosine"}
    ),
    "rmsprop": TrainingRun(
        {**COMMON, **OUTSIDE, "algorithm": "rmsprop", "momentum": 0.9, "centered": True, "beta2": 0.99}
    ),
    "noam": TrainingRun({**ADAM, "schedule": "inverse_square_root", "total_steps": None, "final_share": 0.0}),
    "dropout": TrainingRun({**ADAMW, **DROPOUT}),
    "epochs": TrainingRun(ADAMW, order=TWO_EPOCHS),
    "resumed": TrainingRun({**ADAMW, **DROPOUT, "amsgrad": True}, resume=2),
}
"""By name."""


@functools.cache
def model() -> tuple[EncoderConfig, Weights]:
    """Return the model that all runs train, with its first weights."""
    config = variant(VARIANT, **SIZES)
    return config, initialize(config, seed=3)


@functools.cache
def batches() -> tuple[Batch, ...]:
    """Return the batches of all runs."""
    config, _ = model()
    return tuple(
        example_batch(config, batch=size, tokens=TOKENS, seed=number, padding="ragged")
        for number, size in enumerate(SAMPLES)
    )


def training_of(name: str, options: Mapping[str, Any] | None = None) -> Training:
    """Return the training of a run, all of which is reported."""
    run = RUNS[name]
    steps: list[Batches] = [[batches()[number] for number in numbers] for numbers in run.order]
    return Training(Recipe(**{**run.recipe, **(options or {})}), steps, SEED, tuple(range(len(steps))))


def shown_by(bug: Bug) -> tuple[Training, int]:
    """Return the training that makes a bug visible, and the step before which it is resumed."""
    return training_of(bug.scenario, bug.options), RUNS[bug.scenario].resume
