"""Bugs in position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context
from concord.spec.arrays import Array, Ids
from concord.spec.positions import sinusoid


def rows_of(m: Context, table: Array) -> Any:
    """Return the rows of another table."""
    return m.take(m.constant(table, m.y), m.constant(m.rows))


def table_of(m: Context, **fields: Any) -> Any:
    """Return the rows of another configuration's table."""
    return rows_of(m, sinusoid(m.config.replace(**fields)))


def position_sine_and_cosine_swapped(m: Context) -> Any:
    width = m.config.d_model
    halves, pairs = np.roll(np.arange(width), width // 2), np.minimum(np.arange(width) ^ 1, width - 1)
    return rows_of(m, sinusoid(m.config)[:, halves if m.config.position_layout == "halves" else pairs])


def numbered(m: Context, rows: Ids) -> Any:
    """Return other rows of the table, (B, T); they wrap round at its ends."""
    return m.rows_of("position", rows % m.config.max_positions)


def moved(m: Context, by: int) -> Any:
    """Number positions higher."""
    return numbered(m, m.rows + by)


def over_real_tokens(m: Context) -> Ids:
    """Count real tokens alone, from 0."""
    return np.cumsum(m.real, axis=1) - 1


def past_padding(m: Context) -> Ids:
    """Give padding a position like any token."""
    return as_in_bert(m) + m.config.position_start


def as_in_bert(m: Context) -> Ids:
    """Number every token from 0."""
    return np.broadcast_to(np.arange(m.real.shape[1]), m.real.shape)


EDITS: Edits = {
    "position_of_padding": lambda m: numbered(m, np.where(m.real, m.rows, 0)),
    "position_over_real_tokens": lambda m: numbered(
        m, np.where(m.real, over_real_tokens(m) + m.config.position_start, 0)
    ),
    "positions_of_real_tokens": lambda m: numbered(
        m, np.maximum(over_real_tokens(m), 0) + m.config.position_start
    ),
    "position_over_samples": lambda m: numbered(
        m, np.broadcast_to(np.arange(len(m.real))[:, None], m.real.shape)
    ),
    "position_constant": lambda m: numbered(m, 0 * m.rows + m.config.position_start),
    "positions_reversed": {
        "end": lambda m: numbered(m, past_padding(m)[:, ::-1]),
        "last real token": lambda m: numbered(
            m, np.maximum(m.real.sum(1, keepdims=True) - 1 - past_padding(m), 0)
        ),
    },
    "position_start_left_out": lambda m: numbered(m, m.rows - m.config.position_start),
    "position_without_padding_id": lambda m: numbered(m, m.rows - m.config.pad_id),
    "position_as_in_bert": lambda m: numbered(m, as_in_bert(m)),
    "position_over_padding": lambda m: numbered(m, np.where(m.real, past_padding(m), m.config.pad_id)),
    "position_past_padding": lambda m: numbered(m, past_padding(m)),
    "positions_from_zero": lambda m: numbered(m, np.where(m.real, over_real_tokens(m), 0)),
    "position_of_one_token_decoding": lambda m: numbered(m, m.rows + (m.real.shape[1] == 1)),
}
