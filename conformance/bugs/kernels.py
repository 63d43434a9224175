"""Bugs of fused kernels.

Blocks, tails of a vector, heads, statistics of a row (SPEC ATT-2 to ATT-6, NRM-2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import group
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


def key_of_head(order: Callable[[int, int], int]) -> Edit:
    """Return the edit that gives each head the key of another, made of its number and how many there are."""

    def edit(m: Context, y: Array) -> Array:
        heads = m.config.num_heads
        return m.with_heads(y, (order(head, heads) for head in range(heads)))

    return edit


def counted(more: Callable[[Context, Array], Array]) -> Edit:
    """Return a softmax whose sum has another term, made of the scores."""
    return lambda m, y: m.softmax(total=lambda total: total + more(m, m.unnormalised))


def hidden_for(heads: Callable[[NDArray[np.int64]], Flags]) -> Edit:
    """Return the mask of some heads alone, made of their numbers."""

    def edit(m: Context, y: Array) -> Array:
        numbers = np.arange(tuple(y.shape)[1])[:, None, None]
        return m.o.where(heads(numbers), y, m.beside("scores"))

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
        mean = m.o.mean(x, -1)
        return m.norm(x, variance=lambda variance: variance + mean * mean * (width(own) / own - 1))

    return edit


def bias_unscaled(m: Context, y: Array) -> Array:
    """Scale the product with the query's weight before its bias is added."""
    bias = m.o.reshape(m.weight(f"{m.scope}.query.bias"), (1, 1, m.config.num_heads, m.config.head_dim))
    root = math.sqrt(m.config.head_dim)
    return m.scores(m.beside("query") + bias * (root - 1.0))


bug = group("kernels").bug

BUGS = (
    bug(
        "block_last_masked_as_first",
        "The last block, which is not full, has the mask of the first.",
        lambda m, y: m.masked(
            m.visible[..., np.arange(m.ids.shape[1]) % np.where(beyond_blocks(m), BLOCK, m.ids.shape[1])]
        ),
        "*attention.masked_scores",
        scenario="long",
        input="more tokens than a block, padding in the first",
        source="pytorch/pytorch/issues/162588",
    ),
    bug(
        "block_last_dropped",
        "Values in the last block, which is not full, are not added.",
        lambda m, y: m.context(m.o.where(beyond_blocks(m), m.used_weights * 0.0, m.used_weights)),
        "*attention.context",
        scenario="long",
        input="more tokens than a block",
        source="tenstorrent/tt-metal/issues/32502",
    ),
    bug(
        "block_counted_to_its_end",
        "Keys that fill the last block have score 0 and count in the sum of the softmax.",
        counted(lambda m, x: m.o.exp(-m.o.max(x, 3)) * float(-tuple(x.shape)[3] % BLOCK)),
        "*attention.weights",
        source="flashinfer-ai/flashinfer/pull/5090",
    ),
    bug(
        "block_sums_not_rescaled",
        "A softmax in blocks does not scale earlier sums when a larger score turns up.",
        maximum_of_last_block,
        "*attention.weights",
        scenario="long",
        input="more tokens than a block",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "head_tail_left_out_of_scores",
        "Features of a head that a vector of four does not fill are left out of the scores.",
        lambda m, y: m.scores(without_tail(m, m.beside("query"))),
        "*attention.scores",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "head_tail_left_out_of_context",
        "Features of a head that a vector of four does not fill are left out of the values.",
        lambda m, y: m.context(m.used_weights, without_tail(m, m.beside("value"))),
        "*attention.context",
        source="Dao-AILab/flash-attention/issues/2552",
    ),
    bug(
        "heads_beyond_four_repeated",
        "From the fifth head on the keys of the first four are taken again.",
        key_of_head(lambda head, heads: head if heads <= VECTOR else head % VECTOR),
        "*attention.key",
        options={"num_heads": 7},
        input="more than four heads",
        source="onnx/onnx/pull/7274",
    ),
    bug(
        "heads_beyond_four_unmasked",
        "From the fifth head on nothing is masked.",
        hidden_for(lambda head: head < VECTOR),
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
        source="apple/axlearn/pull/842",
    ),
    bug(
        "mask_of_first_head_alone",
        "The mask is not broadcast over heads: it hides keys from the first one alone.",
        hidden_for(lambda head: head == 0),
        "*attention.masked_scores",
        clause="MSK-7",
        input="padding",
        source="lucidrains/vit-pytorch/issues/293",
    ),
    bug(
        "mask_added_as_number",
        "A mask of truth values is added to the scores as 0 and 1.",
        lambda m, y: m.beside("scores") + m.o.constant(np.broadcast_to(m.visible, tuple(y.shape)) * 1.0, y),
        "*attention.masked_scores",
        source="facebookresearch/xformers/issues/683",
    ),
    bug(
        "softmax_with_one_more",
        "The sum of the softmax has a term of 1 more, as if there were a key that nobody has.",
        counted(lambda m, x: m.o.exp(-m.o.max(x, 3))),
        "*attention.weights",
        source="flashinfer-ai/flashinfer/pull/5090",
    ),
    bug(
        "query_bias_unscaled",
        "The query is scaled before its bias is added.",
        bias_unscaled,
        "*attention.scores",
        source="keras-team/keras/issues/16916",
    ),
    bug(
        "scores_divided_by_layer",
        "Scores are divided by the number of the layer too.",
        lambda m, y: y / float(m.layer + 1),
        "*attention.scores",
        first=("layers.1.attention.scores",),
        input="two layers",
        source="huggingface/transformers/pull/13573",
    ),
    bug(
        "norm_of_padded_row",
        "Rows are filled with zeros to a power of two, whose distance from the mean counts in the variance.",
        padded_to(lambda width: 2 ** math.ceil(math.log2(width)), filled=True),
        "embeddings.norm",
        clause="NRM-2",
        source="unslothai/unsloth/pull/1867",
    ),
    bug(
        "norm_count_of_padded_row",
        "The variance is divided by the width of the kernel, not by that of the row.",
        padded_to(lambda width: VECTOR * math.ceil(width / VECTOR), filled=False),
        "embeddings.norm",
        clause="NRM-2",
        source="tenstorrent/tt-metal/issues/49902",
    ),
)
