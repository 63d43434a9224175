"""Bugs of norms, residuals, other sums, and vector lengths (SPEC NRM-1 to NRM-7, RES-1, EMB-6, HED-5)."""

from __future__ import annotations

import math
from functools import partial

from concord.conformance.bugs.context import Array, Context, Edits, only

NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")
RESIDUALS = ("*.residual1", "*.residual2")


def one(gain: Array) -> Array:
    return gain * 0.0 + 1.0


def floored(m: Context, variance: Array) -> Array:
    epsilon = m.config.norm_epsilon
    if m.config.norm_epsilon_placement == "outside":
        root = m.sqrt(variance)
        return m.where(root > epsilon, root, epsilon)
    return m.sqrt(m.where(variance > epsilon, variance, epsilon))


def result(m: Context) -> Array:
    """The sublayer's output, before its residual or norm."""
    return m.source("result", of=m.tap.replace("norm", "residual"))


def norm_before_residual(m: Context) -> Array:
    return m.source(of=m.tap.replace("norm", "residual")) + m.norm(result(m))


def norm_of_padded_row(m: Context) -> Array:
    """Pad rows with zeros to a power of two, and count their distances from the mean."""
    size, mean = m.config.d_model, m.mean(m.x, -1)
    width = 2 ** math.ceil(math.log2(size))
    return m.norm(m.x, variance=lambda variance: variance + mean * mean * (width / size - 1))


def variance_in(m: Context, number_format: str) -> Array:
    return m.norm(m.x, variance=lambda variance: m.round_to(variance, number_format))


def variance_by_squares(m: Context) -> Array:
    mean = m.mean(m.x, -1)
    return m.norm(m.x, variance=lambda variance: m.mean(m.x * m.x, -1) - mean * mean)


def norm_deviation_by_one_step(m: Context) -> Array:
    def refined(variance: Array) -> Array:
        rough = m.round_to(1.0 / m.deviation(variance), "bfloat16")
        squared = m.deviation(variance) * m.deviation(variance)
        return 1.0 / (rough * (1.5 - squared * rough * rough * 0.5))

    return m.norm(m.x, deviation=refined)


def padding_zeroed(m: Context) -> Array:
    return m.where(m.real.reshape(*m.real.shape, *[1] * (len(m.y.shape) - 2)), m.y, m.y * 0.0)


EDITS: Edits = {
    "norm_epsilon_as_floor": lambda m: m.norm(m.x, deviation=partial(floored, m)),
    "norm_mean_kept": lambda m: m.norm(m.x, center=lambda x, mean: x),
    "norm_gain_missing": lambda m: m.norm(m.x, gain=one),
    "norm_over_tokens_of_one_sample": only(
        lambda m: m.ids.shape[0] == 1, lambda m: m.norm(m.x, axes=(-1, -2))
    ),
}
