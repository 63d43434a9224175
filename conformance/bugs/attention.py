"""Bugs of attention, of its masks and of fused kernels (SPEC ATT-1 to ATT-7, MSK-1 to MSK-8)."""

from __future__ import annotations

import math

import numpy as np

from concord.conformance.bugs.context import Array, Context, Edits, Flags, in_last_layer, only
from concord.conformance.bugs.lookups import stale
from concord.spec.arrays import Ids

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"

BLOCK = 64
"""Number of keys that a kernel reads at a time."""

VECTOR = 4
"""Number of heads or features that a kernel reads at a time."""


def in_block(m: Context) -> Ids:
    """Index of each key in its block, (S,)."""
    return np.arange(m.ids.shape[1]) % BLOCK


def beyond_blocks(m: Context) -> Flags:
    """Keys of an incomplete block that follows complete ones, (S,)."""
    keys = m.ids.shape[1]
    return np.arange(keys) >= keys // BLOCK * BLOCK if keys > BLOCK else np.zeros(keys, bool)


def numbers_of_heads(m: Context) -> Ids:
    """Head indices, (H, 1, 1)."""
    return np.arange(m.config.num_heads)[:, None, None]


# Products.


def divided(m: Context, **powers: float) -> Array:
    """Divide the scores by powers of sizes instead of sqrt(K)."""
    return m.scores(divisor=m.size(**powers))


def query_bias_unscaled(m: Context) -> Array:
    bias = m.reshape(m.weight(f"{m.scope}.query.bias"), (1, 1, m.config.num_heads, m.config.head_dim))
    return m.scores(m.beside("query") + bias * (math.sqrt(m.config.head_dim) - 1.0))


def heads_split_by_reshape(m: Context) -> Array:
    batch, tokens, heads, width = tuple(m.y.shape)
    return m.transpose(m.reshape(m.y, (batch, heads, tokens, width)), (0, 2, 1, 3))


def heads_interleaved(m: Context) -> Array:
    batch, tokens, heads, width = tuple(m.y.shape)
    return m.transpose(m.reshape(m.y, (batch, tokens, width, heads)), (0, 1, 3, 2))


def heads_joined_by_reshape(m: Context) -> Array:
    return m.reshape(m.transpose(m.by_heads(m.y), (0, 2, 1, 3)), tuple(m.y.shape))


def heads_loop_keeps_first_value(m: Context) -> Array:
    return m.context(m.used_weights, m.with_heads(m.beside("value"), [0] * m.config.num_heads))


# Masks.


def unmasked(m: Context) -> Array:
    return m.beside("scores")


def causal(m: Context) -> Array:
    return m.masked(m.visible & (np.tri(*tuple(m.y.shape)[-2:]) > 0))


def unmasked_where(m: Context, flags: Flags) -> Array:
    return m.where(flags, m.beside("scores"), m.y)


def mask_hides_own_key(m: Context) -> Array:
    queries, keys = tuple(m.y.shape)[-2:]
    return m.masked(m.visible & ~np.eye(queries, keys, dtype=bool)) if keys > 1 else m.y


def mask_of_first_call(m: Context) -> Array:
    real = stale(m, "mask", m.real)
    return m.y if (real == m.real).all() else m.masked(real[:, None, None, :])


# Softmax.


def softmax_over(m: Context, axis: int) -> Array:
    return m.softmax(m.unnormalised, axis)


def block_sums_not_rescaled(m: Context) -> Array:
    scores = m.unnormalised
    keys = tuple(scores.shape)[-1]
    if keys <= BLOCK:
        return m.y
    largest, powers = None, []
    for start in range(0, keys, BLOCK):
        part = scores[..., start : start + BLOCK]
        top = m.max(part, -1)
        largest = top if largest is None else m.where(top > largest, top, largest)
        powers.append(m.exp(part - largest))
    joined = m.concat(powers, -1)
    return joined / m.sum(joined, -1)


def more_in_sum(m: Context, count: int) -> Array:
    return m.softmax_by(total=lambda total: total + m.exp(-m.max(m.unnormalised, -1)) * float(count))


def softmax_least_weight(m: Context) -> Array:
    least = m.where(m.y < 1e-6, m.y * 0.0 + 1e-6, m.y)
    return least / m.sum(least, -1)


def softmax_exponential_approximate(m: Context) -> Array:
    """Approximate 2^f between whole powers by a parabola and ten squarings, to 2e-3."""

    def exponential(x: Array) -> Array:
        root = m.where(x < -80.0, x * 0.0 - 80.0, x) / 1024.0
        power = root + root * root * 0.4 + 1.0
        for _ in range(10):
            power = power * power
        return power

    return m.softmax_by(exponential)


EDITS: Edits = {
    "mask_missing": unmasked,
    "mask_inverted": lambda m: m.masked(~m.visible),
    "mask_constant_without_sign": lambda m: m.masked(m.visible, -m.mask_constant),
    "query_mask_zero": lambda m: m.where(m.real_queries[:, None, :, None], m.beside("weights"), 0.0),
    "layer_last_unmasked": in_last_layer(unmasked),
    "mask_not_for_first_query": lambda m: unmasked_where(m, m.flags(-2, 0)),
    "mask_not_for_first_key": lambda m: unmasked_where(m, m.flags(-1, 0)),
    "mask_of_first_head_alone": lambda m: unmasked_where(m, numbers_of_heads(m) > 0),
    "heads_beyond_four_unmasked": lambda m: unmasked_where(m, numbers_of_heads(m) >= 4),
    "mask_dropped_for_one_sample": only(lambda m: m.ids.shape[0] == 1, unmasked),
    "block_last_masked_as_first": lambda m: m.masked(
        m.visible[..., np.where(beyond_blocks(m), in_block(m), np.arange(m.ids.shape[1]))]
    ),
    "block_counted_to_its_end": lambda m: more_in_sum(m, -tuple(m.y.shape)[-1] % BLOCK),
    "block_last_dropped": lambda m: m.context(
        m.where(beyond_blocks(m), m.used_weights * 0.0, m.used_weights)
    ),
    "heads_beyond_four_repeated": lambda m: m.with_heads(
        m.y, [head % VECTOR for head in range(m.config.num_heads)]
    ),
    "heads_one_key_for_all": lambda m: m.with_heads(m.y, [0] * m.config.num_heads),
    "scores_divided_by_layer": lambda m: m.y / float(m.layer + 1),
    "weights_in_bfloat16_for_context": lambda m: m.context(m.round_to(m.used_weights, "bfloat16")),
    "mask_after_softmax": lambda m: m.where(m.visible, m.softmax(m.beside("scores"), -1), 0.0),
    "mask_empty_row_zero": lambda m: m.where(m.visible.any(axis=-1, keepdims=True), m.y, 0.0),
    "softmax_stored_in_bfloat16_last": in_last_layer(lambda m: m.round_to(m.y, "bfloat16")),
    "softmax_powers_in_bfloat16": lambda m: m.softmax_by(powers=lambda x: m.round_to(x, "bfloat16")),
    "softmax_powers_cut": lambda m: m.softmax_by(lambda x: m.where(x < -10.0, x * 0.0, m.exp(x))),
}
