"""Bugs of fused kernels.

Blocks, tails of a vector, heads, statistics of a row (SPEC ATT-2 to ATT-6, NRM-2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array

BLOCK = 64
"""Keys that a kernel reads at a time."""

VECTOR = 4
"""Features that a kernel reads at a time."""


def beyond_blocks(m: Context) -> Flags:
    """Return which keys stand in the block that is not full, where others are: (S,)."""
    keys = m.ids.shape[1]
    return np.arange(keys) >= keys // BLOCK * BLOCK if keys > BLOCK else np.zeros(keys, bool)


def block_sums_not_rescaled(m: Context, y: Array) -> Array:
    """Sum up block by block without scaling what came before when a larger score turns up."""
    scores = m.unnormalised
    keys = tuple(scores.shape)[3]
    if keys <= BLOCK:
        return y
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


def key_of_head(order: Callable[[int, int], int]) -> Edit:
    """Return the edit that gives each head the key of another, made of its number and how many there are."""

    def edit(m: Context, y: Array) -> Array:
        heads = m.config.num_heads
        return m.with_heads(y, (order(head, heads) for head in range(heads)))

    return edit


def with_zeros(count: Callable[[int], int]) -> Edit:
    """Return a softmax whose sum has terms of so many keys with score 0, made of how many keys there are."""

    def edit(m: Context, y: Array) -> Array:
        more = float(count(tuple(y.shape)[3]))
        return m.softmax_by(total=lambda total: total + m.exp(-m.max(m.unnormalised, 3)) * more)

    return edit


def hidden_for(heads: Callable[[NDArray[np.int64]], Flags]) -> Edit:
    """Return the mask of some heads alone, made of their numbers."""

    def edit(m: Context, y: Array) -> Array:
        numbers = np.arange(tuple(y.shape)[1])[:, None, None]
        return m.where(heads(numbers), y, m.beside("scores"))

    return edit


def padded_to(width: Callable[[int], int], filled: bool) -> Edit:
    """Return a norm of a row that is filled to another width, made of its own.

    Args:
        filled: whether the distances of what fills it, zeros, count in the variance.
    """

    def edit(m: Context, y: Array) -> Array:
        x, own = m.source(), tuple(y.shape)[-1]
        if not filled:
            return m.norm(x, variance=lambda variance: variance * (own / width(own)))
        mean = m.mean(x, -1)
        return m.norm(x, variance=lambda variance: variance + mean * mean * (width(own) / own - 1))

    return edit


def query_bias_unscaled(m: Context, y: Array) -> Array:
    """Scale the product with the query's weight before its bias is added."""
    bias = m.reshape(m.weight(f"{m.scope}.query.bias"), (1, 1, m.config.num_heads, m.config.head_dim))
    root = math.sqrt(m.config.head_dim)
    return m.scores(m.beside("query") + bias * (root - 1.0))


EDITS: Changes = {
    "block_last_masked_as_first": lambda m, y: m.masked(
        m.visible[..., np.arange(m.ids.shape[1]) % np.where(beyond_blocks(m), BLOCK, m.ids.shape[1])]
    ),
    "block_last_dropped": lambda m, y: m.context(
        m.where(beyond_blocks(m), m.used_weights * 0.0, m.used_weights)
    ),
    "block_counted_to_its_end": with_zeros(lambda keys: -keys % BLOCK),
    "head_tail_left_out_of_scores": lambda m, y: m.scores(without_tail(m, m.beside("query"))),
    "head_tail_left_out_of_context": lambda m, y: m.context(
        m.used_weights, without_tail(m, m.beside("value"))
    ),
    "heads_beyond_four_repeated": key_of_head(lambda head, heads: head if heads <= VECTOR else head % VECTOR),
    "heads_beyond_four_unmasked": hidden_for(lambda head: head < VECTOR),
    "heads_one_key_for_all": key_of_head(lambda head, heads: 0),
    "mask_of_first_head_alone": hidden_for(lambda head: head == 0),
    "mask_added_as_number": lambda m, y: (
        m.beside("scores") + m.constant(np.broadcast_to(m.visible, tuple(y.shape)) * 1.0, y)
    ),
    "softmax_with_one_more": with_zeros(lambda keys: 1),
    "scores_divided_by_layer": lambda m, y: y / float(m.layer + 1),
    "norm_of_padded_row": padded_to(lambda width: 2 ** math.ceil(math.log2(width)), filled=True),
    "norm_count_of_padded_row": padded_to(lambda width: VECTOR * math.ceil(width / VECTOR), filled=False),
}
