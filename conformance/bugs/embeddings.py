"""Bugs in the embeddings (SPEC EMB-1 to EMB-6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import group, option, weight, where
from concord.conformance.bugs.context import Context, Edit, Ids
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig

TOKEN, SEGMENT, SUM = "embeddings.token", "embeddings.segment", "embeddings.sum"
ORDER = "sums in another order round differently, and differ in nothing else"
NNDL = "nndl-paddle"

GROUP = group("embeddings", TOKEN, clause="EMB-2")
OF_SEGMENTS, OF_SUM = group("embeddings", SEGMENT, clause="EMB-5"), group("embeddings", SUM, clause="EMB-2")
bug, also = GROUP.bug, GROUP.also


def summed(order: str = "token position segment", /, **factors: Callable[[float], float]) -> Edit:
    """Return the sum of the vectors in an order, each times a factor made of D."""

    def edit(m: Context, y: Array) -> Array:
        names = [name for name in order.split() if name != "segment" or m.config.num_segments]
        terms = [
            m.beside(name) * factors[name](m.config.d_model) if name in factors else m.beside(name)
            for name in names
        ]
        return sum(terms[1:], start=terms[0])

    return edit


def root(width: float) -> float:
    return float(width**0.5)


def lookup(ids: Callable[[EncoderConfig, Ids], Ids]) -> Edit:
    """Return the edit that looks other ids up, made of the right ones."""

    def edit(m: Context, y: Array) -> Array:
        wrong = ids(m.config, m.ids)
        return y if (wrong == m.ids).all() else m.rows_of("token", wrong)

    return edit


def renormalised(m: Context, y: Array) -> Array:
    """Shorten rows to length 1, as ``max_norm=1`` does."""
    length = m.o.sqrt(m.o.sum(y * y, -1))
    return m.o.where(length > 1.0, y / length, y)


def segments(ids: Callable[[Ids, int], Ids]) -> Edit:
    """Return the vectors of other segments, made of the right ones and the number of the last."""
    return lambda m, y: m.rows_of("segment", ids(m.batch.required("segment_ids"), m.config.num_segments - 1))


BUGS = (
    bug(
        "embedding_scale_missing",
        "Token vectors are not multiplied by sqrt(D).",
        option(embedding_scale="one"),
        variant=NNDL,
        cause="embedding_scale",
    ),
    bug(
        "embedding_scale_added",
        "Token vectors are multiplied by sqrt(D) as the paper says, where the source does not do it.",
        option(embedding_scale="sqrt_d_model"),
        variant="vanilla-encoder",
        cause="embedding_scale",
    ),
    bug(
        "embedding_scale_inverted",
        "Token vectors are divided by sqrt(D).",
        where(lambda m, y: y / float(m.config.d_model), embedding_scale="sqrt_d_model"),
        variant=NNDL,
    ),
    also(
        "embedding_scale_twice",
        "a multiplication by D instead of sqrt(D)",
        where(lambda m, y: y * root(m.config.d_model), embedding_scale="sqrt_d_model"),
    ),
    OF_SUM.bug(
        "embedding_scale_on_positions",
        "The sum of token and position is multiplied by sqrt(D), the position with it.",
        summed(position=root),
        variant=NNDL,
        cause="position_scaled",
    ),
    OF_SUM.also("sum_scaled", "a sum that is multiplied by sqrt(D)", lambda m, y: y * root(m.config.d_model)),
    OF_SUM.also(
        "token_scaled_in_sum", "token vectors that are multiplied by sqrt(D) once more", summed(token=root)
    ),
    *(
        OF_SUM.also(
            f"{name}_left_out",
            f"a sum without the {name} vectors",
            summed(**{name: lambda width: 0.0}),
            clause="EMB-6",
        )
        for name in ("token", "position", "segment")
    ),
    bug(
        "embedding_rows_renormalised",
        "Rows of the token table are shortened to length 1 when they are looked up (max_norm).",
        renormalised,
        cause="token_rows_renormalised",
        clause="EMB-1",
    ),
    bug(
        "embedding_ids_off_by_one",
        "The token table starts with a row for the unknown word that the ids do not count.",
        weight("embeddings.token.weight", lambda table: np.roll(table, 1, axis=0)),
        cause="token_ids_shifted",
        clause="EMB-1",
    ),
    bug(
        "embedding_padding_row_used",
        "Padding takes the stored row where the source takes a zero vector.",
        option(token_padding_forward="stored"),
        variant=NNDL,
        input="padding",
        cause="token_padding_forward",
        clause="EMB-3",
    ),
    bug(
        "embedding_padding_row_zeroed",
        "Padding takes a zero vector where the source takes the stored row.",
        option(token_padding_forward="zero"),
        input="padding",
        cause="token_padding_forward",
        clause="EMB-3",
    ),
    bug(
        "embedding_padding_row_hard_coded",
        "The zero vector is that of id 1, whatever the id of padding is.",
        option(token_padding_row=1),
        variant=NNDL,
        input="padding",
        cause="token_padding_row",
        clause="EMB-3",
    ),
    OF_SEGMENTS.bug(
        "embedding_segments_ignored",
        "Segment vectors are not added.",
        lambda m, y: y * 0.0,
        cause="segments_ignored",
    ),
    OF_SEGMENTS.bug(
        "embedding_segment_ids_left_out",
        "Segment ids are not passed on, and default to 0.",
        segments(lambda ids, last: 0 * ids),
        input="two segments",
        cause="segment_ids_ignored",
    ),
    OF_SEGMENTS.bug(
        "embedding_segment_ids_from_zero",
        "Segment ids start at 0, where the source keeps 0 for padding and starts at 1.",
        segments(lambda ids, last: np.maximum(ids - 1, 0)),
        variant="bert-pytorch",
        cause="segment_ids_shifted or segment_ids_ignored",  # with two segments both are 0
    ),
    *(
        OF_SEGMENTS.also(cause, f"segment ids {text}", segments(ids))
        for cause, text, ids in (
            ("segment_ids_inverted", "in reverse order", lambda ids, last: last - ids),
            ("segment_ids_shifted", "that are 1 too high", lambda ids, last: np.minimum(ids + 1, last)),
            (
                "segment_ids_shifted",
                "that are 1 too low, 0 being the last",
                lambda ids, last: (ids - 1) % (last + 1),
            ),
            (
                "segment_ids_shifted",
                "that are 1 too high, the last being 0",
                lambda ids, last: (ids + 1) % (last + 1),
            ),
        )
    ),
    bug(
        "embedding_ids_of_16_bits",
        "Ids are kept in 16 bits.",
        lookup(lambda config, ids: ids & 0xFFFF),
        scenario="long",
        input="a table of more than 65,536 rows",
        alone=True,
        cause="ids_in_16_bits_unsigned",
        clause="EMB-1",
    ),
    OF_SUM.bug(
        "embedding_dropout_left_on",
        "Dropout after the embeddings stays on in evaluation.",
        lambda m, y: m.dropped(y, 7),
        cause="dropout",
        clause="DRP-1",
    ),
    OF_SUM.bug(
        "embedding_sum_reordered",
        "Position and segment are added first, the token last.",
        summed("position segment token"),
        first=(),
        equivalent={"float64": ORDER, "float32": ORDER},
        cause=None,
    ),
)
