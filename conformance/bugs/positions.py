"""Bugs in position tables and position numbers (SPEC POS-1 to POS-7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Array as Table
from concord.conformance.bugs.bug import Bug, Change, edited, option, weight, weights
from concord.conformance.bugs.context import Context, Ids
from concord.spec.config import EncoderConfig
from concord.spec.errors import ConfigError
from concord.spec.parameters import Weights
from concord.spec.positions import sinusoid

HUB = "https://github.com/"
POSITION, TABLE = "embeddings.position", "embeddings.position.weight"


def table_of(**fields: Any) -> Change:
    """Return the change to the table of another configuration."""
    return weights(lambda config, given: {TABLE: sinusoid(config.replace(**fields))})


def exponent_halved(config: EncoderConfig, given: Weights) -> dict[str, Table]:
    """Forget the factor 2 of 2 (j // 2) / D."""
    if config.position_base is None:
        raise ConfigError("positions are no sinusoid, which a wrong exponent could be in [clause=POS-3]")
    column = np.arange(config.d_model)
    angle = np.arange(config.max_positions)[:, None] / config.position_base ** (column // 2 / config.d_model)
    return {TABLE: np.where(column % 2 == 0, np.sin(angle), np.cos(angle))}


def row_of_padding(table: Table) -> Table:
    """Fill row 0 as any other: sin 0, cos 0."""
    table[0] = np.arange(table.shape[1]) % 2
    return table


def numbered(numbers: Callable[[Context], Ids]) -> Change:
    """Return the change to other rows of the table, (B, T)."""
    return edited(lambda m, y: m.rows_of("position", numbers(m)), POSITION)


def over_real_tokens(m: Context) -> Ids:
    """Count real tokens alone, from 0; padding takes row 0."""
    return np.where(m.real, np.cumsum(m.real, axis=1) - 1, 0)


def without_padding_id(m: Context) -> Ids:
    """Forget to add the id of padding."""
    rows: Ids = m.rows - m.config.pad_id
    return rows


def as_in_bert(m: Context) -> Ids:
    """Number every token from 0."""
    return np.broadcast_to(np.arange(m.ids.shape[1]), m.ids.shape)


def over_padding(m: Context) -> Ids:
    """Let padding use up numbers, though it takes its own row."""
    return np.where(m.real, as_in_bert(m) + m.config.position_start, m.config.pad_id)


def past_padding(m: Context) -> Ids:
    """Give padding a position like any token."""
    return as_in_bert(m) + m.config.position_start


def over_samples(m: Context) -> Ids:
    """Count along the wrong axis."""
    batch, tokens = m.ids.shape
    return np.repeat(np.arange(batch)[:, None], tokens, axis=1)


def as_if_decoding(m: Context) -> Ids:
    """Take a single token for the next one of a text under way."""
    rows: Ids = m.rows + (m.ids.shape[1] == 1)
    return rows


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{
            "name": name,
            "group": "positions",
            "what": what,
            "variant": "vanilla-encoder",
            "first": ("embeddings.position",),
            **fields,
        }
    )


def counted(name: str, what: str, rows: Callable[[Context], Ids], **fields: Any) -> Bug:
    """Return a mistake in positions that are counted over real tokens, from the id of padding."""
    return mutant(
        name,
        what,
        **{
            "variant": "roberta",
            "change": numbered(rows),
            "cause": "position_of_padding",
            "clause": "POS-6",
            "source": f"{HUB}huggingface/transformers/issues/11242",
            **fields,
        },
    )


BUGS = (
    mutant(
        "position_off_by_one",
        "Positions are numbered from 1 instead of 0.",
        variant="bert",
        change=option(position_start=1),
        cause="position_start",
        clause="POS-5",
    ),
    mutant(
        "position_offset_by_two",
        "The learned table keeps two rows for special positions, which are not skipped.",
        variant="bert",
        change=weight(TABLE, lambda table: np.roll(table, 2, axis=0)),
        cause="position_start",
        clause="POS-5",
    ),
    mutant(
        "position_missing",
        "Positions are not added.",
        variant="bert-pytorch",
        change=edited(lambda m, y: y * 0.0, POSITION),
        cause="positions_ignored",
        clause="POS-5",
    ),
    mutant(
        "position_base_1000",
        "The base of the wavelengths is 1000.",
        change=table_of(position_base=1000.0),
        cause="position_base",
        clause="POS-4",
    ),
    mutant(
        "position_exponent_by_column",
        "The exponent is j / D for each column, not the same for a pair.",
        change=table_of(position_exponent="column"),
        cause="position_exponent",
        clause="POS-3",
    ),
    mutant(
        "position_exponent_by_pair",
        "The exponent is the same for a pair of columns, where the source has one for each.",
        variant="tf1-text-classifier",
        change=table_of(position_exponent="pair"),
        cause="position_exponent",
        clause="POS-3",
    ),
    mutant(
        "position_exponent_halved",
        "The exponent is (j // 2) / D, without its factor 2.",
        change=weights(exponent_halved),
        cause="position_exponent",
        clause="POS-3",
    ),
    mutant(
        "position_halves_for_interleaved",
        "All sines stand before all cosines.",
        change=table_of(position_layout="halves"),
        cause="position_layout",
        clause="POS-2",
    ),
    mutant(
        "position_from_zero_for_one",
        "Positions are numbered from 0 instead of 1.",
        scenario="notes",
        input="positions from 1",
        alone=True,
        change=option(position_start=0),
        cause="position_start",
        clause="POS-5",
    ),
    mutant(
        "position_interleaved_for_halves",
        "Sines and cosines alternate, where the model has all sines first.",
        scenario="notes",
        change=table_of(position_layout="interleaved"),
        cause="position_layout",
        clause="POS-2",
    ),
    mutant(
        "position_sine_and_cosine_swapped",
        "The cosine stands on even columns and the sine on odd ones.",
        change=weight(TABLE, lambda table: table.reshape(len(table), -1, 2)[..., ::-1].reshape(table.shape)),
        cause="sine_and_cosine_swapped",
        clause="POS-2",
    ),
    mutant(
        "position_of_padding_counted",
        "Padding takes the row of its position, where the source gives it row 0.",
        variant="keras-attention",
        input="padding",
        change=option(position_of_padding="counted"),
        cause="position_of_padding",
        clause="POS-6",
    ),
    mutant(
        "position_over_real_tokens",
        "Only real tokens are counted, so that padding uses up no number.",
        variant="bert",
        input="padding",
        change=numbered(over_real_tokens),
        cause="positions_of_real_tokens",
        clause="POS-5",
    ),
    mutant(
        "position_row_of_padding_not_zero",
        "Row 0, which padding takes, is (sin 0, cos 0, ...) and not zero.",
        variant="keras-attention",
        input="padding",
        change=weight(TABLE, row_of_padding),
        cause="position_row_of_padding",
        clause="POS-6",
    ),
    mutant(
        "position_over_samples",
        "Positions are counted along the batch axis.",
        input="more than one sample or token",
        change=numbered(over_samples),
        cause="positions_of_samples",
        clause="POS-5",
    ),
    counted(
        "position_without_padding_id",
        "The id of padding is not added to what is counted.",
        without_padding_id,
        cause="position_start",
        clause="POS-5",
    ),
    counted("position_as_in_bert", "Every token is numbered from 0, as in BERT.", as_in_bert),
    counted(
        "position_over_padding",
        "Padding inside the text uses up a number.",
        over_padding,
        input="padding inside the text",
    ),
    counted("position_past_padding", "Padding has a position like any token.", past_padding, input="padding"),
    mutant(
        "position_of_one_token_decoding",
        "A text of one token takes the branch for decoding, and with it the next position.",
        variant="bert",
        scenario="single",
        input="texts of one token",
        change=numbered(as_if_decoding),
        cause="position_start",
        clause="POS-5",
    ),
)
