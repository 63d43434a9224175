"""Steps of the model that are made of several operations, each computed otherwise than the reference does.

(SPEC ALG-3, ALG-5, ALG-6).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.variations.arithmetic import BLOCK, wider
from concord.spec.model import Model
from concord.spec.tape import Node, Values

Statistics = Callable[[Values], tuple[Values, Values]]
"""Takes rows (…, D); returns their mean and the sum of squared differences from it, (…, 1)."""


# Layer norm.


def two_passes(x: Values) -> tuple[Values, Values]:
    """The mean first, as a product with 1 / D, then the squares."""
    mean = (x * x.dtype.type(1 / x.shape[-1])).sum(-1, keepdims=True)
    return mean, np.square(x - mean).sum(-1, keepdims=True)


def corrected(x: Values) -> tuple[Values, Values]:
    """Two passes, and what the mean's own rounding left in the squares is taken off."""
    mean = x.mean(-1, keepdims=True)
    centered = x - mean
    return mean, np.square(centered).sum(-1, keepdims=True) - np.square(
        centered.sum(-1, keepdims=True)
    ) / x.shape[-1]


def welford(x: Values) -> tuple[Values, Values]:
    """One pass that updates mean and squares with each entry."""
    mean, squares = np.zeros_like(x[..., :1]), np.zeros_like(x[..., :1])
    for i in range(x.shape[-1]):
        difference = x[..., i : i + 1] - mean
        mean = mean + difference / x.dtype.type(i + 1)
        squares = squares + difference * (x[..., i : i + 1] - mean)
    return mean, squares


def merged(x: Values) -> tuple[Values, Values]:
    """Two passes in each block, and blocks merged (Chan, Golub and LeVeque)."""
    mean, squares, count = np.zeros_like(x[..., :1]), np.zeros_like(x[..., :1]), 0
    for first in range(0, x.shape[-1], BLOCK):
        block = x[..., first : first + BLOCK]
        own, size = block.mean(-1, keepdims=True), block.shape[-1]
        difference = own - mean
        squares = (
            squares
            + np.square(block - own).sum(-1, keepdims=True)
            + difference * difference * x.dtype.type(count * size / (count + size))
        )
        mean, count = mean + difference * x.dtype.type(size / (count + size)), count + size
    return mean, squares


def one_pass(shift: Callable[[Values], Values]) -> Statistics:
    """Return statistics in one pass.

    The sum of squares less the square of the sum, after a number was taken off.

    Args:
        shift: gives that number for each row, (…, 1).
    """

    def statistics(x: Values) -> tuple[Values, Values]:
        taken_off, count = shift(x), x.dtype.type(x.shape[-1])
        left = x - taken_off
        total = left.sum(-1, keepdims=True)
        return taken_off + total / count, np.square(left).sum(-1, keepdims=True) - total * total / count

    return statistics


def unshifted(x: Values) -> Values:
    return np.zeros_like(x[..., :1])


def zero_or_first(x: Values) -> Values:
    """Zero where it lies between a row's entries; else the first of them."""
    around = (x.min(-1, keepdims=True) <= 0) & (x.max(-1, keepdims=True) >= 0)
    return np.where(around, unshifted(x), x[..., :1])


def farthest(x: Values) -> Values:
    """The entry of a row that is farthest from its mean."""
    place = abs(x - x.mean(-1, keepdims=True)).argmax(-1)[..., None]
    entry: Values = np.take_along_axis(x, place, -1)
    return entry


Normalized = Callable[[Values, Values, Values, Values, Values], Values]
"""Takes rows, their mean and deviation, gain and offset."""


def divided(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x - mean) / deviation * gain + offset


def times_reciprocal(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x - mean) * (1 / deviation) * gain + offset


def gain_first(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x - mean) * (gain / deviation) + offset


