"""Bugs that leave all values unchanged and appear only in gradients (SPEC GRD-1 to GRD-5).

The gradient is that of a different function, so the error appears in the step's parameters and all preceding
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.attention import VECTOR
from concord.conformance.bugs.context import Array, Context, Edits, Flags
from concord.conformance.bugs.norms import one


def times(m: Context, factor: float = 1.0, **powers: float) -> Array:
    """Multiply the gradient of a tap by a factor and by powers of sizes."""
    return m.with_gradient(m.y, lambda gradient: gradient * (factor * m.size(**powers)))


def with_gradient_of(m: Context, other: Array) -> Array:
    """The tap with the gradient of ``other``."""
    return m.value_of(m.y, other)


def slope(m: Context, derivative: Array) -> Array:
    return with_gradient_of(m, m.x * m.stop_gradient(derivative))


def detached(m: Context) -> Array:
    return m.stop_gradient(m.y)


def stopped(m: Context, flags: Flags) -> Array:
    return m.where(flags, detached(m), m.y)


def embedding_gradient_of_first_use(m: Context) -> Array:
    used = [[value in row[:place] for place, value in enumerate(row)] for row in m.ids.tolist()]
    return stopped(m, np.array(used)[..., None])


# Activations.


def gelu_gradient_without_density(m: Context) -> Array:
    return slope(m, (m.erf(m.x / math.sqrt(2.0)) + 1.0) * 0.5)


def tanh_gradient_sign(m: Context) -> Array:
    return slope(m, m.tanh(m.x) * m.tanh(m.x) + 1.0)


def tanh_gradient_of_rounded(m: Context) -> Array:
    tanh = m.rounded(m.tanh(m.x), "bfloat16")
    return slope(m, 1.0 - tanh * tanh)


# Attention.


def of_softmax(m: Context, pull: Callable[[Array, Array], Array]) -> Array:
    """The softmax with a derivative computed from gradient and weights."""
    weights = detached(m)
    return with_gradient_of(m, m.with_gradient(m.unnormalised, lambda gradient: pull(gradient, weights)))


def softmax_gradient_without_row_term(m: Context) -> Array:
    """Differentiate softmax elementwise: p g, without the row term."""
    return of_softmax(m, lambda gradient, weights: gradient * weights)


def softmax_gradient_without_sum(m: Context) -> Array:
    scores = m.unnormalised
    powers = m.exp(scores - m.max(scores, 3))
    return with_gradient_of(m, powers / m.stop_gradient(m.sum(powers, 3)))


def value_gradient_tail_dropped(m: Context) -> Array:
    width = tuple(m.y.shape)[-1]
    return stopped(m, np.arange(width) >= width // VECTOR * VECTOR)


# Norms.


def norm_mean_detached(m: Context) -> Array:
    return m.norm(m.x, center=lambda x, mean: x - m.stop_gradient(mean))


def norm_variance_detached(m: Context) -> Array:
    return m.norm(m.x, deviation=lambda variance: m.stop_gradient(m.deviation(variance)))


def norm_shared_counted_twice(m: Context) -> Array:
    def twice(x: Array) -> Array:
        return x + (x - m.stop_gradient(x))

    return m.norm(m.x, gain=twice, offset=twice)


def norm_gradient_without_gain(m: Context) -> Array:
    row = m.norm(m.x, gain=one, offset=lambda offset: offset * 0.0)
    gained = m.stop_gradient(row) * m.weight(f"{m.owner}.weight")
    return with_gradient_of(m, row + gained + m.weight(f"{m.owner}.bias"))


def norm_gradient_unbiased(m: Context) -> Array:
    factor = m.config.d_model / (m.config.d_model - 1.0)
    return m.norm(m.x, variance=lambda variance: m.value_of(variance, variance * factor))


def norm_gradient_of_some_rows(m: Context) -> Array:
    """Omit the last rows, an incomplete block of four, from the gradients of gain and offset."""
    batch, tokens, _ = tuple(m.y.shape)
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1)
    without = m.norm(m.x, gain=m.stop_gradient, offset=m.stop_gradient)
    return m.where(rows < batch * tokens // VECTOR * VECTOR, m.y, without)


# Residuals and linear layers.


def residual_detached(m: Context) -> Array:
    return m.stop_gradient(m.x) + m.source("result")


def residual_gradient_halved(m: Context) -> Array:
    return with_gradient_of(m, m.x * 0.5 + m.source("result"))


def bias_gradient_twice(m: Context) -> Array:
    bias = m.weight(f"{m.scope}.outer.bias")
    return m.y + (bias - m.stop_gradient(bias))


EDITS: Edits = {
    "embedding_gradient_without_first": lambda m: stopped(m, m.flags(1, 0)),
    "gelu_gradient_by_tanh": lambda m: with_gradient_of(m, m.gelu_tanh(m.x)),
    "relu_gradient_guided": lambda m: m.with_gradient(m.y, m.relu),
    "softmax_gradient_of_real_queries": lambda m: stopped(m, ~m.real[:, None, :, None]),
    "query_gradient_last_row_dropped": lambda m: stopped(m, m.flags(1, -1)),
    "key_gradient_of_first_head": lambda m: stopped(m, ~m.flags(2, 0)),
}
