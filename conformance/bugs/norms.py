"""Bugs in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from concord.conformance.bugs.bug import Changes, of_source, weights
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")
RESIDUALS = ("*.residual1", "*.residual2")


def axes(*given: int) -> Edit:
    """Return a norm whose mean and variance are over some axes."""
    return of_source(lambda m, x: m.norm(x, axes=given))


def normed(**how: Callable[..., Array]) -> Edit:
    """Return the norm with some of its steps taken in another way, made of the context and what they take."""

    def edit(m: Context, y: Array) -> Array:
        steps: dict[str, Any] = {name: partial(step, m) for name, step in how.items()}
        return m.norm(m.source(), **steps)

    return edit


def one(m: Context, gain: Array) -> Array:
    return gain * 0.0 + 1.0


def zero(m: Context, offset: Array) -> Array:
    return offset * 0.0


def floored(m: Context, variance: Array) -> Array:
    """Take epsilon for the least that the variance can be, or the deviation."""
    epsilon = m.config.norm_epsilon
    if m.config.norm_epsilon_placement == "outside":
        root = m.sqrt(variance)
        return m.where(root > epsilon, root, epsilon)
    return m.sqrt(m.where(variance > epsilon, variance, epsilon))


def norm_before_residual(m: Context, y: Array) -> Array:
    """Norm what the sublayer gives, and add the residual to that."""
    of = m.tap.replace("norm", "residual")
    return m.source(of=of) + m.norm(m.source("result", of=of))


def total(made: Callable[[Array, Array], Array]) -> Edit:
    """Return something else than the sum of a sublayer's input and its result."""
    return lambda m, y: made(m.source(), m.source("result"))


def scaled(factor: float) -> Edit:
    """Return the sum whose second term is multiplied."""
    return total(lambda x, result: x + result * factor)


def sum_scaled(factor: float) -> Edit:
    return total(lambda x, result: (x + result) * factor)


WITHOUT_RESIDUAL = total(lambda x, result: result)

EDITS: Changes = {
    "norm_epsilon_as_floor": normed(deviation=floored),
    "norm_epsilon_lost": normed(deviation=lambda m, variance: m.sqrt(variance)),
    "norm_of_variance": normed(deviation=lambda m, variance: variance + m.config.norm_epsilon),
    "norm_mean_kept": normed(center=lambda m, x, mean: x),
    "norm_variance_about_zero": of_source(
        lambda m, x: m.norm(x, variance=lambda variance: m.mean(x * x, -1))
    ),
    "norm_gain_missing": normed(gain=one),
    "norm_offset_missing": normed(offset=zero),
    "norm_separate_for_shared": normed(gain=one, offset=zero),
    "norm_gain_from_zero": normed(gain=lambda m, gain: gain + 1.0),
    "residual_missing_in_norm": lambda m, y: m.norm(m.source("result", of=m.tap.replace("norm", "residual"))),
    "norm_shared_for_separate": weights(
        lambda config, given: {
            name: given[name.replace("norm2", "norm1")] for name in given if ".norm2." in name
        }
    ),
    "residual_of_normed_input": lambda m, y: m.now[m.tap.replace("residual", "norm")] + m.source("result"),
    "residual_of_layer_input": lambda m, y: (
        m.source(of=m.tap.replace("residual2", "residual1")) + m.source("result")
    ),
    "residual_before_norm": lambda m, y: m.now[f"{m.scope}.residual1"] + m.source("result"),
    "sublayer_missing": total(lambda x, result: x),
    "residual_subtracted": total(lambda x, result: x - result),
    "residual_twice": total(lambda x, result: x + x + result),
    "sublayers_in_parallel": lambda m, y: m.linear(m.tap, m.source(of=f"layers.{m.layer}.residual1")),
}
