"""Bugs in position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Edits, weight, weights
from concord.conformance.bugs.context import Context
from concord.spec.arrays import Array, Ids
from concord.spec.config import EncoderConfig
from concord.spec.errors import ConfigError
from concord.spec.positions import sinusoid

TABLE = "embeddings.position.weight"


def table_of(request: Request, **fields: Any) -> Request:
    """Return the request with the table of another configuration."""
    return weights(request, {TABLE: sinusoid(request.config.replace(**fields))})


def exponent_halved(config: EncoderConfig) -> Array:
    """Return the table whose exponent lacks the factor 2 of 2 (j // 2) / D."""
    if config.position_base is None:
        raise ConfigError("positions are no sinusoid, which a wrong exponent could be in [clause=POS-3]")
    return sinusoid(config.replace(position_base=math.sqrt(config.position_base)))


def exchanged(config: EncoderConfig, table: Array) -> Array:
    """Return the table with sine and cosine in each other's place."""
    if config.position_layout == "halves":
        return np.roll(table, config.d_model // 2, axis=1)
    even = config.d_model // 2 * 2
    pairs = table[:, :even].reshape(len(table), -1, 2)[..., ::-1].reshape(len(table), -1)
    return np.concatenate([pairs, table[:, even:]], axis=1)


def row_of_padding(table: Array) -> Array:
    """Fill row 0 as any other: sin 0, cos 0."""
    table[0] = np.arange(table.shape[1]) % 2
    return table


def numbered(m: Context, rows: Ids) -> Any:
    """Return other rows of the table, (B, T); they wrap round at its ends."""
    return m.rows_of("position", rows % m.config.max_positions)


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
    "position_start": {
        "that are 1 too high": lambda m: numbered(m, m.rows + 1),
        "that are 1 too low": lambda m: numbered(m, m.rows - 1),
        "that are 2 too high": lambda m: numbered(m, m.rows + 2),
        "that are 2 too low": lambda m: numbered(m, m.rows - 2),
        "from 0": lambda m: numbered(m, m.rows - m.config.position_start),
    },
    "position_offset_by_two": lambda r: weight(r, TABLE, lambda table: np.roll(table, 2, axis=0)),
    "position_exponent_halved": lambda r: weights(r, {TABLE: exponent_halved(r.config)}),
    "position_sine_and_cosine_swapped": lambda r: weights(r, {TABLE: exchanged(r.config, r.weights[TABLE])}),
    "position_of_padding": lambda m: numbered(m, np.where(m.real, m.rows, 0)),
    "position_over_real_tokens": lambda m: numbered(
        m, np.where(m.real, over_real_tokens(m) + m.config.position_start, 0)
    ),
    "positions_of_real_tokens": lambda m: numbered(
        m, np.maximum(over_real_tokens(m), 0) + m.config.position_start
    ),
    "position_row_of_padding_not_zero": lambda r: weight(r, TABLE, row_of_padding),
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
    "position_without_padding_id": lambda m: numbered(m, m.rows - m.config.pad_id),
    "position_as_in_bert": lambda m: numbered(m, as_in_bert(m)),
    "position_over_padding": lambda m: numbered(m, np.where(m.real, past_padding(m), m.config.pad_id)),
    "position_past_padding": lambda m: numbered(m, past_padding(m)),
    "positions_from_zero": lambda m: numbered(m, np.where(m.real, over_real_tokens(m), 0)),
    "position_of_one_token_decoding": lambda m: numbered(m, m.rows + (m.real.shape[1] == 1)),
}
