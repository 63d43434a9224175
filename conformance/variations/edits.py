"""Right variations as edits of taps.

The same text in four frameworks, whose own differentiation makes the backward pass.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from concord.conformance.bugs.bug import Change, edited
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.conformance.variations.arithmetic import BLOCK, blocks

SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"
NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")
LINEAR = ("*.feed_forward.inner", "*.feed_forward.outer")


# Attention.


def size(x: Array, axis: int) -> int:
    return int(tuple(x.shape)[axis])


def kept(m: Context, x: Array) -> Array:
    return x


def detached(m: Context, x: Array) -> Array:
    return m.o.stop_gradient(x)


def running(m: Context, scores: Array, values: Array | None, taken_off: Edit = detached) -> Array:
    """Softmax of scores in blocks of keys (B, H, Q, S), or the sum of values that it weights (B, H, Q, K)."""
    largest: Array = None
    total: Array = None
    found: Array = None
    for block in blocks(size(scores, 3)):
        part = scores[:, :, :, block]
        top = taken_off(m, m.o.max(part, 3))
        now = top if largest is None else m.o.where(top > largest, top, largest)
        exponentials = m.o.exp(part - now)
        summed = m.o.sum(exponentials, 3)
        new = (
            exponentials if values is None else m.o.einsum("bhqs,bshk->bhqk", exponentials, values[:, block])
        )
        if largest is None:
            total, found = summed, new
        else:
            shrunk = m.o.exp(largest - now)
            total = total * shrunk + summed
            found = m.o.concat([found * shrunk, new], 3) if values is None else found * shrunk + new
        largest = now
    return found / total


def by_logarithm(m: Context, y: Array) -> Array:
    return m.o.exp(m.o.log_softmax(m.unnormalised, 3))


def by_reciprocal(m: Context, y: Array, taken_off: Edit = detached) -> Array:
    exponentials = m.o.exp(m.unnormalised - taken_off(m, m.o.max(m.unnormalised, 3)))
    return exponentials * (1.0 / m.o.sum(exponentials, 3))


def recomputed(m: Context, y: Array) -> Array:
    """The weights as they are, and the derivative from those that the log-sum-exp gives, where a query
    sees a key.
    """
    scores = m.unnormalised
    largest = m.o.stop_gradient(m.o.max(scores, 3))
    normalizer = largest + m.o.log(m.o.sum(m.o.exp(scores - largest), 3))
    again = m.o.value_of(y, m.o.exp(scores - normalizer))
    return m.o.where(m.visible.any(-1, keepdims=True), again, y)


def attention_in_blocks(m: Context, y: Array) -> Array:
    """The context is divided at the end, so that the derivative of the sum is the row sum of context times
    gradient.
    """
    if m.config.query_mask == "overwrite":
        return y
    context = m.o.transpose(running(m, m.unnormalised, m.beside("value")), (0, 2, 1, 3))
    return m.o.reshape(context, tuple(y.shape))


def scaled(of_query: float, of_key: float) -> Edit:
    """Return scores of which query and key carry these powers of the width of a head."""

    def edit(m: Context, y: Array) -> Array:
        q, k = (
            m.beside(name) * m.config.head_dim**power
            for name, power in (("query", of_query), ("key", of_key))
        )
        return m.scores(q, k, divisor=m.config.head_dim ** (of_query + of_key + 0.5))

    return edit


# Layer norm.


def welford(m: Context, x: Array) -> tuple[Array, Array]:
    """Return the mean and the squared differences from it, updated with each entry."""
    mean, squares = x[..., :1], x[..., :1] * 0.0
    for i in range(1, size(x, -1)):
        entry = x[..., i : i + 1]
        difference = entry - mean
        mean = mean + difference / float(i + 1)
        squares = squares + difference * (entry - mean)
    return mean, squares


def merged(m: Context, x: Array) -> tuple[Array, Array]:
    """Return the same of blocks that are merged."""
    mean = squares = None
    for first in range(0, size(x, -1), BLOCK):
        block = x[..., first : first + BLOCK]
        count = size(block, -1)
        own = m.o.mean(block, -1)
        within = m.o.sum((block - own) * (block - own), -1)
        if mean is None:
            mean, squares = own, within
        else:
            difference = own - mean
            squares = squares + within + difference * difference * (first * count / (first + count))
            mean = mean + difference * (count / (first + count))
    return mean, squares


def two_passes(m: Context, x: Array) -> tuple[Array, Array]:
    mean = m.o.sum(x * (1.0 / size(x, -1)), -1)
    return mean, m.o.sum((x - mean) * (x - mean), -1)


def one_pass(m: Context, x: Array) -> tuple[Array, Array]:
    """Return the same from the mean square less the square of the mean, after the first entry was taken
    off.
    """
    left = x - x[..., :1]
    mean = m.o.mean(left, -1)
    return x[..., :1] + mean, (m.o.mean(left * left, -1) - mean * mean) * float(size(x, -1))


def times_reciprocal(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return (x - mean) * inverse * gain


def gain_first(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return (x - mean) * (inverse * gain)


def multiplied_out(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return x * (inverse * gain) - mean * (inverse * gain)


def norm(
    statistics: Callable[[Context, Array], tuple[Array, Array]],
    normed: Callable[[Array, Array, Array, Array], Array] = times_reciprocal,
) -> Edit:
    """Return a layer norm from these statistics.

    Args:
        normed: takes rows, their mean, the reciprocal of their deviation and the gain.
    """

    def edit(m: Context, y: Array) -> Array:
        x = m.source()
        mean, squares = statistics(m, x)
        inverse = 1.0 / m.deviation(
            squares / float(m.config.d_model - (m.config.norm_variance == "unbiased"))
        )
        return normed(x, mean, inverse, m.weight(f"{m.owner}.weight")) + m.weight(f"{m.owner}.bias")

    return edit


# The rest.


def gelu_sigmoid(m: Context, y: Array) -> Array:
    if m.config.activation != "gelu_tanh":
        return y
    x = m.source()
    return x * m.o.sigmoid(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)))


def in_halves(m: Context, y: Array) -> Array:
    """A linear layer whose sum begins with the bias, and goes on with both halves of the products."""
    x, weight = m.source(), m.weight(f"{m.tap}.weight")
    half = size(x, -1) // 2
    return (m.weight(f"{m.tap}.bias") + x[..., :half] @ weight[:half]) + x[..., half:] @ weight[half:]


def position_first(m: Context, y: Array) -> Array:
    names = [f"embeddings.{name}" for name in ("segment", "position", "token")]
    terms = [m.now[name] for name in names if name in m.now]
    return sum(terms[1:], start=terms[0])


def log_softmax_from_normalizer(m: Context, y: Array, taken_off: Edit = detached) -> Array:
    logits = m.now["logits"]
    largest = taken_off(m, m.o.max(logits, 1))
    return logits - (largest + m.o.log(m.o.sum(m.o.exp(logits - largest), 1)))


EDITS: dict[str, Change] = {
    "softmax_running": edited(lambda m, y: running(m, m.unnormalised, None), WEIGHTS),
    "softmax_by_logarithm": edited(by_logarithm, WEIGHTS),
    "softmax_by_reciprocal": edited(by_reciprocal, WEIGHTS),
    "softmax_through_largest": edited(lambda m, y: by_reciprocal(m, y, kept), WEIGHTS),
    "softmax_running_through_largest": edited(lambda m, y: running(m, m.unnormalised, None, kept), WEIGHTS),
    "softmax_recomputed": edited(recomputed, WEIGHTS),
    "attention_in_blocks": edited(attention_in_blocks, CONTEXT),
    "scale_of_query": edited(scaled(-0.5, 0.0), SCORES),
    "scale_of_both": edited(scaled(-0.25, -0.25), SCORES),
    "norm_two_passes": edited(norm(two_passes), *NORMS),
    "norm_welford": edited(norm(welford), *NORMS),
    "norm_merged": edited(norm(merged), *NORMS),
    "norm_one_pass": edited(norm(one_pass), *NORMS),
    "norm_gain_first": edited(norm(welford, gain_first), *NORMS),
    "norm_multiplied_out": edited(norm(two_passes, multiplied_out), *NORMS),
    "gelu_sigmoid": edited(gelu_sigmoid, "*.feed_forward.activation"),
    "bias_first": edited(in_halves, *LINEAR),
    "embeddings_position_first": edited(position_first, "embeddings.sum"),
    "log_softmax_from_normalizer": edited(log_softmax_from_normalizer, "log_probabilities"),
    "log_softmax_through_largest": edited(
        lambda m, y: log_softmax_from_normalizer(m, y, kept), "log_probabilities"
    ),
}
"""Right variations that can be injected into the frameworks, by their name in the catalogue."""
