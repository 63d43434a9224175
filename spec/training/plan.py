"""What is going to be done in training, in a form that can be compared across frameworks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.parameters import parameters
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Course, Training

CONSTANTS = ("momentum", "dampening", "beta1", "beta2", "epsilon", "weight_decay", "clip_at", "clip_epsilon")
"""Numbers of a recipe that an optimizer holds."""


@dataclass(frozen=True)
class StepPlan:
    """What is going to be done.

    Attributes:
        batches: of each step, a digest of each batch.
        masks: a digest of which elements are kept, by step, number of the batch and site, as
            ``<step>.<number>.<site>``.
        rates: the learning rate of each step.
        decayed: the parameters that decay, by canonical name.
        constants: those of :data:`CONSTANTS` that are used, as they are held.
    """

    batches: list[list[str]]
    masks: dict[str, str]
    rates: list[float]
    decayed: list[str]
    constants: dict[str, float]


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return a digest of arrays: of their shapes and values, whatever their types."""
    found = hashlib.sha256()
    for array in arrays:
        exact = np.ascontiguousarray(array, np.float64 if array.dtype.kind == "f" else np.int64)
        found.update(f"{exact.shape}".encode())
        found.update(exact.data)
    return found.hexdigest()[:16]


def decays(recipe: Recipe, kind: str) -> bool:
    """Return whether parameters of a kind decay (SPEC OPT-6)."""
    return recipe.weight_decay > 0 and recipe.decay_form != "none" and kind not in recipe.undecayed


def constants(recipe: Recipe) -> dict[str, float]:
    """Return the numbers that an optimizer of this recipe holds."""
    adam, sgd = recipe.algorithm == "adam", recipe.algorithm == "sgd"
    used = {
        "momentum": not adam and recipe.momentum > 0,
        "dampening": sgd and recipe.dampening > 0,
        "beta1": adam,
        "beta2": not sgd,
        "epsilon": not sgd,
        "weight_decay": recipe.weight_decay > 0,
        "clip_at": recipe.clip_at is not None,
        "clip_epsilon": recipe.clip_at is not None and recipe.clipping != "value",
    }
    return {name: float(getattr(recipe, name)) for name in CONSTANTS if used[name]}


def plan(config: EncoderConfig, training: Training, part: str = "model", masked: int = 1) -> StepPlan:
    """Return what training is to do (SPEC OPT-1, OPT-6, OPT-9, OPT-10, DRP-3).

    Args:
        masked: of how many steps the masks of dropout are told.
    """
    course, drawn, rates = Course(config, training, part), dict[str, str](), list[float]()
    for course.steps, batches in enumerate(training.steps):
        rates.append(course.rate())
        for number, batch in enumerate(batches if course.steps < masked else ()):
            drawn |= {
                f"{course.steps}.{number}.{tap}": digest([keep])
                for tap, (keep, _) in course.masked(batch, number).items()
            }
    return StepPlan(
        [[digest(batch.arrays().values()) for batch in batches] for batches in training.steps],
        drawn,
        rates,
        [
            name
            for name, entry in parameters(config, part).items()
            if entry.trainable and decays(training.recipe, entry.kind)
        ],
        constants(training.recipe),
    )
