"""Bugs of lookups: tokens, positions and segments (SPEC EMB-1 to EMB-5, POS-1 to POS-7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.conformance.bugs.context import Array, Context, Edits
from concord.spec.arrays import Ids
from concord.spec.positions import sinusoid
from concord.spec.precision import precision


def lookup(m: Context, ids: Ids) -> Array:
    return m.y if (ids == m.ids).all() else m.rows_of("token", ids)


def stored(m: Context, dtype: str) -> Array:
    return lookup(m, m.ids.astype(dtype).astype(np.int64) % m.config.vocab_size)


def rounded(m: Context, number_format: str) -> Array:
    ids = precision(number_format).round(m.ids.astype(np.float64)).astype(np.int64)
    return lookup(m, ids.clip(0, m.config.vocab_size - 1))


# Positions.


def numbered(m: Context, rows: Ids) -> Array:
    """Different rows of the table, (B, T), with wraparound."""
    return m.rows_of("position", rows % m.config.max_positions)


def table_of(m: Context, **fields: Any) -> Array:
    """Rows of a different configuration's table."""
    return rows_of(m, sinusoid(m.config.replace(**fields)))


def rows_of(m: Context, table: Array) -> Array:
    return m.take(m.constant(table, m.y), m.constant(m.rows))


def position_sine_and_cosine_swapped(m: Context) -> Array:
    width = m.config.d_model
    halves, pairs = np.roll(np.arange(width), width // 2), np.minimum(np.arange(width) ^ 1, width - 1)
    return rows_of(m, sinusoid(m.config)[:, halves if m.config.position_layout == "halves" else pairs])


def positions_from_first_real_token(m: Context) -> Array:
    numbers: Ids = np.maximum(np.arange(m.real.shape[1]) - m.real.argmax(1)[:, None], 0)
    return numbered(m, numbers + m.config.position_start)


def positions_moved_by_each_call(m: Context) -> Array:
    offset = m.memory["offset"] = m.memory.get("offset", -1) + 1
    rows = np.broadcast_to(np.arange(m.real.shape[1]), m.real.shape) + m.config.position_start
    return numbered(m, rows + offset) if offset else m.y


# A second call.


def stale(m: Context, what: str, now: Any) -> Any:
    """Return an array of the first run, if it fits."""
    first = m.memory.setdefault(what, now)
    samples, tokens = (min(sizes) for sizes in zip(first.shape, now.shape, strict=True))
    result = now.copy()
    result[:samples, :tokens] = first[:samples, :tokens]
    return result


EDITS: Edits = {
    "embedding_scale_inverted": lambda m: m.y / float(m.config.d_model),
    "id_last_clamped": lambda m: lookup(m, np.minimum(m.ids, m.config.vocab_size - 2)),
    "ids_of_first_call": lambda m: lookup(m, stale(m, "ids", m.ids)),
    "positions_from_padding_id": lambda m: numbered(m, np.cumsum(m.real, 1) * m.real + m.config.pad_id),
    "positions_last_repeated": lambda m: numbered(
        m, np.minimum(m.rows, max(m.real.shape[1] - 2, 0) + m.config.position_start)
    ),
    "positions_counted_over_batch": lambda m: numbered(m, np.arange(m.real.size).reshape(m.real.shape)),
    "segments_shifted": lambda m: m.rows_of("segment", np.roll(m.segments, 1, axis=1)),
}
