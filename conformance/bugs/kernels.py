"""Bugs of fused kernels.

Blocks, tails of a vector, heads, statistics of a row (SPEC ATT-2 to ATT-6, NRM-2).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context, Flags
from concord.conformance.bugs.operations import Array

BLOCK = 64
"""Keys that a kernel reads at a time."""

VECTOR = 4
"""Features that a kernel reads at a time."""


def beyond_blocks(m: Context) -> Flags:
    """Return which keys stand in the block that is not full, where others are: (S,)."""
    keys = m.ids.shape[1]
    return np.arange(keys) >= keys // BLOCK * BLOCK if keys > BLOCK else np.zeros(keys, bool)


def block_sums_not_rescaled(m: Context) -> Array:
    """Sum up block by block without scaling what came before when a larger score turns up."""
    scores = m.unnormalised
    keys = tuple(scores.shape)[3]
    if keys <= BLOCK:
        return m.y
    largest, parts = None, []
    for start in range(0, keys, BLOCK):
        part = scores[:, :, :, start : start + BLOCK]
        found = m.max(part, 3)
        largest = found if largest is None else m.where(found > largest, found, largest)
        parts.append(m.exp(part - largest))
    powers = m.concat(parts, 3)
    return powers / m.sum(powers, 3)


def without_tail(m: Context, x: Array) -> Array:
    """Zero the features that a vector of four does not fill, (…, K)."""
    width = tuple(x.shape)[-1]
    return m.where(np.arange(width) < width // VECTOR * VECTOR, x, x * 0.0)


def heads(m: Context) -> NDArray[np.int64]:
    """Return the numbers of heads, (H, 1, 1)."""
    return np.arange(m.config.num_heads)[:, None, None]


def with_zeros(m: Context, count: int) -> Array:
    """Return a softmax whose sum has terms of so many keys with score 0."""
    return m.softmax_by(total=lambda total: total + m.exp(-m.max(m.unnormalised, 3)) * float(count))


def norm_of_padded_row(m: Context) -> Array:
    """Fill a row with zeros, whose distances from the mean count, to a power of two."""
    own, mean = m.config.d_model, m.mean(m.x, -1)
    width = 2 ** math.ceil(math.log2(own))
    return m.norm(m.x, variance=lambda variance: variance + mean * mean * (width / own - 1))


def norm_count_of_padded_row(m: Context) -> Array:
    """Divide by the number of entries of a row that is filled up to whole vectors."""
    own = m.config.d_model
    return m.norm(m.x, variance=lambda variance: variance * (own / (VECTOR * math.ceil(own / VECTOR))))


def query_bias_unscaled(m: Context) -> Array:
    """Scale the product with the query's weight before its bias is added."""
    bias = m.reshape(m.weight(f"{m.scope}.query.bias"), (1, 1, m.config.num_heads, m.config.head_dim))
    root = math.sqrt(m.config.head_dim)
    return m.scores(m.beside("query") + bias * (root - 1.0))


EDITS: Edits = {
    "block_last_masked_as_first": lambda m: m.masked(
        m.visible[..., np.arange(m.ids.shape[1]) % np.where(beyond_blocks(m), BLOCK, m.ids.shape[1])]
    ),
    "block_last_dropped": lambda m: m.context(
        m.where(beyond_blocks(m), m.used_weights * 0.0, m.used_weights)
    ),
    "block_counted_to_its_end": lambda m: with_zeros(m, -tuple(m.y.shape)[3] % BLOCK),
    "head_tail_left_out_of_scores": lambda m: m.scores(without_tail(m, m.beside("query"))),
    "head_tail_left_out_of_context": lambda m: m.context(m.used_weights, without_tail(m, m.beside("value"))),
    "heads_beyond_four_repeated": lambda m: m.with_heads(
        m.y, [head % VECTOR for head in range(m.config.num_heads)]
    ),
    "heads_beyond_four_unmasked": lambda m: m.where(heads(m) < VECTOR, m.y, m.beside("scores")),
    "heads_one_key_for_all": lambda m: m.with_heads(m.y, [0] * m.config.num_heads),
    "mask_of_first_head_alone": lambda m: m.where(heads(m) == 0, m.y, m.beside("scores")),
    "mask_added_as_number": lambda m: (
        m.beside("scores") + m.constant(np.broadcast_to(m.visible, tuple(m.y.shape)) * 1.0, m.y)
    ),
    "scores_divided_by_layer": lambda m: m.y / float(m.layer + 1),
}
