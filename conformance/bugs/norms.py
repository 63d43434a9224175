"""Bugs in norms and residuals (SPEC NRM-1 to NRM-7, RES-1)."""

from __future__ import annotations

from functools import partial

from concord.conformance.bugs.bug import Edits, weights
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array

NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")
RESIDUALS = ("*.residual1", "*.residual2")


def axes(m: Context, *given: int) -> Array:
    """Return a norm whose mean and variance are over some axes."""
    return m.norm(m.x, axes=given)


def one(gain: Array) -> Array:
    return gain * 0.0 + 1.0


def zero(offset: Array) -> Array:
    return offset * 0.0


def floored(m: Context, variance: Array) -> Array:
    """Take epsilon for the least that the variance can be, or the deviation."""
    epsilon = m.config.norm_epsilon
    if m.config.norm_epsilon_placement == "outside":
        root = m.sqrt(variance)
        return m.where(root > epsilon, root, epsilon)
    return m.sqrt(m.where(variance > epsilon, variance, epsilon))


def result(m: Context) -> Array:
    """Return what the sublayer gives, before the residual or the norm after it."""
    return m.source("result", of=m.tap.replace("norm", "residual"))


def norm_before_residual(m: Context) -> Array:
    """Norm what the sublayer gives, and add the residual to that."""
    return m.source(of=m.tap.replace("norm", "residual")) + m.norm(result(m))


def scaled(m: Context, factor: float) -> Array:
    """Return the sum whose second term is multiplied."""
    return m.x + result(m) * factor


def sum_scaled(m: Context, factor: float) -> Array:
    return (m.x + result(m)) * factor


EDITS: Edits = {
    "norm_epsilon_as_floor": lambda m: m.norm(m.x, deviation=partial(floored, m)),
    "norm_epsilon_lost": lambda m: m.norm(m.x, deviation=m.sqrt),
    "norm_of_variance": lambda m: m.norm(m.x, deviation=lambda variance: variance + m.config.norm_epsilon),
    "norm_mean_kept": lambda m: m.norm(m.x, center=lambda x, mean: x),
    "norm_variance_about_zero": lambda m: m.norm(m.x, variance=lambda variance: m.mean(m.x * m.x, -1)),
    "norm_gain_missing": lambda m: m.norm(m.x, gain=one),
    "norm_offset_missing": lambda m: m.norm(m.x, offset=zero),
    "norm_separate_for_shared": lambda m: m.norm(m.x, gain=one, offset=zero),
    "norm_gain_from_zero": lambda m: m.norm(m.x, gain=lambda gain: gain + 1.0),
    "residual_missing_in_norm": lambda m: m.norm(result(m)),
    "norm_shared_for_separate": lambda r: weights(
        r,
        {name: r.weights[name.replace("norm2", "norm1")] for name in r.weights if ".norm2." in name},
    ),
    "residual_of_normed_input": lambda m: m.now[m.tap.replace("residual", "norm")] + result(m),
    "residual_of_layer_input": lambda m: m.source(of=m.tap.replace("residual2", "residual1")) + result(m),
    "residual_before_norm": lambda m: m.now[f"{m.scope}.residual1"] + result(m),
    "sublayer_missing": lambda m: m.x,
    "residual_subtracted": lambda m: m.x - result(m),
    "residual_twice": lambda m: m.x + m.x + result(m),
    "sublayers_in_parallel": lambda m: m.linear(m.tap, m.source(of=f"layers.{m.layer}.residual1")),
}
