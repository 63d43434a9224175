"""Every allowed alternative: a way to compute a step that the specification admits, and that must not be
flagged.

An alternative of a step is an edit of taps: one text for the four frameworks and for NumPy. One of every sum,
product or division is an arithmetic of :mod:`concord.conformance.bugs.ways`.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from concord.conformance.bugs import ways
from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.embeddings import summed
from concord.conformance.bugs.gradients import norm_slope, of_softmax
from concord.conformance.bugs.operations import Array

BLOCK = 4
"""Entries of a block: few, so that small cases have several."""


# Attention.


def size(x: Array, axis: int) -> int:
    return int(tuple(x.shape)[axis])


def kept(m: Context, x: Array) -> Array:
    return x


def detached(m: Context, x: Array) -> Array:
    return m.stop_gradient(x)


def powers(m: Context, x: Array, taken_off: Edit = detached) -> Array:
    """Return exponentials of scores less the largest of their row."""
    return m.exp(x - taken_off(m, m.max(x, 3)))


def running(
    m: Context, scores: Array, values: Array | None, taken_off: Edit = detached, order: int = 1
) -> Array:
    """Softmax of scores in blocks of keys (B, H, Q, S), or the sum of values that it weights (B, H, Q, K).

    Args:
        order: -1: from the last block to the first.
    """
    largest: Array = None
    total: Array = None
    found: Array = None
    for first in range(0, size(scores, 3), BLOCK)[::order]:
        part = scores[:, :, :, first : first + BLOCK]
        top = taken_off(m, m.max(part, 3))
        now = top if largest is None else m.where(top > largest, top, largest)
        exponentials = m.exp(part - now)
        summed = m.sum(exponentials, 3)
        new = exponentials
        if values is not None:
            new = m.einsum("bhqs,bshk->bhqk", exponentials, values[:, first : first + BLOCK])
        if largest is None:
            total, found = summed, new
        else:
            shrunk = m.exp(largest - now)
            total, found = total * shrunk + summed, found * shrunk
            found = m.concat([found, new][::order], 3) if values is None else found + new
        largest = now
    return found / total


def softmax(taken_off: Edit = detached, order: int = 1) -> Edit:
    """Return a running softmax."""
    return lambda m, y: running(m, m.unnormalised, None, taken_off, order)


def by_reciprocal(m: Context, y: Array, taken_off: Edit = detached) -> Array:
    exponentials = powers(m, m.unnormalised, taken_off)
    return exponentials * (1.0 / m.sum(exponentials, 3))


def log_sum_exp(m: Context, x: Array, axis: int = 3, taken_off: Edit = detached) -> Array:
    largest = taken_off(m, m.max(x, axis))
    return largest + m.log(m.sum(m.exp(x - largest), axis))


def recomputed(m: Context, weights: Array) -> Array:
    """The weights as they are, and the derivative from those that the log-sum-exp gives, where a query sees a
    key.
    """
    scores = m.unnormalised
    again = m.value_of(weights, m.exp(scores - log_sum_exp(m, scores)))
    return m.where(m.visible.any(-1, keepdims=True), again, weights)


def through_largest(share: Edit) -> Edit:
    """Return a softmax whose derivative flows through the entry that was taken off too.

    Args:
        share: of the gradient of a row's largest entry, for each entry, made of the scores.
    """

    def edit(m: Context, y: Array) -> Array:
        scores = m.stop_gradient(m.unnormalised)
        exponentials, shares = powers(m, scores), share(m, scores)
        total = m.sum(exponentials, 3)

        def pull(m: Context, gradient: Array, weights: Array) -> Array:
            shifted = (gradient / total - m.sum(gradient * weights / total, 3)) * exponentials
            return shifted - shares * m.sum(shifted, 3)

        return of_softmax(pull)(m, y)

    return edit


def are_largest(m: Context, x: Array) -> Array:
    """Return 1 for the largest of a row, and 0 for all others."""
    return m.where(x < m.max(x, 3), x * 0.0, x * 0.0 + 1.0)


def in_equal_shares(m: Context, x: Array) -> Array:
    return are_largest(m, x) / m.sum(are_largest(m, x), 3)


def of_the_first(m: Context, x: Array) -> Array:
    return are_largest(m, are_largest(m, x) * m.constant(np.arange(size(x, 3), 0.0, -1.0), x))


def attention(made: Edit) -> Edit:
    """Return a context, (B, H, Q, K), with its heads joined."""
    return lambda m, y: m.reshape(m.transpose(made(m, y), (0, 2, 1, 3)), tuple(y.shape))


def divided_last(m: Context, exponentials: Array) -> Array:
    """Divide the context by the sum at the end: row sums of the derivative are of context times gradient."""
    summed = m.einsum("bhqs,bshk->bhqk", exponentials, m.beside("value"))
    return summed / m.sum(exponentials, 3)


def fused(m: Context, y: Array) -> Array:
    """Go forward in blocks, and backward from the log-sum-exp, where a query sees a key."""
    scores, seen = m.unnormalised, m.visible.any(-1, keepdims=True)
    shift = m.stop_gradient(m.where(seen, log_sum_exp(m, scores), m.max(scores, 3)))
    return m.value_of(running(m, scores, m.beside("value")), divided_last(m, m.exp(scores - shift)))


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

Statistics = Callable[[Context, Array], tuple[Array, Array]]
"""Gives the mean of rows, and the squared differences from it."""


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
        own = m.mean(block, -1)
        within = m.sum((block - own) * (block - own), -1)
        if mean is None:
            mean, squares = own, within
        else:
            difference = own - mean
            squares = squares + within + difference * difference * (first * count / (first + count))
            mean = mean + difference * (count / (first + count))
    return mean, squares


def two_passes(m: Context, x: Array) -> tuple[Array, Array]:
    mean = m.sum(x * (1.0 / size(x, -1)), -1)
    return mean, m.sum((x - mean) * (x - mean), -1)


def corrected(m: Context, x: Array) -> tuple[Array, Array]:
    """Return the same, less what the mean's own rounding left in the squares."""
    mean, squares = two_passes(m, x)
    left = m.sum(x - mean, -1)
    return mean, squares - left * left / float(size(x, -1))


