"""Bugs that show at some positions, heads, layers, ids or samples alone, in small batches, or in a second
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import group
from concord.conformance.bugs.context import Context, Edit, Flags, Ids
from concord.conformance.bugs.embeddings import lookup, segments
from concord.conformance.bugs.operations import Array
from concord.conformance.bugs.rounding import in_last_layer
from concord.spec.config import EncoderConfig

TOKEN, POSITION, SEGMENT, SUM = (
    "embeddings.token",
    "embeddings.position",
    "embeddings.segment",
    "embeddings.sum",
)
MASKED = "*attention.masked_scores"

# Ids.


def stored(dtype: str) -> Edit:
    """Return the edit that keeps ids in a type that does not hold them all."""
    return lookup(lambda config, ids: ids.astype(dtype).astype(np.int64) % config.vocab_size)


def eight_bits(config: EncoderConfig, ids: Ids) -> Ids:
    """Keep ids as bfloat16 numbers."""
    bits = ids.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.int64)


# Positions.


def positions(numbers: Any) -> Edit:
    """Return the edit that takes other rows of the position table, made of the real tokens, (B, T)."""

    def edit(m: Context, y: Array) -> Array:
        return m.rows_of("position", np.broadcast_to(numbers(m, m.real), m.ids.shape))

    return edit


def from_first_real(m: Context, real: Flags) -> Ids:
    """Count from the first real token, as for a batch that is padded on the left."""
    numbers: Ids = np.maximum(np.arange(real.shape[1]) - real.argmax(1)[:, None], 0)
    return numbers + m.config.position_start


# Samples, heads, layers, positions.


def last_sample_twice(m: Context, y: Array) -> Array:
    batch = next(iter(y.shape))
    return m.o.concat([y[: batch - 1], y[batch - 2 : batch - 1]], 0) if batch > 1 else y


def by_length(m: Context, y: Array) -> Array:
    """Leave samples in the order of their lengths."""
    order = np.argsort(-m.real.sum(1), kind="stable")
    return m.o.concat([y[int(i) : int(i) + 1] for i in order], 0)


def unmasked(m: Context, y: Array) -> Array:
    return m.beside("scores")


def hidden(keys: Callable[[Ids, Ids], Flags]) -> Edit:
    """Return the mask that hides more, made of the numbers of queries, (Q, 1), and of keys, (S,)."""

    def edit(m: Context, y: Array) -> Array:
        queries, of_keys = np.arange(tuple(y.shape)[2])[:, None], np.arange(tuple(y.shape)[3])
        more = keys(queries, of_keys)
        return m.masked(m.visible & ~more) if more.any() else y

    return edit


# A batch of one.


def alone(edit: Edit) -> Edit:
    """Return the edit in batches of one sample alone."""
    return lambda m, y: edit(m, y) if m.ids.shape[0] == 1 else y


# Padding.


def padding_zeroed(m: Context, y: Array) -> Array:
    return m.o.where(m.real[..., None], y, y * 0.0)


# A second call.


def kept(what: str, made: Any, edit: Any) -> Edit:
    """Return the edit that keeps what the first run made, and takes it in later ones where it fits."""

    def change(m: Context, y: Array) -> Array:
        now = made(m)
        before = m.memory.setdefault(what, now)
        size = min(before.shape[1], now.shape[1]), min(before.shape[0], now.shape[0])
        stale = now.copy()
        stale[: size[1], : size[0]] = before[: size[1], : size[0]]
        return y if (stale == now).all() else edit(m, stale)

    return change


def growing(m: Context, y: Array) -> Array:
    """Move positions in place, once more with each run."""
    offset = m.memory["offset"] = m.memory.get("offset", -1) + 1
    rows = np.broadcast_to(np.arange(m.ids.shape[1]) + m.config.position_start + offset, m.ids.shape)
    return m.rows_of("position", rows % m.config.max_positions) if offset else y


bug = group("places").bug

BUGS = (
    bug(
        "ids_in_8_bits",
        "Ids are kept in 8 bits.",
        stored("uint8"),
        TOKEN,
        clause="EMB-1",
        scenario="long",
        input="ids beyond 255",
        source="rwitten/HighPerfLLMs2024/issues/7",
    ),
    bug(
        "ids_in_16_bits",
        "Ids are kept in 16 bits with a sign, and wrap round.",
        stored("int16"),
        TOKEN,
        clause="EMB-1",
        scenario="long",
        input="ids beyond 32767",
        source="urvashik/knnlm/issues/6",
    ),
    bug(
        "ids_in_16_bits_unsigned",
        "Ids are kept in 16 bits.",
        stored("uint16"),
        TOKEN,
        clause="EMB-1",
        scenario="long",
        input="ids beyond 65535",
        source="karpathy/nanoGPT/issues/373",
    ),
    bug(
        "ids_as_float16",
        "Ids pass through float16.",
        lookup(
            lambda config, ids: (
                ids.astype(np.float16).astype(np.float64).clip(0, config.vocab_size - 1).astype(np.int64)
            )
        ),
        TOKEN,
        clause="EMB-1",
        scenario="long",
        input="ids beyond 2048",
        source="urvashik/knnlm/issues/6",
    ),
    bug(
        "ids_as_bfloat16",
        "Ids pass through bfloat16.",
        lookup(eight_bits),
        TOKEN,
        clause="EMB-1",
        scenario="long",
        input="ids beyond 256",
        source="karpathy/nanoGPT/issues/373",
    ),
    bug(
        "id_last_clamped",
        "The last id of the vocabulary takes the row before it.",
        lookup(lambda config, ids: np.minimum(ids, config.vocab_size - 2)),
        TOKEN,
        clause="EMB-1",
        scenario="full",
        input="the last id",
        source="keras-team/keras/issues/11819",
    ),
    bug(
        "positions_from_first_real_token",
        "Positions count from the first real token, as for padding on the left.",
        positions(from_first_real),
        POSITION,
        variant="vanilla-encoder",
        scenario="extreme",
        input="padding on the left",
        source="unslothai/unsloth/issues/3699",
    ),
    bug(
        "positions_from_padding_id",
        "Real tokens alone are numbered, from the id of padding on.",
        positions(lambda m, real: np.cumsum(real, 1) * real + m.config.pad_id),
        POSITION,
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "positions_of_padding_one",
        "Real tokens alone are numbered, and padding has position 1.",
        positions(lambda m, real: np.where(real, np.maximum(np.cumsum(real, 1) - 1, 0), 1)),
        POSITION,
        clause="POS-6",
        input="padding",
        source="unslothai/unsloth/pull/3795",
    ),
    bug(
        "positions_last_repeated",
        "The last token has the position of the one before it.",
        positions(lambda m, real: np.minimum(m.rows, max(real.shape[1] - 2, 0) + m.config.position_start)),
        POSITION,
        source="huggingface/transformers/issues/11242",
    ),
    bug(
        "positions_counted_over_batch",
        "Positions count on from one sample to the next, as in a packed batch.",
        positions(lambda m, real: np.arange(real.size).reshape(real.shape) % m.config.max_positions),
        POSITION,
        source="huggingface/sentence-transformers/pull/3879",
    ),
    bug(
        "sample_last_repeated",
        "The last sample is the one before it: a loop that ends too early.",
        last_sample_twice,
        "pooling",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "samples_left_by_length",
        "Samples are sorted by length and not put back.",
        by_length,
        "pooling",
        input="lengths that differ",
        source="pytorch/pytorch/issues/3584",
    ),
    bug(
        "head_last_value_of_first",
        "The last head has the value of the first.",
        lambda m, y: m.with_heads(y, [*range(m.config.num_heads - 1), 0]),
        "*attention.value",
        source="XunhaoLai/native-sparse-attention-triton/issues/27",
    ),
    bug(
        "layer_last_unmasked",
        "The last layer is not given the mask.",
        in_last_layer(unmasked),
        MASKED,
        first=("layers.1.attention.masked_scores",),
        input="padding, two layers",
        cause="mask_ignored",
        source="huggingface/diffusers/issues/8886",
    ),
    bug(
        "layer_last_gelu_by_tanh",
        "The last layer approximates GELU with tanh.",
        in_last_layer(lambda m, y: m.activation(m.source(), "gelu_tanh")),
        "*.feed_forward.activation",
        first=("layers.1.feed_forward.activation",),
        input="two layers",
        cause="activation",
        source="microsoft/onnxruntime/pull/2270",
    ),
    bug(
        "mask_not_for_first_query",
        "The first token sees padding too.",
        lambda m, y: m.o.where(m.flags(y, 2, 0), m.beside("scores"), y),
        MASKED,
        clause="MSK-4",
        input="padding",
        source="tensorflow/tensorflow/issues/512",
    ),
    bug(
        "mask_not_for_first_key",
        "The first key is visible even where it is padding.",
        lambda m, y: m.o.where(m.flags(y, 3, 0), m.beside("scores"), y),
        MASKED,
        clause="MSK-1",
        scenario="extreme",
        input="padding that comes first",
        source="huggingface/transformers/issues/18478",
    ),
    bug(
        "mask_hides_own_key",
        "No token sees itself.",
        hidden(lambda queries, keys: (queries == keys) & (keys.size > 1)),
        MASKED,
        clause="MSK-4",
        source="meta-pytorch/attention-gym/issues/34",
    ),
    bug(
        "mask_hides_last_key",
        "No token sees the last key.",
        hidden(lambda queries, keys: (keys == keys.size - 1) & (keys.size > 1)),
        MASKED,
        clause="MSK-4",
        scenario="full",
        source="Dao-AILab/flash-attention/issues/1256",
    ),
    bug(
        "mask_local_window",
        "A token sees no further than 256 others.",
        hidden(lambda queries, keys: abs(queries - keys) > 256),
        MASKED,
        clause="MSK-4",
        scenario="long",
        input="more than 257 tokens",
        source="meta-pytorch/attention-gym/issues/34",
    ),
    bug(
        "mask_dropped_for_one_sample",
        "A batch of one sample is taken for one without padding.",
        alone(unmasked),
        MASKED,
        scenario="long",
        input="one sample, with padding",
        cause="mask_ignored",
        source="huggingface/optimum/issues/999",
    ),
    bug(
        "log_softmax_over_one_sample",
        "For one sample the softmax of the loss runs over samples.",
        alone(lambda m, y: m.o.log_softmax(m.source(), 0)),
        "log_probabilities",
        scenario="single",
        input="one sample",
        cause="softmax_axis",
        source="torch/nn/issues/1089",
    ),
    bug(
        "norm_over_tokens_of_one_sample",
        "For one sample the norm takes mean and variance over tokens too.",
        alone(lambda m, y: m.norm(m.source(), axes=(-1, -2))),
        "embeddings.norm",
        clause="NRM-2",
        scenario="long",
        input="one sample of several tokens",
        cause="norm_axis",
        source="NVIDIA/tacotron2/pull/303",
    ),
    bug(
        "padding_zeroed_after_embeddings",
        "The sum of the embeddings is set to zero for padding.",
        padding_zeroed,
        SUM,
        input="padding",
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "padding_zeroed_after_layers",
        "Padded rows are set to zero after each layer.",
        padding_zeroed,
        "*.norm2",
        input="padding",
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "segments_of_first_sample",
        "All samples have the segments of the first.",
        segments(lambda ids, last: np.broadcast_to(ids[:1], ids.shape)),
        SEGMENT,
        input="segments that differ within a batch",
        source="huggingface/candle/pull/1920",
    ),
    bug(
        "segments_shifted",
        "Segments begin one token too late.",
        segments(lambda ids, last: np.roll(ids, 1, axis=1)),
        SEGMENT,
        input="two segments",
        source="huggingface/transformers/pull/1052",
    ),
    bug(
        "mask_of_first_call",
        "The mask of the first call is kept.",
        kept("mask", lambda m: m.real, lambda m, real: m.masked(real[:, None, None, :])),
        MASKED,
        clause="MSK-1",
        scenario="full",
        after="ragged",
        input="a second call with another padding",
        source="facebookresearch/xformers/issues/655",
    ),
    bug(
        "ids_of_first_call",
        "Ids are read from a buffer that the first call filled.",
        kept("ids", lambda m: m.ids, lambda m, ids: m.rows_of("token", ids)),
        TOKEN,
        clause="EMB-1",
        scenario="full",
        after="ragged",
        input="a second call with other ids",
        source="microsoft/onnxruntime-genai/pull/271",
    ),
    bug(
        "positions_moved_by_each_call",
        "Positions are moved in place, once more with each call.",
        growing,
        POSITION,
        scenario="full",
        after="ragged",
        input="a second call",
        cause="position_start",
        source="vllm-project/vllm/pull/37884",
    ),
)