def fused_multiply_add(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    value: Values = (wider((x - mean) * (1 / deviation)) * wider(gain) + wider(offset)).astype(x.dtype)
    return value


def multiplied_out(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x * (1 / deviation) - mean * (1 / deviation)) * gain + offset


Slope = Callable[[Values, Values, Values, Values], Values]
"""Takes rows, their mean, a gradient and a factor.

Returns differences times the factor times the sum of gradient times differences.
"""


def of_differences(x: Values, mean: Values, gradient: Values, factor: Values) -> Values:
    centered: Values = x - mean
    slope: Values = centered * ((gradient * centered).sum(-1, keepdims=True) * factor)
    return slope


def of_products(x: Values, mean: Values, gradient: Values, factor: Values) -> Values:
    share: Values = ((gradient * x).sum(-1, keepdims=True) - mean * gradient.sum(-1, keepdims=True)) * factor
    slope: Values = x * share - mean * share
    return slope


def norm(
    statistics: Statistics, normalized: Normalized = divided, slope: Slope = of_differences
) -> type[Model]:
    """Return a model whose layer norm is one step, forward and backward."""

    class Normed(Model):
        def norm(self, name: str, x: Node) -> Node:
            gain, offset = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            count = x.value.dtype.type(self.config.d_model - (self.config.norm_variance == "unbiased"))
            epsilon = x.value.dtype.type(self.config.norm_epsilon)
            inside = self.config.norm_epsilon_placement == "inside"
            mean, squares = statistics(x.value)
            root = np.sqrt(np.maximum(squares, 0) / count + (epsilon if inside else 0))
            deviation = root if inside else root + epsilon
            one, zero = np.ones_like(gain.value), np.zeros_like(offset.value)

            def to_x(gradient: Values) -> Values:
                inner = gradient * gain.value
                by_variance = slope(x.value, mean, inner, 1 / (deviation * deviation * root * count))
                return self.a.settle((inner - inner.mean(-1, keepdims=True)) / deviation - by_variance)

            def to_gain(gradient: Values) -> Values:
                return self.a.settle(
                    (gradient * normalized(x.value, mean, deviation, one, zero))
                    .reshape(-1, x.shape[-1])
                    .sum(0)
                )

            value = self.a.settle(normalized(x.value, mean, deviation, gain.value, offset.value))
            return self.a._record(
                value,
                (x, to_x),
                (gain, to_gain),
                (offset, lambda g: self.a.settle(g.reshape(-1, x.shape[-1]).sum(0))),
            )

    return Normed


# Activations.

_erfc = np.frompyfunc(math.erfc, 1, 1)


def erfc(x: Values) -> Values:
    complement: Values = np.asarray(_erfc(x.astype(np.float64)), np.float64).astype(x.dtype)
    return complement


def gelu_erfc(x: Values) -> tuple[Values, Values]:
    """GELU and its derivative from the complementary error function."""
    share = erfc(x * x.dtype.type(-math.sqrt(0.5))) * x.dtype.type(0.5)
    return x * share, share + x * np.exp(x * x * x.dtype.type(-0.5)) * x.dtype.type(
        1 / math.sqrt(2 * math.pi)
    )


def inner(x: Values) -> tuple[Values, Values]:
    """Return what GELU takes the tangent of, and its derivative."""
    square = x * x
    root = math.sqrt(2 / math.pi)
    return x * (x.dtype.type(root) + x.dtype.type(root * 0.044715) * square), x.dtype.type(
        root
    ) + x.dtype.type(3 * root * 0.044715) * square


def gelu_sigmoid(x: Values) -> tuple[Values, Values]:
    """GELU with tanh, and its derivative, from the logistic function: (1 + tanh z) / 2 = sigmoid(2 z)."""
    z, slope = inner(x)
    small = np.exp(-abs(2 * z))
    share = np.where(z >= 0, 1, small).astype(x.dtype) / (1 + small)
    return x * share, share + x * (small / np.square(1 + small)) * (2 * slope)


def gelu_exponential(x: Values) -> tuple[Values, Values]:
    """GELU with tanh, and its derivative, from one exponential: tanh z = 1 - 2 / (exp(2 z) + 1)."""
    z, slope = inner(x)
    tangent = 1 - 2 / (np.exp(np.minimum(2 * z, 80)) + 1)
    half = x.dtype.type(0.5)
    return half * x * (1 + tangent), half * (1 + tangent) + half * x * ((1 - tangent * tangent) * slope)


def activation(**functions: Callable[[Values], tuple[Values, Values]]) -> type[Model]:
    """Return a model with activations, by the name of the option, that yield their derivative too."""

    class Activated(Model):
        def activation(self, x: Node, active: Any) -> Node:
            if self.config.activation not in functions:
                return super().activation(x, active)
            value, slope = functions[self.config.activation](x.value)
            return self.a._record(self.a.settle(value), (x, lambda g: self.a.settle(g * slope)))

    return Activated


# Scale and sums of the model.


def scale(of_query: float, of_key: float, of_scores: float) -> type[Model]:
    """Return a model whose scale stands elsewhere: powers of the width of a head."""

    class Scaled(Model):
        def scores(self, q: Node, k: Node) -> Node:
            width = float(q.shape[-1])
            q = self.a.scale(q, width**of_query) if of_query else q
            k = self.a.scale(k, width**of_key) if of_key else k
            scores = self.a.einsum("bqhk,bshk->bhqs", q, k)
            return self.a.scale(scores, width**of_scores) if of_scores else scores

    return Scaled


class PositionFirst(Model):
    """Position and segment vectors are added first, as a table of their sums would have it, then the
    token's.
    """

    def tap(self, name: str, tensor: Node) -> Node:
        if name == "embeddings.token":
            self.vectors: list[Node] = []
        if name == "embeddings.sum":
            tensor = functools.reduce(self.a.add, reversed(self.vectors))
        elif name.startswith("embeddings."):
            self.vectors.append(tensor)
        return super().tap(name, tensor)