def plainly(m: Context, x: Array) -> tuple[Array, Array]:
    mean = m.mean(x, -1)
    return mean, m.sum((x - mean) * (x - mean), -1)


def one_pass(shift: Edit) -> Statistics:
    """Return the same from the mean square less the square of the mean, after a number was taken off."""

    def statistics(m: Context, x: Array) -> tuple[Array, Array]:
        taken_off = shift(m, x)
        left = x - taken_off
        mean = m.mean(left, -1)
        return taken_off + mean, (m.mean(left * left, -1) - mean * mean) * float(size(x, -1))

    return statistics


def zero_or_first(m: Context, x: Array) -> Array:
    """Zero where it lies between a row's entries; else the first of them."""
    first, lowest = x[..., :1], -m.max(-x, -1)
    return m.where(lowest > 0.0, first, m.where(m.max(x, -1) < 0.0, first, first * 0.0))


def farthest(m: Context, x: Array) -> Array:
    """The entry of a row that is farthest from its mean."""
    mean = m.mean(x, -1)
    above, below = m.max(x, -1), -m.max(-x, -1)
    return m.where(above - mean > mean - below, above, below)


def times_reciprocal(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return (x - mean) * inverse * gain


def gain_first(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return (x - mean) * (inverse * gain)


def multiplied_out(x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return x * (inverse * gain) - mean * (inverse * gain)


def norm(
    statistics: Statistics,
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


def in_closed_form(m: Context, gradient: Array, row: Array, deviation: Array) -> Array:
    """Return the derivative of a norm, made of the gained gradient, the normed row and its deviation."""
    inside = m.config.norm_epsilon_placement == "inside"
    root = deviation if inside else deviation - m.config.norm_epsilon
    count = float(m.config.d_model - (m.config.norm_variance == "unbiased"))
    along = m.sum(gradient * row, -1) / count * (deviation / root)
    return (gradient - m.mean(gradient, -1) - row * along) / deviation


# The rest.


def gelu_sigmoid(m: Context, y: Array) -> Array:
    x = m.source()
    return x * m.sigmoid(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)))


def gelu_exponential(m: Context, y: Array) -> Array:
    """The tanh of GELU from one exponential: 1 - 2 / (exp(2 z) + 1)."""
    x = m.source()
    twice = m.within(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)), -80.0, 80.0)
    return x * 0.5 * (2.0 - 2.0 / (m.exp(twice) + 1.0))


