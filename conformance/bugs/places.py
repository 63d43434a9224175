"""Bugs that show at some positions, heads, layers, ids or samples alone, in small batches, or in a second
call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import group
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig

TOKEN, POSITION, SEGMENT, SUM = (
    "embeddings.token",
    "embeddings.position",
    "embeddings.segment",
    "embeddings.sum",
)
MASKED = "*attention.masked_scores"

Ids = NDArray[np.int64]


# Ids.


def lookup(ids: Any) -> Edit:
    """Return the edit that looks other ids up, made of the right ones."""

    def edit(m: Context, y: Array) -> Array:
        wrong = ids(m.config, m.ids)
        if (wrong == m.ids).all():
            return y
        return m.rows_of("token", wrong)

    return edit


def stored(dtype: str) -> Edit:
    """Return the edit that keeps ids in a type that does not hold them all."""
    return lookup(lambda config, ids: ids.astype(dtype).astype(np.int64) % config.vocab_size)


def halved_mantissa(config: EncoderConfig, ids: Ids) -> Ids:
    return ids.astype(np.float16).astype(np.float64).clip(0, config.vocab_size - 1).astype(np.int64)


def eight_bits(config: EncoderConfig, ids: Ids) -> Ids:
    """Keep ids as bfloat16 numbers."""
    bits = ids.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.int64)


def last_id_clamped(config: EncoderConfig, ids: Ids) -> Ids:
    return np.minimum(ids, config.vocab_size - 2)


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


def real_alone_from_one(m: Context, real: Flags) -> Ids:
    """Number real tokens from the id of padding on, which padding has itself."""
    return np.cumsum(real, 1) * real + m.config.pad_id


def padding_at_one(m: Context, real: Flags) -> Ids:
    return np.where(real, np.maximum(np.cumsum(real, 1) - 1, 0), 1)


def last_repeated(m: Context, real: Flags) -> Ids:
    return np.minimum(np.arange(real.shape[1]), max(real.shape[1] - 2, 0)) + m.config.position_start


def of_packed_batch(m: Context, real: Flags) -> Ids:
    """Count on from one sample to the next."""
    return np.arange(real.size).reshape(real.shape) % m.config.max_positions


# Samples, heads, layers, positions.


def last_sample_twice(m: Context, y: Array) -> Array:
    batch = next(iter(y.shape))
    return m.o.concat([y[: batch - 1], y[batch - 2 : batch - 1]], 0) if batch > 1 else y


def by_length(m: Context, y: Array) -> Array:
    """Leave samples in the order of their lengths."""
    order = np.argsort(-m.real.sum(1), kind="stable")
    return m.o.concat([y[int(i) : int(i) + 1] for i in order], 0)


def last_head_of_first(m: Context, y: Array) -> Array:
    heads = tuple(y.shape)[2]
    return m.o.where(m.flags(y, 2, -1), m.o.concat([y[:, :, :1]] * heads, 2), y)


def last_layer(edit: Edit) -> Edit:
    """Return the edit in the last layer alone."""
    return lambda m, y: edit(m, y) if m.layer == m.config.num_layers - 1 else y


def masked_without_last_layer(m: Context, y: Array) -> Array:
    return m.beside("scores")


def gelu_of_other_kind(m: Context, y: Array) -> Array:
    return m.activation(m.source(), "gelu_tanh")


def first_position_alone(m: Context, y: Array) -> Array:
    """Let the first token see the whole text, padding too."""
    return m.o.where(m.flags(y, 2, 0), m.beside("scores"), y)


def first_key_visible(m: Context, y: Array) -> Array:
    return m.o.where(m.flags(y, 3, 0), m.beside("scores"), y)


def own_key_hidden(m: Context, y: Array) -> Array:
    own = np.eye(tuple(y.shape)[2], dtype=bool) & (tuple(y.shape)[2] > 1)
    return m.masked(m.visible & ~own)


def last_token_unseen(m: Context, y: Array) -> Array:
    keys = np.arange(tuple(y.shape)[3])
    return m.masked(m.visible & ((keys < keys[-1]) | (len(keys) == 1)))


def local_window(m: Context, y: Array) -> Array:
    """Let a token see no further than 256 others."""
    keys = np.arange(tuple(y.shape)[3])
    far = abs(keys[:, None] - keys) > 256
    return m.masked(m.visible & ~far) if far.any() else y


# A batch of one.


def alone(edit: Edit) -> Edit:
    """Return the edit in batches of one sample alone."""
    return lambda m, y: edit(m, y) if m.ids.shape[0] == 1 else y


def unmasked(m: Context, y: Array) -> Array:
    return m.beside("scores")


def over_samples(m: Context, y: Array) -> Array:
    return m.o.log_softmax(m.source(), 0)


def mean_over_tokens(m: Context, y: Array) -> Array:
    """Take the mean over tokens, whose axis is the first one of a sample without its batch."""
    return m.norm(m.source(), axes=(-1, -2))


# Padding.


def padding_zeroed(m: Context, y: Array) -> Array:
    return m.o.where(m.real[..., None], y, y * 0.0)


def segments_of_first(m: Context, y: Array) -> Array:
    given = m.batch.required("segment_ids")
    return m.rows_of("segment", np.broadcast_to(given[:1], given.shape))


def segment_of_next(m: Context, y: Array) -> Array:
    return m.rows_of("segment", np.roll(m.batch.required("segment_ids"), 1, axis=1))


# A second call.


def kept(what: str, made: Any, edit: Any) -> Edit:
    """Return the edit that keeps what the first run made, and takes it in later ones where it fits."""

    def change(m: Context, y: Array) -> Array:
        now = made(m)
        before = m.memory.setdefault(what, now)
        size = min(before.shape[1], now.shape[1]), min(before.shape[0], now.shape[0])
        stale = now.copy()
        stale[: size[1], : size[0]] = before[: size[1], : size[0]]
        return y if (stale == now).all() else edit(m, y, stale)

    return change


def stale_mask(m: Context, y: Array, real: Any) -> Array:
    return m.masked(real[:, None, None, :])


def stale_ids(m: Context, y: Array, ids: Any) -> Array:
    return m.rows_of("token", ids)


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
        lookup(halved_mantissa),
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
        lookup(last_id_clamped),
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
        clause="POS-5",
        variant="vanilla-encoder",
        scenario="extreme",
        input="padding on the left",
        source="unslothai/unsloth/issues/3699",
    ),
    bug(
        "positions_from_padding_id",
        "Real tokens alone are numbered, from the id of padding on.",
        positions(real_alone_from_one),
        POSITION,
        clause="POS-5",
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "positions_of_padding_one",
        "Real tokens alone are numbered, and padding has position 1.",
        positions(padding_at_one),
        POSITION,
        clause="POS-6",
        input="padding",
        source="unslothai/unsloth/pull/3795",
    ),
    bug(
        "positions_last_repeated",
        "The last token has the position of the one before it.",
        positions(last_repeated),
        POSITION,
        clause="POS-5",
        source="huggingface/transformers/issues/11242",
    ),
    bug(
        "positions_counted_over_batch",
        "Positions count on from one sample to the next, as in a packed batch.",
        positions(of_packed_batch),
        POSITION,
        clause="POS-5",
        source="huggingface/sentence-transformers/pull/3879",
    ),
    bug(
        "sample_last_repeated",
        "The last sample is the one before it: a loop that ends too early.",
        last_sample_twice,
        "pooling",
        clause="HED-1",
        source="triton-lang/triton/issues/621",
    ),
    bug(
        "samples_left_by_length",
        "Samples are sorted by length and not put back.",
        by_length,
        "pooling",
        clause="HED-1",
        input="lengths that differ",
        source="pytorch/pytorch/issues/3584",
    ),
    bug(
        "head_last_value_of_first",
        "The last head has the value of the first.",
        last_head_of_first,
        "*attention.value",
        clause="ATT-2",
        source="XunhaoLai/native-sparse-attention-triton/issues/27",
    ),
    bug(
        "layer_last_unmasked",
        "The last layer is not given the mask.",
        last_layer(masked_without_last_layer),
        MASKED,
        clause="MSK-3",
        first=("layers.1.attention.masked_scores",),
        input="padding, two layers",
        cause="mask_ignored",
        source="huggingface/diffusers/issues/8886",
    ),
    bug(
        "layer_last_gelu_by_tanh",
        "The last layer approximates GELU with tanh.",
        last_layer(gelu_of_other_kind),
        "*.feed_forward.activation",
        clause="FFN-2",
        first=("layers.1.feed_forward.activation",),
        input="two layers",
        cause="activation",
        source="microsoft/onnxruntime/pull/2270",
    ),
    bug(
        "mask_not_for_first_query",
        "The first token sees padding too.",
        first_position_alone,
        MASKED,
        clause="MSK-4",
        input="padding",
        source="tensorflow/tensorflow/issues/512",
    ),
    bug(
        "mask_not_for_first_key",
        "The first key is visible even where it is padding.",
        first_key_visible,
        MASKED,
        clause="MSK-1",
        scenario="extreme",
        input="padding that comes first",
        source="huggingface/transformers/issues/18478",
    ),
    bug(
        "mask_hides_own_key",
        "No token sees itself.",
        own_key_hidden,
        MASKED,
        clause="MSK-4",
        source="meta-pytorch/attention-gym/issues/34",
    ),
    bug(
        "mask_hides_last_key",
        "No token sees the last key.",
        last_token_unseen,
        MASKED,
        clause="MSK-4",
        scenario="full",
        source="Dao-AILab/flash-attention/issues/1256",
    ),
    bug(
        "mask_local_window",
        "A token sees no further than 256 others.",
        local_window,
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
        clause="MSK-3",
        scenario="long",
        input="one sample, with padding",
        cause="mask_ignored",
        source="huggingface/optimum/issues/999",
    ),
    bug(
        "log_softmax_over_one_sample",
        "For one sample the softmax of the loss runs over samples.",
        alone(over_samples),
        "log_probabilities",
        clause="LOS-1",
        scenario="single",
        input="one sample",
        cause="softmax_axis",
        source="torch/nn/issues/1089",
    ),
    bug(
        "norm_over_tokens_of_one_sample",
        "For one sample the norm takes mean and variance over tokens too.",
        alone(mean_over_tokens),
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
        clause="EMB-6",
        input="padding",
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "padding_zeroed_after_layers",
        "Padded rows are set to zero after each layer.",
        padding_zeroed,
        "*.norm2",
        clause="NRM-1",
        input="padding",
        source="huggingface/transformers/issues/1761",
    ),
    bug(
        "segments_of_first_sample",
        "All samples have the segments of the first.",
        segments_of_first,
        SEGMENT,
        clause="EMB-5",
        input="segments that differ within a batch",
        source="huggingface/candle/pull/1920",
    ),
    bug(
        "segments_shifted",
        "Segments begin one token too late.",
        segment_of_next,
        SEGMENT,
        clause="EMB-5",
        input="two segments",
        source="huggingface/transformers/pull/1052",
    ),
    bug(
        "mask_of_first_call",
        "The mask of the first call is kept.",
        kept("mask", lambda m: m.real, stale_mask),
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
        kept("ids", lambda m: m.ids, stale_ids),
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
        clause="POS-5",
        scenario="full",
        after="ragged",
        input="a second call",
        cause="position_start",
        source="vllm-project/vllm/pull/37884",
    ),
)
