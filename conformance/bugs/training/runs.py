"""Training runs that make bugs visible.

They use a small model, batches of unequal sizes, uncounted labels, and a short last accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.training.edited_step import Batches
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, variant
from concord.spec.files import parse_toml, read_text
from concord.spec.parameters import Weights, initialize
from concord.spec.training.recipe import Recipe, recipe_from_mapping
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
"""Size of each batch; only two sizes, because JAX compiles every step for each. One of every three samples
has a label that does not count.
"""


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        order: indices of each step's batches.
    """

    recipe: Recipe
    order: Sequence[Sequence[int]] = ((0, 1), (2, 3), (4, 5), (6,))
    resume: int = 0


def _runs() -> Iterator[tuple[str, TrainingRun]]:
    path = Path(__file__).with_name("runs.toml")
    entries = parse_toml(read_text(path), path.name)
    for name, run in entries["runs"].items():
        fields = {key: value for like in run.pop("like") for key, value in entries["recipes"][like].items()}
        recipe = recipe_from_mapping({**fields, **run.pop("recipe", {})}, name)
        yield name, TrainingRun(recipe, **run)


RUNS = dict(_runs())


@functools.cache
def model() -> tuple[EncoderConfig, Weights]:
    config = variant(VARIANT, **SIZES)
    return config, initialize(config, seed=3)


@functools.cache
def batches() -> tuple[Batch, ...]:
    config, _ = model()
    return tuple(
        example_batch(config, batch=size, tokens=TOKENS, seed=number, padding="ragged")
        for number, size in enumerate(SAMPLES)
    )


def training_of(name: str, options: Mapping[str, Any] | None = None) -> Training:
    run = RUNS[name]
    steps: list[Batches] = [[batches()[number] for number in numbers] for numbers in run.order]
    return Training(run.recipe.replace(**(options or {})), steps, SEED, tuple(range(len(steps))))


def shown_by(bug: Bug) -> tuple[Training, int]:
    return training_of(bug.scenario, bug.options), RUNS[bug.scenario].resume