def bias_first(m: Context, y: Array) -> Array:
    """A linear layer whose sum begins with the bias, and goes on with both halves of the products."""
    x, weight = m.source(), m.weight(f"{m.tap}.weight")
    half = size(x, -1) // 2
    return (m.weight(f"{m.tap}.bias") + x[..., :half] @ weight[:half]) + x[..., half:] @ weight[half:]


def log_softmax_fused(m: Context, y: Array) -> Array:
    """Log-softmax whose derivative is one step: softmax less what flows back."""
    logits, chance = m.now["logits"], m.stop_gradient(m.softmax(m.now["logits"], 1))
    return m.value_of(y, m.with_gradient(logits, lambda gradient: gradient - chance * m.sum(gradient, 1)))


def from_normalizer(taken_off: Edit = detached) -> Edit:
    """Return the logit less its log-sum-exp."""
    return lambda m, y: m.now["logits"] - log_sum_exp(m, m.now["logits"], 1, taken_off)


EDITS: Changes = {
    "embeddings_position_first": summed("segment position token"),
    "softmax_by_logarithm": lambda m, y: m.exp(m.log_softmax(m.unnormalised, 3)),
    "softmax_backward_multiplied_out": of_softmax(lambda m, g, w: g * w - w * m.sum(g * w, 3)),
    "softmax_through_largest": through_largest(in_equal_shares),
    "softmax_through_first_largest": through_largest(of_the_first),
    "softmax_through_each_largest": lambda m, y: by_reciprocal(m, y, kept),
    "softmax_running_through_largest": softmax(kept),
    "attention_in_blocks": attention(lambda m, y: running(m, m.unnormalised, m.beside("value"))),
    "attention_row_sums_of_context": attention(lambda m, y: divided_last(m, powers(m, m.unnormalised))),
    "attention_recomputed": lambda m, y: m.context(recomputed(m, m.beside("weights"))),
    "attention_fused": attention(fused),
    "log_softmax_through_largest": from_normalizer(kept),
    "norm_closed_form": norm_slope(in_closed_form),
    "norm_two_passes": norm(two_passes),
    "norm_corrected": norm(corrected),
    "norm_welford": norm(welford),
    "norm_merged": norm(merged),
    "norm_one_pass": norm(one_pass(zero_or_first)),
    "norm_one_pass_from_farthest": norm(one_pass(farthest)),
    "norm_times_reciprocal": norm(plainly),
    "norm_gain_first": norm(welford, gain_first),
    "norm_multiplied_out": norm(two_passes, multiplied_out),
    "sums_sequential": ways.sums(ways.total_sequential),
    "sums_backwards": ways.sums(ways.total_sequential, -1),
    "sums_in_blocks": ways.sums(ways.total_in_blocks),
    "sums_pairwise": ways.sums(ways.total_pairwise),
    "sums_compensated": ways.sums(ways.total_compensated),
    "scale_of_scores": lambda m, y: m.scores(divisor=1.0) * m.config.head_dim**-0.5,
}
