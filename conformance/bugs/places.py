"""Bugs that show at some positions, heads, layers, ids or samples alone, in small batches, or in a second
call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Edits, in_last_layer, only
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.embeddings import lookup
from concord.conformance.bugs.operations import Array
from concord.conformance.bugs.positions import numbered, past_padding
from concord.spec.arrays import Ids
from concord.spec.precision import precision

# Ids.


def stored(m: Context, dtype: str) -> Array:
    """Keep ids in a type that does not hold them all."""
    return lookup(m, m.ids.astype(dtype).astype(np.int64) % m.config.vocab_size)


def rounded(m: Context, number_format: str) -> Array:
    """Send ids through a number format."""
    kept = precision(number_format).round(m.ids.astype(np.float64)).astype(np.int64)
    return lookup(m, kept.clip(0, m.config.vocab_size - 1))


# Positions.


def positions_from_first_real_token(m: Context) -> Array:
    """Count from the first real token, as for a batch that is padded on the left."""
    numbers: Ids = np.maximum(np.arange(m.real.shape[1]) - m.real.argmax(1)[:, None], 0)
    return numbered(m, numbers + m.config.position_start)


# Samples, heads, layers, positions.


def sample_last_repeated(m: Context) -> Array:
    batch = next(iter(m.y.shape))
    return m.concat([m.y[: batch - 1], m.y[batch - 2 : batch - 1]], 0) if batch > 1 else m.y


def samples_left_by_length(m: Context) -> Array:
    """Leave samples in the order of their lengths."""
    order = np.argsort(-m.real.sum(1), kind="stable")
    return m.concat([m.y[int(i) : int(i) + 1] for i in order], 0)


def unmasked(m: Context) -> Array:
    return m.beside("scores")


def queries(m: Context) -> Ids:
    """Return the numbers of queries, (Q, 1)."""
    return np.arange(tuple(m.y.shape)[2])[:, None]


def keys(m: Context) -> Ids:
    """Return the numbers of keys, (S,)."""
    return np.arange(tuple(m.y.shape)[3])


def hidden(m: Context, more: Flags) -> Array:
    """Return the mask that hides more."""
    return m.masked(m.visible & ~more) if more.any() else m.y


# A batch of one.


def alone(edit: Edit) -> Edit:
    """Return the edit in batches of one sample alone."""
    return only(lambda m: m.ids.shape[0] == 1, edit)


# Padding.


def padding_zeroed(m: Context) -> Array:
    """Set padded rows to zero, (B, T, D) or (B, T, H, K)."""
    return m.where(m.real.reshape(*m.real.shape, *[1] * (len(m.y.shape) - 2)), m.y, m.y * 0.0)


def blind_zeroed(m: Context) -> Array:
    """Set rows of queries that see no key to zero, (B, Q, D)."""
    return m.where(np.asarray(m.visible.any((1, 3)))[..., None], m.y, m.y * 0.0)


# A second call.


def stale(m: Context, what: str, now: Any) -> Any:
    """Return an array as the first run made it, where it fits."""
    before = m.memory.setdefault(what, now)
    size = min(before.shape[1], now.shape[1]), min(before.shape[0], now.shape[0])
    found = now.copy()
    found[: size[1], : size[0]] = before[: size[1], : size[0]]
    return found


def mask_of_first_call(m: Context) -> Array:
    real = stale(m, "mask", m.real)
    return m.y if (real == m.real).all() else m.masked(real[:, None, None, :])


def positions_moved_by_each_call(m: Context) -> Array:
    """Move positions in place, once more with each run."""
    offset = m.memory["offset"] = m.memory.get("offset", -1) + 1
    return numbered(m, past_padding(m) + offset) if offset else m.y


EDITS: Edits = {
    "id_last_clamped": lambda m: lookup(m, np.minimum(m.ids, m.config.vocab_size - 2)),
    "positions_from_padding_id": lambda m: numbered(m, np.cumsum(m.real, 1) * m.real + m.config.pad_id),
    "positions_of_padding_one": lambda m: numbered(
        m, np.where(m.real, np.maximum(np.cumsum(m.real, 1) - 1, 0), 1)
    ),
    "positions_last_repeated": lambda m: numbered(
        m, np.minimum(m.rows, max(m.real.shape[1] - 2, 0) + m.config.position_start)
    ),
    "positions_counted_over_batch": lambda m: numbered(m, np.arange(m.real.size).reshape(m.real.shape)),
    "head_last_value_of_first": lambda m: m.with_heads(m.y, [*range(m.config.num_heads - 1), 0]),
    "layer_last_unmasked": in_last_layer(unmasked),
    "layer_last_gelu_by_tanh": in_last_layer(lambda m: m.activation(m.x, "gelu_tanh")),
    "mask_not_for_first_query": lambda m: m.where(m.flags(2, 0), m.beside("scores"), m.y),
    "mask_not_for_first_key": lambda m: m.where(m.flags(3, 0), m.beside("scores"), m.y),
    "mask_hides_own_key": lambda m: hidden(m, (queries(m) == keys(m)) & (keys(m).size > 1)),
    "mask_hides_last_key": lambda m: hidden(m, (keys(m) == keys(m).size - 1) & (keys(m).size > 1)),
    "mask_local_window": lambda m: hidden(m, abs(queries(m) - keys(m)) > 256),
    "mask_dropped_for_one_sample": alone(unmasked),
    "log_softmax_over_one_sample": alone(lambda m: m.log_softmax(m.x, 0)),
    "norm_over_tokens_of_one_sample": alone(lambda m: m.norm(m.x, axes=(-1, -2))),
    "segments_of_first_sample": lambda m: m.rows_of(
        "segment", np.broadcast_to(m.segments[:1], m.segments.shape)
    ),
    "segments_shifted": lambda m: m.rows_of("segment", np.roll(m.segments, 1, axis=1)),
    "ids_of_first_call": lambda m: lookup(m, stale(m, "ids", m.ids)),
}
