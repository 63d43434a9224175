"""Bugs of fused kernels.

Blocks, tails of a vector, heads, statistics of a row (SPEC ATT-2 to ATT-6, NRM-2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import group
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array

NAME = "layers.0.attention"
BLOCK = 64
"""Keys that a kernel reads at a time."""

VECTOR = 4
"""Features that a kernel reads at a time."""


def beyond_blocks(m: Context, size: int) -> Flags:
    """Return which keys stand in the block that is not full, where others are: (S,)."""
    keys = m.ids.shape[1]
    return np.arange(keys) >= keys // size * size if keys > size else np.zeros(keys, bool)


def last_block_masked_as_first(m: Context, y: Array) -> Array:
    keys = np.arange(m.ids.shape[1])
    taken = np.where(beyond_blocks(m, BLOCK), keys % BLOCK, keys)
    return m.masked(m.visible[..., taken])


def last_block_dropped(m: Context, y: Array) -> Array:
    weights = m.used_weights
    return m.context(m.o.where(beyond_blocks(m, BLOCK), weights * 0.0, weights))


def block_counted_to_its_end(m: Context, y: Array) -> Array:
    """Add to the sum what scores of zero give for the keys that fill the last block."""
    scores = m.unnormalised
    powers, short = m.o.exp(scores - m.o.max(scores, 3)), -tuple(scores.shape)[3] % BLOCK
    return powers / (m.o.sum(powers, 3) + m.o.exp(-m.o.max(scores, 3)) * float(short))


def maximum_of_last_block(m: Context, y: Array) -> Array:
    """Sum up block by block without scaling what came before when a larger score turns up."""
    scores = m.unnormalised
    keys = tuple(scores.shape)[3]
    if keys <= BLOCK:
        return y
    largest, parts = None, []
    for start in range(0, keys, BLOCK):
        part = scores[:, :, :, start : start + BLOCK]
        found = m.o.max(part, 3)
        largest = found if largest is None else m.o.where(found > largest, found, largest)
        parts.append(m.o.exp(part - largest))
    powers = m.o.concat(parts, 3)
    return powers / m.o.sum(powers, 3)


def without_tail(m: Context, x: Array) -> Array:
    """Zero the features that a vector of four does not fill, (…, K)."""
    width = tuple(x.shape)[-1]
    return m.o.where(np.arange(width) < width // VECTOR * VECTOR, x, x * 0.0)


def scores_without_tail(m: Context, y: Array) -> Array:
    return m.scores(without_tail(m, m.beside("query")))


def context_without_tail(m: Context, y: Array) -> Array:
    return m.context(m.used_weights, without_tail(m, m.beside("value")))


def key_of_head(order: Any) -> Edit:
    """Return the edit that gives each head the key of another, made of its number and how many there are."""

    def edit(m: Context, y: Array) -> Array:
        heads = tuple(y.shape)[2]
        return m.o.concat([y[:, :, order(head, heads) : order(head, heads) + 1] for head in range(heads)], 2)

    return edit


def grouped(head: int, heads: int) -> int:
    """Two heads share a key in the order of tiles, which is right for none but the first and last."""
    return head if heads <= VECTOR else head % VECTOR


def mask_of_first_heads(m: Context, y: Array) -> Array:
    heads = np.arange(tuple(y.shape)[1])[None, :, None, None]
    return m.o.where(heads < VECTOR, y, m.beside("scores"))


def mask_of_first_head(m: Context, y: Array) -> Array:
    return m.o.where(m.flags(y, 1, 0), y, m.beside("scores"))


def one_more(m: Context, y: Array) -> Array:
    """Divide by the sum and 1 more, as a softmax that may attend to nothing."""
    scores = m.unnormalised
    largest = m.o.max(scores, 3)
    powers = m.o.exp(scores - largest)
    return powers / (m.o.sum(powers, 3) + m.o.exp(-largest))


def bias_unscaled(m: Context, y: Array) -> Array:
    """Scale the product with the query's weight before its bias is added."""
    bias = m.o.reshape(m.weight(f"{m.scope}.query.bias"), (1, 1, m.config.num_heads, m.config.head_dim))
    root = math.sqrt(m.config.head_dim)
    return m.scores(m.beside("query") + bias * (root - 1.0))


def by_layer(m: Context, y: Array) -> Array:
    return y / float(m.layer + 1)


def padded_to_power_of_two(m: Context, y: Array) -> Array:
    """Fill the row with zeros whose distance from the mean counts in the variance."""
    x = m.source()
    width = tuple(x.shape)[-1]
    mean = m.o.mean(x, -1)
    short = 2 ** math.ceil(math.log2(width)) - width
    return m.norm(x, variance=lambda variance: variance + mean * mean * (short / width))


