"""Bugs in the embeddings (SPEC EMB-1 to EMB-6)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Bug, edited, inputs, option, weight
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array

TOKEN, SEGMENT, SUM, NORM = "embeddings.token", "embeddings.segment", "embeddings.sum", "embeddings.norm"
ORDER = "sums in another order round differently, and differ in nothing else"


def terms(m: Context, *names: str) -> list[Array]:
    """Return the vectors that are added, in some order."""
    return [m.beside(name) for name in names if name != "segment" or m.config.num_segments]


def positions_scaled_too(m: Context, y: Array) -> Array:
    token, position, *segment = terms(m, "token", "position", "segment")
    return sum(segment, start=token + position * math.sqrt(m.config.d_model))


def renormalised(m: Context, y: Array) -> Array:
    """Shorten rows to length 1, as ``max_norm=1`` does."""
    length = m.o.sqrt(m.o.sum(y * y, -1))
    return m.o.where(length > 1.0, y / length, y)


def dropped(m: Context, y: Array) -> Array:
    """Drop every seventh number of the sum, and enlarge the others."""
    shape = tuple(y.shape)
    kept = (np.arange(np.prod(shape)) % 7 > 0).reshape(shape) * (7 / 6)
    return y * m.o.constant(kept, y)


def token_last(m: Context, y: Array) -> Array:
    position, *segment, token = terms(m, "position", "segment", "token")
    return sum(segment, start=position) + token


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{
            "name": name,
            "group": "embeddings",
            "what": what,
            "variant": "nndl-paddle",
            "first": ("embeddings.token",),
            **fields,
        }
    )


BUGS = (
    mutant(
        "embedding_scale_missing",
        "Token vectors are not multiplied by sqrt(D).",
        change=option(embedding_scale="one"),
        cause="embedding_scale",
        clause="EMB-2",
    ),
    mutant(
        "embedding_scale_added",
        "Token vectors are multiplied by sqrt(D) as the paper says, where the source does not do it.",
        variant="vanilla-encoder",
        change=option(embedding_scale="sqrt_d_model"),
        cause="embedding_scale",
        clause="EMB-2",
    ),
    mutant(
        "embedding_scale_on_positions",
        "The sum of token and position is multiplied by sqrt(D), the position with it.",
        first=("embeddings.sum",),
        change=edited(positions_scaled_too, SUM),
        cause="position_scaled",
        clause="EMB-2",
    ),
    mutant(
        "embedding_scale_inverted",
        "Token vectors are divided by sqrt(D).",
        change=edited(lambda m, y: y / float(m.config.d_model), TOKEN),
        cause="embedding_scale_inverted",
        clause="EMB-2",
    ),
    mutant(
        "embedding_rows_renormalised",
        "Rows of the token table are shortened to length 1 when they are looked up (max_norm).",
        variant="bert",
        change=edited(renormalised, TOKEN),
        cause="token_rows_renormalised",
        clause="EMB-1",
    ),
    mutant(
        "embedding_ids_off_by_one",
        "The token table starts with a row for the unknown word that the ids do not count.",
        variant="bert",
        change=weight("embeddings.token.weight", lambda table: np.roll(table, 1, axis=0)),
        cause="token_ids_shifted",
        clause="EMB-1",
    ),
    mutant(
        "embedding_padding_row_used",
        "Padding takes the stored row where the source takes a zero vector.",
        input="padding",
        change=option(token_padding_forward="stored"),
        cause="token_padding_forward",
        clause="EMB-3",
    ),
    mutant(
        "embedding_padding_row_zeroed",
        "Padding takes a zero vector where the source takes the stored row.",
        variant="bert",
        input="padding",
        change=option(token_padding_forward="zero"),
        cause="token_padding_forward",
        clause="EMB-3",
    ),
    mutant(
        "embedding_padding_row_hard_coded",
        "The zero vector is that of id 1, whatever the id of padding is.",
        input="padding",
        change=option(token_padding_row=1),
        cause="token_padding_row",
        clause="EMB-3",
    ),
    mutant(
        "embedding_segments_ignored",
        "Segment vectors are not added.",
        variant="bert",
        first=("embeddings.segment",),
        change=edited(lambda m, y: y * 0.0, SEGMENT),
        cause="segments_ignored",
        clause="EMB-5",
    ),
    mutant(
        "embedding_segment_ids_left_out",
        "Segment ids are not passed on, and default to 0.",
        variant="bert",
        first=("embeddings.segment",),
        input="two segments",
        change=inputs(lambda config, batch: {"segment_ids": np.zeros_like(batch.required("segment_ids"))}),
        cause="segment_ids_ignored",
        clause="EMB-5",
    ),
    mutant(
        "embedding_segment_ids_from_zero",
        "Segment ids start at 0, where the source keeps 0 for padding and starts at 1.",
        variant="bert-pytorch",
        first=("embeddings.segment",),
        change=inputs(
            lambda config, batch: {"segment_ids": np.maximum(batch.required("segment_ids") - 1, 0)}
        ),
        cause="segment_ids_shifted or segment_ids_ignored",  # with two segments both are 0
        clause="EMB-5",
    ),
    mutant(
        "embedding_ids_of_16_bits",
        "Ids are kept in 16 bits.",
        variant="bert",
        scenario="long",
        first=("embeddings.token",),
        input="a table of more than 65,536 rows",
        alone=True,
        change=inputs(lambda config, batch: {"input_ids": batch.required("input_ids") & 0xFFFF}),
        cause="ids_in_16_bits_unsigned",
        clause="EMB-1",
    ),
    mutant(
        "embedding_norm_missing",
        "No norm follows the sum of the embeddings.",
        variant="bert",
        first=("embeddings.norm",),
        change=edited(lambda m, y: m.source(), NORM),
        cause="norm_missing",
        clause="NRM-1",
    ),
    mutant(
        "embedding_dropout_left_on",
        "Dropout after the embeddings stays on in evaluation.",
        variant="bert",
        first=("embeddings.sum",),
        change=edited(dropped, SUM),
        cause="dropout",
        clause="DRP-1",
    ),
    mutant(
        "embedding_sum_reordered",
        "Position and segment are added first, the token last.",
        variant="bert",
        first=(),
        equivalent={"float64": ORDER, "float32": ORDER},
        change=edited(token_last, SUM),
    ),
)
