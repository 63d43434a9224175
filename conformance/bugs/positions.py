"""Bugs in position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Array as Table
from concord.conformance.bugs.bug import Change, group, option, weight, weights, where
from concord.conformance.bugs.context import Context, Edit, Ids
from concord.spec.config import EncoderConfig
from concord.spec.errors import ConfigError
from concord.spec.positions import sinusoid

POSITION, TABLE = "embeddings.position", "embeddings.position.weight"

GROUP = group("positions", POSITION, variant="vanilla-encoder", clause="POS-5")
COUNTED = group(
    "positions",
    POSITION,
    variant="roberta",
    clause="POS-6",
    cause="position_of_padding",
    source="huggingface/transformers/issues/11242",
)
bug, also, counted = GROUP.bug, GROUP.also, COUNTED.bug


def table_of(**fields: Any) -> Change:
    """Return the change to the table of another configuration."""
    return weights(lambda config, given: {TABLE: sinusoid(config.replace(**fields))})


def exponent_halved(config: EncoderConfig) -> Table:
    """Return the table whose exponent lacks the factor 2 of 2 (j // 2) / D."""
    if config.position_base is None:
        raise ConfigError("positions are no sinusoid, which a wrong exponent could be in [clause=POS-3]")
    return sinusoid(config.replace(position_base=math.sqrt(config.position_base)))


def exchanged(config: EncoderConfig, table: Table) -> Table:
    """Return the table with sine and cosine in each other's place."""
    if config.position_layout == "halves":
        return np.roll(table, config.d_model // 2, axis=1)
    even = config.d_model // 2 * 2
    pairs = table[:, :even].reshape(len(table), -1, 2)[..., ::-1].reshape(len(table), -1)
    return np.concatenate([pairs, table[:, even:]], axis=1)


def row_of_padding(table: Table) -> Table:
    """Fill row 0 as any other: sin 0, cos 0."""
    table[0] = np.arange(table.shape[1]) % 2
    return table


def numbered(numbers: Callable[[Context], Ids]) -> Edit:
    """Return other rows of the table, (B, T); they wrap round at its ends."""
    return lambda m, y: m.rows_of("position", numbers(m) % m.config.max_positions)


def moved(by: int) -> Edit:
    return numbered(lambda m: m.rows + by)


def over_real_tokens(m: Context) -> Ids:
    """Count real tokens alone, from 0."""
    return np.cumsum(m.real, axis=1) - 1


def past_padding(m: Context) -> Ids:
    """Give padding a position like any token."""
    return as_in_bert(m) + m.config.position_start


def as_in_bert(m: Context) -> Ids:
    """Number every token from 0."""
    return np.broadcast_to(np.arange(m.real.shape[1]), m.real.shape)


def over_padding(m: Context) -> Ids:
    """Let padding use up numbers, though it takes its own row."""
    return np.where(m.real, past_padding(m), m.config.pad_id)


def over_samples(m: Context) -> Ids:
    """Count along the wrong axis."""
    return np.broadcast_to(np.arange(len(m.real))[:, None], m.real.shape)


BY_PADDING = {"position_of_padding": "pad_row"}

BUGS = (
    bug(
        "position_off_by_one",
        "Positions are numbered from 1 instead of 0.",
        option(position_start=1),
        variant="bert",
        cause="position_start",
    ),
    *(
        also(
            "position_start",
            f"positions that are {abs(by)} too {'high' if by > 0 else 'low'}",
            moved(by),
        )
        for by in (1, -1, 2, -2)
    ),
    also("position_start", "positions from 0", numbered(lambda m: m.rows - m.config.position_start)),
    bug(
        "position_offset_by_two",
        "The learned table keeps two rows for special positions, which are not skipped.",
        weight(TABLE, lambda table: np.roll(table, 2, axis=0)),
        variant="bert",
        cause="position_start",
    ),
    bug(
        "position_missing",
        "Positions are not added.",
        lambda m, y: y * 0.0,
        variant="bert-pytorch",
        cause="positions_ignored",
    ),
    bug(
        "position_base_1000",
        "The base of the wavelengths is 1000.",
        table_of(position_base=1000.0),
        cause="position_base",
        clause="POS-4",
    ),
    bug(
        "position_exponent_by_column",
        "The exponent is j / D for each column, not the same for a pair.",
        table_of(position_exponent="column"),
        cause="position_exponent",
        clause="POS-3",
    ),
    bug(
        "position_exponent_by_pair",
        "The exponent is the same for a pair of columns, where the source has one for each.",
        table_of(position_exponent="pair"),
        variant="tf1-text-classifier",
        cause="position_exponent",
        clause="POS-3",
    ),
    bug(
        "position_exponent_halved",
        "The exponent is (j // 2) / D, without its factor 2.",
        weights(lambda config, given: {TABLE: exponent_halved(config)}),
        cause="position_exponent",
        clause="POS-3",
    ),
    bug(
        "position_halves_for_interleaved",
        "All sines stand before all cosines.",
        table_of(position_layout="halves"),
        cause="position_layout",
        clause="POS-2",
    ),
    bug(
        "position_from_zero_for_one",
        "Positions are numbered from 0 instead of 1.",
        option(position_start=0),
        scenario="notes",
        input="positions from 1",
        alone=True,
        cause="position_start",
    ),
    bug(
        "position_interleaved_for_halves",
        "Sines and cosines alternate, where the model has all sines first.",
        table_of(position_layout="interleaved"),
        scenario="notes",
        cause="position_layout",
        clause="POS-2",
    ),
    bug(
        "position_sine_and_cosine_swapped",
        "The cosine stands on even columns and the sine on odd ones.",
        weights(lambda config, given: {TABLE: exchanged(config, given[TABLE])}),
        cause="sine_and_cosine_swapped",
        clause="POS-2",
    ),
    bug(
        "position_of_padding_counted",
        "Padding takes the row of its position, where the source gives it row 0.",
        option(position_of_padding="counted"),
        variant="keras-attention",
        input="padding",
        cause="position_of_padding",
        clause="POS-6",
    ),
    also(
        "position_of_padding",
        "padding that has row 0",
        numbered(lambda m: np.where(m.real, m.rows, 0)),
        clause="POS-6",
    ),
    bug(
        "position_over_real_tokens",
        "Only real tokens are counted, so that padding uses up no number.",
        numbered(lambda m: np.where(m.real, over_real_tokens(m) + m.config.position_start, 0)),
        variant="bert",
        input="padding",
        cause="positions_of_real_tokens",
    ),
    also(
        "positions_of_real_tokens",
        "positions that count real tokens alone, padding taking that of the token before it",
        numbered(lambda m: np.maximum(over_real_tokens(m), 0) + m.config.position_start),
    ),
    bug(
        "position_row_of_padding_not_zero",
        "Row 0, which padding takes, is (sin 0, cos 0, ...) and not zero.",
        weight(TABLE, row_of_padding),
        variant="keras-attention",
        input="padding",
        cause="position_row_of_padding",
        clause="POS-6",
    ),
    bug(
        "position_over_samples",
        "Positions are counted along the batch axis.",
        numbered(over_samples),
        input="more than one sample or token",
        cause="positions_of_samples",
    ),
    also(
        "position_constant",
        "the same position for every token",
        numbered(lambda m: 0 * m.rows + m.config.position_start),
    ),
    also(
        "positions_reversed",
        "positions that are counted from the end",
        numbered(lambda m: past_padding(m)[:, ::-1]),
    ),
    also(
        "positions_reversed",
        "positions that are counted from the last real token",
        numbered(lambda m: np.maximum(m.real.sum(1, keepdims=True) - 1 - past_padding(m), 0)),
    ),
    counted(
        "position_without_padding_id",
        "The id of padding is not added to what is counted.",
        numbered(lambda m: m.rows - m.config.pad_id),
        cause="position_start",
        clause="POS-5",
    ),
    counted(
        "position_as_in_bert",
        "Every token is numbered from 0, as in BERT.",
        where(numbered(as_in_bert), **BY_PADDING),
    ),
    counted(
        "position_over_padding",
        "Padding inside the text uses up a number.",
        where(numbered(over_padding), **BY_PADDING),
        input="padding inside the text",
    ),
    counted(
        "position_past_padding",
        "Padding has a position like any token.",
        numbered(past_padding),
        input="padding",
    ),
    also(
        "position_start",
        "positions from 0, and row 0 for padding",
        where(numbered(lambda m: np.where(m.real, over_real_tokens(m), 0)), **BY_PADDING),
    ),
    bug(
        "position_of_one_token_decoding",
        "A text of one token takes the branch for decoding, and with it the next position.",
        numbered(lambda m: m.rows + (m.real.shape[1] == 1)),
        variant="bert",
        scenario="single",
        input="texts of one token",
        cause="position_start",
    ),
)