def variance_of_padded_row(m: Context, y: Array) -> Array:
    """Divide the sum of squares by the width that the kernel has, not by the row's."""
    width = tuple(y.shape)[-1]
    return m.norm(
        m.source(), variance=lambda variance: variance * (width / (VECTOR * math.ceil(width / VECTOR)))
    )


def bool_as_number(m: Context, y: Array) -> Array:
    """Add the mask, True where a key is visible, to the scores."""
    return m.beside("scores") + m.o.constant(np.broadcast_to(m.visible, tuple(y.shape)).astype(np.float64), y)


bug = group("kernels").bug

BUGS = (
    bug(
        "block_last_masked_as_first",
        "The last block, which is not full, has the mask of the first.",
        last_block_masked_as_first,
        "*attention.masked_scores",
        clause="MSK-3",
        scenario="long",
        input="more tokens than a block, padding in the first",
        source="pytorch/pytorch/issues/162588",
    ),
    bug(
        "block_last_dropped",
        "Values in the last block, which is not full, are not added.",
        last_block_dropped,
        "*attention.context",
        clause="ATT-6",
        scenario="long",
        input="more tokens than a block",
        source="tenstorrent/tt-metal/issues/32502",
    ),
    bug(
        "block_counted_to_its_end",
        "Keys that fill the last block have score 0 and count in the sum of the softmax.",
        block_counted_to_its_end,
        "*attention.weights",
        clause="ATT-5",
        source="flashinfer-ai/flashinfer/pull/5090",
    ),
    bug(
        "block_sums_not_rescaled",
        "A softmax in blocks does not scale earlier sums when a larger score turns up.",
        maximum_of_last_block,
        "*attention.weights",
        clause="ATT-5",
        scenario="long",
        input="more tokens than a block",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "head_tail_left_out_of_scores",
        "Features of a head that a vector of four does not fill are left out of the scores.",
        scores_without_tail,
        "*attention.scores",
        clause="ATT-4",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "head_tail_left_out_of_context",
        "Features of a head that a vector of four does not fill are left out of the values.",
        context_without_tail,
        "*attention.context",
        clause="ATT-6",
        source="Dao-AILab/flash-attention/issues/2552",
    ),
    bug(
        "heads_beyond_four_repeated",
        "From the fifth head on the keys of the first four are taken again.",
        key_of_head(grouped),
        "*attention.key",
        clause="ATT-2",
        options={"num_heads": 7},
        input="more than four heads",
        source="onnx/onnx/pull/7274",
    ),
    bug(
        "heads_beyond_four_unmasked",
        "From the fifth head on nothing is masked.",
        mask_of_first_heads,
        "*attention.masked_scores",
        clause="MSK-7",
        options={"num_heads": 7},
        input="more than four heads, padding",
        source="huggingface/candle/pull/1920",
    ),
    bug(
        "heads_one_key_for_all",
        "All heads take the key of the first, as if there were one group of them.",
        key_of_head(lambda head, heads: 0),
        "*attention.key",
        clause="ATT-2",
        source="apple/axlearn/pull/842",
    ),
    bug(
        "mask_of_first_head_alone",
        "The mask is not broadcast over heads: it hides keys from the first one alone.",
        mask_of_first_head,
        "*attention.masked_scores",
        clause="MSK-7",
        input="padding",
        source="lucidrains/vit-pytorch/issues/293",
    ),
    bug(
        "mask_added_as_number",
        "A mask of truth values is added to the scores as 0 and 1.",
        bool_as_number,
        "*attention.masked_scores",
        clause="MSK-3",
        source="facebookresearch/xformers/issues/683",
    ),
    bug(
        "softmax_with_one_more",
        "The sum of the softmax has a term of 1 more, as if there were a key that nobody has.",
        one_more,
        "*attention.weights",
        clause="ATT-5",
        source="flashinfer-ai/flashinfer/pull/5090",
    ),
    bug(
        "query_bias_unscaled",
        "The query is scaled before its bias is added.",
        bias_unscaled,
        "*attention.scores",
        clause="ATT-4",
        source="keras-team/keras/issues/16916",
    ),
    bug(
        "scores_divided_by_layer",
        "Scores are divided by the number of the layer too.",
        by_layer,
        "*attention.scores",
        clause="ATT-4",
        first=("layers.1.attention.scores",),
        input="two layers",
        source="huggingface/transformers/pull/13573",
    ),
    bug(
        "norm_of_padded_row",
        "Rows are filled with zeros to a power of two, whose distance from the mean counts in the variance.",
        padded_to_power_of_two,
        "embeddings.norm",
        clause="NRM-2",
        source="unslothai/unsloth/pull/1867",
    ),
    bug(
        "norm_count_of_padded_row",
        "The variance is divided by the width of the kernel, not by that of the row.",
        variance_of_padded_row,
        "embeddings.norm",
        clause="NRM-2",
        source="tenstorrent/tt-metal/issues/49902",
    ),
)
