"""Bugs in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Change, group, option, where
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array

GROUP = group("masks", "*attention.masked_scores", variant="nndl-paddle", input="padding", clause="MSK-1")
bug, also = GROUP.bug, GROUP.also
WEIGHTS, OF_QUERIES = "*attention.weights", "*attention.masked_weights"
VANILLA, OF_BERT, TF1 = "vanilla-encoder", "bert-pytorch", "tf1-text-classifier"


def of_real(flags: Callable[[Flags], Flags]) -> Edit:
    """Return the mask of other tokens, made of the real ones, (B, S) or (B, Q, S)."""
    return lambda m, y: m.masked(m.visible_of(flags(m.real)))


def by_length(real: Flags) -> Flags:
    """Take padding for something that stands at the end alone."""
    return np.asarray(np.arange(real.shape[1]) < real.sum(axis=1, keepdims=True))


def lost_where_lengths_are_equal(real: Flags) -> Flags:
    """Take a batch whose rows all have the same length for one without padding."""
    lengths = real.sum(axis=1)
    return np.ones_like(real) if (lengths == lengths[0]).all() else real


def rolled(by: int, free: bool | None = None, axis: int = -1) -> Callable[[Flags], Flags]:
    """Return what moves a mask.

    The place that is left free is visible, hidden, or has what falls off the end.
    """

    def moved(real: Flags) -> Flags:
        found = np.roll(real, by, axis=axis)
        if free is not None:
            found[..., 0 if by > 0 else -1] = free
        return found

    return moved


def earlier(m: Context) -> Flags:
    """Return which keys stand no later than each query, (Q, S)."""
    return np.tri(m.real_queries.shape[1], m.real.shape[-1], dtype=bool)


def causal(m: Context, y: Array) -> Array:
    """Hide later tokens too."""
    return m.masked(m.visible & earlier(m))


def batch_major_at_once(request: Request) -> Request:
    """Give samples the masks of others, where all heads are computed at once."""
    if request.config.head_computation != "batched":
        return request
    return dataclasses.replace(request, config=request.config.replace(mask_assignment="batch_major"))


def of_queries(m: Context) -> Flags:
    """Return which queries are real, (B, 1, Q, 1)."""
    return m.real_queries[:, None, :, None]


def after_softmax(m: Context, y: Array) -> Array:
    """Let masked keys have their share of the softmax, and take it away afterwards."""
    return m.o.where(m.visible, m.o.softmax(m.beside("scores"), 3), 0.0)


def overwritten(m: Context, kept: Flags, constant: float) -> Array:
    """Overwrite weights wherever a flag is False."""
    return m.o.where(kept, m.beside("weights"), constant)


SIDES = ((1, "right"), (-1, "left"))

BUGS = (
    bug("mask_missing", "Padding is not masked.", lambda m, y: m.beside("scores"), cause="mask_ignored"),
    bug(
        "mask_inverted",
        "The mask is True where a key is hidden, and is read as True where it is visible.",
        lambda m, y: m.masked(~m.visible),
        input="any",
    ),
    bug(
        "mask_off_by_one",
        "The mask stands one token to the right, as if a start token had been put in front.",
        of_real(rolled(1)),
        cause="mask_shifted",
    ),
    also("mask_shifted", "a mask that stands one token too far to the left", of_real(rolled(-1))),
    *(
        also(
            "mask_shifted",
            f"a mask that stands one token too far to the {side}, and {'shows' if free else 'hides'} "
            "what it leaves free",
            of_real(rolled(by, free)),
        )
        for by, side in SIDES
        for free in (True, False)
    ),
    bug(
        "mask_by_length",
        "The mask is made of the number of real tokens, as if padding stood at the end alone.",
        of_real(by_length),
        input="padding inside the text",
    ),
    also(
        "mask_by_length",
        "a mask that ends at the last real token",
        of_real(lambda real: np.maximum.accumulate(real[:, ::-1], axis=1)[:, ::-1]),
    ),
    also(
        "mask_by_length",
        "a mask that ends at the first padding",
        of_real(lambda real: np.minimum.accumulate(real, axis=1)),
    ),
    also(
        "mask_by_id",
        "a mask of ids above that of padding",
        lambda m, y: m.masked(m.visible_of(m.ids > m.config.pad_id)),
    ),
    also(
        "mask_reversed",
        "a mask of the tokens in reverse order",
        of_real(lambda real: real[..., ::-1]),
        clause="MSK-4",
    ),
    bug(
        "mask_of_id_0",
        "Id 0 is masked, whatever the id of padding is.",
        option(pad_id=0),
        variant=VANILLA,
        cause="pad_id",
    ),
    bug(
        "mask_of_first_sample",
        "The mask of the first sample is used for all.",
        of_real(lambda real: np.broadcast_to(real[:1], real.shape)),
        input="masks that differ within a batch",
        cause="mask_of_other_sample",
        clause="MSK-7",
    ),
    *(
        also(
            "mask_of_other_sample",
            f"the mask of the sample {side}",
            of_real(rolled(by, axis=0)),
            clause="MSK-7",
        )
        for by, side in ((1, "before"), (-1, "after"))
    ),
    bug(
        "mask_of_wrong_sample",
        "Masks are repeated sample by sample, while heads are stacked before samples.",
        option(mask_assignment="batch_major"),
        variant=VANILLA,
        input="masks that differ within a batch",
        cause="mask_assignment",
        clause="MSK-7",
    ),
    bug(
        "mask_of_right_sample",
        "Each sample gets its own mask, where the published model does not do so.",
        option(mask_assignment="per_sample"),
        variant="keras-attention",
        input="masks that differ within a batch",
        cause="mask_assignment",
        clause="MSK-7",
    ),
    bug(
        "mask_repeated_for_heads_at_once",
        "Masks are repeated sample by sample where all heads are computed at once, "
        "though the model has that mistake no more.",
        Change(request=batch_major_at_once),
        variant="keras-attention",
        scenario="batched",
        input="masks that differ within a batch, all heads at once",
        alone=True,
        cause="mask_assignment",
        clause="MSK-7",
    ),
    bug(
        "mask_lost_where_lengths_are_equal",
        "A batch whose rows all have the same length is taken for one without padding.",
        of_real(lost_where_lengths_are_equal),
        scenario="equal",
        input="the same padding in every row",
        alone=True,
        cause="mask_ignored",
    ),
    bug(
        "mask_causal_too",
        "Later tokens are hidden too, as in a decoder.",
        causal,
        variant="bert",
        input="any",
        cause="mask_causal",
        clause="MSK-4",
    ),
    also(
        "mask_causal",
        "a mask that hides later tokens instead of padding",
        lambda m, y: m.masked(m.visible_of(m.real | True) & earlier(m)),
        clause="MSK-4",
    ),
    bug(
        "mask_causal_without_padding",
        "A fast path for batches without padding is made for causal attention.",
        lambda m, y: causal(m, y) if m.real.all() else y,
        scenario="full",
        input="no padding at all",
        alone=True,
        cause="mask_causal",
        clause="MSK-4",
    ),
    bug(
        "mask_on_queries",
        "The mask hides rows of the scores, not columns.",
        lambda m, y: m.masked(of_queries(m)),
        variant=VANILLA,
        clause="MSK-4",
    ),
    also(
        "mask_on_queries",
        "a mask of queries as well as keys",
        lambda m, y: m.masked(m.visible & of_queries(m)),
        clause="MSK-4",
    ),
    bug(
        "mask_in_first_layer_only",
        "The mask is passed to the first layer and to no other.",
        lambda m, y: m.beside("scores") if m.layer else y,
        first=("layers.1.attention.masked_scores",),
        input="padding, and two layers",
        cause="mask_ignored",
    ),
    bug(
        "mask_result_dropped",
        "The masked scores are computed and not used: an operation taken for one in place.",
        lambda m, y: m.o.softmax(m.beside("scores"), 3),
        WEIGHTS,
        variant=OF_BERT,
        cause="mask_not_used",
        clause="MSK-3",
    ),
    bug(
        "mask_after_softmax",
        "Weights of masked keys are zeroed after the softmax, so that a row no longer sums to 1.",
        after_softmax,
        WEIGHTS,
        variant=OF_BERT,
        clause="MSK-3",
    ),
    bug(
        "mask_multiplied",
        "Scores are multiplied by the mask: a hidden key has score 0.",
        lambda m, y: m.o.where(m.visible, m.beside("scores"), 0.0),
        variant=VANILLA,
        clause="MSK-3",
    ),
    bug(
        "mask_constant_without_sign",
        "The constant of the mask is positive.",
        lambda m, y: m.masked(m.visible, -m.constant),
        cause="mask_value_positive",
        clause="MSK-2",
    ),
    bug(
        "mask_added_twice",
        "The mask is added by the model and again by the layer.",
        lambda m, y: m.masked(m.visible, scores=m.masked(m.visible)),
        clause="MSK-3",
    ),
    also(
        "mask_everywhere",
        "mask_value added to every score",
        lambda m, y: m.beside("scores") + m.constant,
        clause="MSK-3",
    ),
    *(
        bug(
            f"mask_constant_{name}",
            f"The constant is {said}.",
            option(mask_value=value),
            variant=variant,
            cause="mask_value",
            clause="MSK-2",
        )
        for name, said, value, variant in (
            ("1e4_for_1e9", "-1e4 instead of -1e9", -1e4, "nndl-paddle"),
            ("1e9_for_1e4", "-1e9 instead of -1e4", -1e9, VANILLA),
            ("of_float16", "the lowest float16 instead of -1e9", -65504.0, "nndl-paddle"),
            ("lowest", "the lowest float32 instead of -1e9", -3.4028234663852886e38, OF_BERT),
        )
    ),
    bug(
        "mask_minus_infinity",
        "The constant is minus infinity: a row of padding only becomes NaN.",
        lambda m, y: m.o.where(m.visible, m.beside("scores"), float("-inf")),
        variant=OF_BERT,
        cause="mask_value_infinite",
        clause="MSK-2",
    ),
    bug(
        "mask_added_for_replaced",
        "The constant is added to the score, where the source puts it in its place.",
        option(mask_fill="add"),
        variant=VANILLA,
        cause="mask_fill",
        clause="MSK-3",
    ),
    bug(
        "mask_replaced_for_added",
        "The constant is put in place of the score, where the source adds it.",
        option(mask_fill="replace"),
        input="padding, in float64",
        cause="mask_fill",
        clause="MSK-3",
    ),
    bug(
        "mask_empty_row_zero",
        "Where every key is masked the weights are set to 0, to be rid of NaN.",
        lambda m, y: m.o.where(m.visible.any(axis=-1, keepdims=True), y, 0.0),
        WEIGHTS,
        input="a row of padding only",
        cause="weights_of_empty_rows_zero",
        clause="MSK-5",
    ),
    bug(
        "query_mask_missing",
        "The weights of padded queries are not overwritten.",
        lambda m, y: m.beside("weights"),
        OF_QUERIES,
        variant=TF1,
        cause="query_mask",
        clause="MSK-8",
    ),
    also(
        "query_mask",
        "weights before they were overwritten",
        where(lambda m, y: m.context(m.beside("weights")), query_mask="overwrite"),
        "*attention.context",
        clause="MSK-8",
    ),
    bug(
        "query_mask_zero",
        "The weights of padded queries become 0, as the source must have meant.",
        lambda m, y: overwritten(m, of_queries(m), 0.0),
        OF_QUERIES,
        variant=TF1,
        clause="MSK-8",
    ),
    also(
        "query_mask_inverted",
        "the weights of real queries overwritten",
        lambda m, y: overwritten(m, ~of_queries(m), m.constant),
        OF_QUERIES,
        clause="MSK-8",
    ),
    bug(
        "query_mask_on_keys",
        "The weights of padded keys are overwritten, not those of padded queries.",
        lambda m, y: overwritten(m, m.visible, m.constant),
        OF_QUERIES,
        variant=TF1,
        clause="MSK-8",
    ),
    bug(
        "query_mask_added",
        "The weights of padded queries are zeroed, where the source leaves them alone.",
        lambda m, y: m.o.where(of_queries(m), y, 0.0),
        WEIGHTS,
        variant="bert",
        cause="weights_of_padded_queries_zero",
        clause="MSK-8",
    ),
)
