"""Bugs that show at some positions, heads, layers, ids or samples alone, in small batches, or in a second
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.embeddings import lookup, segments
from concord.conformance.bugs.operations import Array
from concord.conformance.bugs.positions import numbered, past_padding
from concord.conformance.bugs.precision import in_last_layer
from concord.spec.arrays import Ids
from concord.spec.config import EncoderConfig

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


def from_first_real(m: Context) -> Ids:
    """Count from the first real token, as for a batch that is padded on the left."""
    numbers: Ids = np.maximum(np.arange(m.real.shape[1]) - m.real.argmax(1)[:, None], 0)
    return numbers + m.config.position_start


# Samples, heads, layers, positions.


def sample_last_repeated(m: Context, y: Array) -> Array:
    batch = next(iter(y.shape))
    return m.concat([y[: batch - 1], y[batch - 2 : batch - 1]], 0) if batch > 1 else y


def samples_left_by_length(m: Context, y: Array) -> Array:
    """Leave samples in the order of their lengths."""
    order = np.argsort(-m.real.sum(1), kind="stable")
    return m.concat([y[int(i) : int(i) + 1] for i in order], 0)


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
    return m.where(m.real[..., None], y, y * 0.0)


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


def positions_moved_by_each_call(m: Context, y: Array) -> Array:
    """Move positions in place, once more with each run."""
    offset = m.memory["offset"] = m.memory.get("offset", -1) + 1
    return numbered(lambda m: past_padding(m) + offset)(m, y) if offset else y


EDITS: Changes = {
    "ids_as_float16": lookup(
        lambda config, ids: (
            ids.astype(np.float16).astype(np.float64).clip(0, config.vocab_size - 1).astype(np.int64)
        )
    ),
    "ids_as_bfloat16": lookup(eight_bits),
    "id_last_clamped": lookup(lambda config, ids: np.minimum(ids, config.vocab_size - 2)),
    "positions_from_first_real_token": numbered(from_first_real),
    "positions_from_padding_id": numbered(lambda m: np.cumsum(m.real, 1) * m.real + m.config.pad_id),
    "positions_of_padding_one": numbered(
        lambda m: np.where(m.real, np.maximum(np.cumsum(m.real, 1) - 1, 0), 1)
    ),
    "positions_last_repeated": numbered(
        lambda m: np.minimum(m.rows, max(m.real.shape[1] - 2, 0) + m.config.position_start)
    ),
    "positions_counted_over_batch": numbered(lambda m: np.arange(m.real.size).reshape(m.real.shape)),
    "head_last_value_of_first": lambda m, y: m.with_heads(y, [*range(m.config.num_heads - 1), 0]),
    "layer_last_unmasked": in_last_layer(unmasked),
    "layer_last_gelu_by_tanh": in_last_layer(lambda m, y: m.activation(m.source(), "gelu_tanh")),
    "mask_not_for_first_query": lambda m, y: m.where(m.flags(y, 2, 0), m.beside("scores"), y),
    "mask_not_for_first_key": lambda m, y: m.where(m.flags(y, 3, 0), m.beside("scores"), y),
    "mask_hides_own_key": hidden(lambda queries, keys: (queries == keys) & (keys.size > 1)),
    "mask_hides_last_key": hidden(lambda queries, keys: (keys == keys.size - 1) & (keys.size > 1)),
    "mask_local_window": hidden(lambda queries, keys: abs(queries - keys) > 256),
    "mask_dropped_for_one_sample": alone(unmasked),
    "log_softmax_over_one_sample": alone(lambda m, y: m.log_softmax(m.source(), 0)),
    "norm_over_tokens_of_one_sample": alone(lambda m, y: m.norm(m.source(), axes=(-1, -2))),
    "segments_of_first_sample": segments(lambda ids, last: np.broadcast_to(ids[:1], ids.shape)),
    "segments_shifted": segments(lambda ids, last: np.roll(ids, 1, axis=1)),
    "mask_of_first_call": kept("mask", lambda m: m.real, lambda m, real: m.masked(real[:, None, None, :])),
    "ids_of_first_call": kept("ids", lambda m: m.ids, lambda m, ids: m.rows_of("token", ids)),
}
