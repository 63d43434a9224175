"""Bugs in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Bug, Change, edited, option
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array

MASKED, WEIGHTS, OF_QUERIES = (
    f"layers.0.attention.{name}" for name in ("masked_scores", "weights", "masked_weights")
)


def masks(edit: Edit) -> Change:
    """Return the change of masked scores."""
    return edited(edit, "*.attention.masked_scores")


def weighs(edit: Edit) -> Change:
    """Return the change of the weights."""
    return edited(edit, "*.attention.weights")


def overwrites(edit: Edit) -> Change:
    """Return the change of the weights that the mask of queries leaves."""
    return edited(edit, "*.attention.masked_weights")


def of_real(flags: Callable[[Flags], Flags]) -> Change:
    """Return the change to a mask of other tokens, made of the real ones, (B, T)."""
    return masks(lambda m, y: m.masked(m.visible_of(flags(m.real))))


def by_length(real: Flags) -> Flags:
    """Take padding for something that stands at the end alone."""
    flags: Flags = np.less(np.arange(real.shape[1]), real.sum(axis=1, keepdims=True))
    return flags


def lost_where_lengths_are_equal(real: Flags) -> Flags:
    """Take a batch whose rows all have the same length for one without padding."""
    lengths = real.sum(axis=1)
    return np.ones_like(real) if (lengths == lengths[0]).all() else real


def causal(m: Context, y: Array) -> Array:
    """Hide later tokens too."""
    return m.masked(m.visible & np.tri(m.real.shape[1], dtype=bool))


def batch_major_at_once(request: Request) -> Request:
    """Give samples the masks of others, where all heads are computed at once."""
    if request.config.head_computation != "batched":
        return request
    return dataclasses.replace(request, config=request.config.replace(mask_assignment="batch_major"))


def on_queries(m: Context, y: Array) -> Array:
    """Mask rows instead of columns."""
    return m.masked(m.real[:, None, :, None])


def after_softmax(m: Context, y: Array) -> Array:
    """Let masked keys have their share of the softmax, and take it away afterwards."""
    return m.o.where(m.visible, m.o.softmax(m.beside("scores"), 3), 0.0)


def empty_row_zero(m: Context, y: Array) -> Array:
    """Give no weight at all where no key is visible."""
    return m.o.where(m.visible.any(axis=-1, keepdims=True), y, 0.0)


def queries_zeroed(m: Context, y: Array) -> Array:
    """Give padded queries no weights."""
    return m.o.where(m.real_queries[:, None, :, None], m.beside("weights"), 0.0)


def keys_overwritten(m: Context, y: Array) -> Array:
    """Overwrite columns instead of rows."""
    return m.o.where(m.real_queries[:, None, None, :], m.beside("weights"), m.constant)


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{
            "name": name,
            "group": "masks",
            "what": what,
            "variant": "nndl-paddle",
            "first": (MASKED,),
            "input": "padding",
            **fields,
        }
    )


BUGS = (
    mutant(
        "mask_missing",
        "Padding is not masked.",
        change=masks(lambda m, y: m.beside("scores")),
        cause="mask_ignored",
        clause="MSK-1",
    ),
    mutant(
        "mask_inverted",
        "The mask is True where a key is hidden, and is read as True where it is visible.",
        input="any",
        change=masks(lambda m, y: m.masked(~m.visible)),
        cause="mask_inverted",
        clause="MSK-1",
    ),
    mutant(
        "mask_off_by_one",
        "The mask stands one token to the right, as if a start token had been put in front.",
        change=of_real(lambda real: np.roll(real, 1, axis=1)),
        cause="mask_shifted",
        clause="MSK-1",
    ),
    mutant(
        "mask_by_length",
        "The mask is made of the number of real tokens, as if padding stood at the end alone.",
        input="padding inside the text",
        change=of_real(by_length),
        cause="mask_by_length",
        clause="MSK-1",
    ),
    mutant(
        "mask_of_id_0",
        "Id 0 is masked, whatever the id of padding is.",
        variant="vanilla-encoder",
        change=option(pad_id=0),
        cause="pad_id",
        clause="MSK-1",
    ),
    mutant(
        "mask_of_first_sample",
        "The mask of the first sample is used for all.",
        input="masks that differ within a batch",
        change=of_real(lambda real: np.broadcast_to(real[:1], real.shape)),
        cause="mask_of_other_sample",
        clause="MSK-1",
    ),
    mutant(
        "mask_of_wrong_sample",
        "Masks are repeated sample by sample, while heads are stacked before samples.",
        variant="vanilla-encoder",
        input="masks that differ within a batch",
        change=option(mask_assignment="batch_major"),
        cause="mask_assignment",
        clause="MSK-7",
    ),
    mutant(
        "mask_of_right_sample",
        "Each sample gets its own mask, where the published model does not do so.",
        variant="keras-attention",
        input="masks that differ within a batch",
        change=option(mask_assignment="per_sample"),
        cause="mask_assignment",
        clause="MSK-7",
    ),
    mutant(
        "mask_repeated_for_heads_at_once",
        "Masks are repeated sample by sample where all heads are computed at once, though the model has that mistake no more.",
        variant="keras-attention",
        scenario="batched",
        input="masks that differ within a batch, all heads at once",
        alone=True,
        change=Change(batch_major_at_once),
        cause="mask_assignment",
        clause="MSK-7",
    ),
    mutant(
        "mask_lost_where_lengths_are_equal",
        "A batch whose rows all have the same length is taken for one without padding.",
        scenario="equal",
        input="the same padding in every row",
        alone=True,
        change=of_real(lost_where_lengths_are_equal),
        cause="mask_ignored",
        clause="MSK-1",
    ),
    mutant(
        "mask_causal_without_padding",
        "A fast path for batches without padding is made for causal attention.",
        scenario="full",
        input="no padding at all",
        alone=True,
        change=masks(lambda m, y: causal(m, y) if m.real.all() else y),
        cause="mask_causal",
        clause="MSK-4",
    ),
    mutant(
        "mask_on_queries",
        "The mask hides rows of the scores, not columns.",
        variant="vanilla-encoder",
        change=masks(on_queries),
        cause="mask_on_queries",
        clause="MSK-4",
    ),
    mutant(
        "mask_causal_too",
        "Later tokens are hidden too, as in a decoder.",
        variant="bert",
        input="any",
        change=masks(causal),
        cause="mask_causal",
        clause="MSK-4",
    ),
    mutant(
        "mask_in_first_layer_only",
        "The mask is passed to the first layer and to no other.",
        first=("layers.1.attention.masked_scores",),
        input="padding, and two layers",
        change=masks(lambda m, y: m.beside("scores") if m.layer else y),
        cause="mask_ignored",
        clause="MSK-1",
    ),
    mutant(
        "mask_result_dropped",
        "The masked scores are computed and not used: an operation taken for one in place.",
        first=(WEIGHTS,),
        variant="bert-pytorch",
        change=weighs(lambda m, y: m.o.softmax(m.beside("scores"), 3)),
        cause="mask_not_used",
        clause="MSK-3",
    ),
    mutant(
        "mask_after_softmax",
        "Weights of masked keys are zeroed after the softmax, so that a row no longer sums to 1.",
        first=(WEIGHTS,),
        variant="bert-pytorch",
        change=weighs(after_softmax),
        cause="mask_after_softmax",
        clause="MSK-3",
    ),
    mutant(
        "mask_multiplied",
        "Scores are multiplied by the mask: a hidden key has score 0.",
        variant="vanilla-encoder",
        change=masks(lambda m, y: m.o.where(m.visible, m.beside("scores"), 0.0)),
        cause="mask_multiplied",
        clause="MSK-3",
    ),
    mutant(
        "mask_constant_without_sign",
        "The constant of the mask is positive.",
        change=masks(lambda m, y: m.masked(m.visible, -m.constant)),
        cause="mask_value_positive",
        clause="MSK-2",
    ),
    mutant(
        "mask_added_twice",
        "The mask is added by the model and again by the layer.",
        change=masks(lambda m, y: m.masked(m.visible, scores=y)),
        cause="mask_added_twice",
        clause="MSK-3",
    ),
    mutant(
        "mask_constant_1e4_for_1e9",
        "The constant is -1e4 instead of -1e9.",
        change=option(mask_value=-1e4),
        cause="mask_value",
        clause="MSK-2",
    ),
    mutant(
        "mask_constant_1e9_for_1e4",
        "The constant is -1e9 instead of -1e4.",
        variant="vanilla-encoder",
        change=option(mask_value=-1e9),
        cause="mask_value",
        clause="MSK-2",
    ),
    mutant(
        "mask_constant_of_float16",
        "The constant is the lowest float16 instead of -1e9.",
        change=option(mask_value=-65504.0),
        cause="mask_value",
        clause="MSK-2",
    ),
    mutant(
        "mask_constant_lowest",
        "The constant is the lowest float32 instead of -1e9.",
        variant="bert-pytorch",
        change=option(mask_value=-3.4028234663852886e38),
        cause="mask_value",
        clause="MSK-2",
    ),
    mutant(
        "mask_minus_infinity",
        "The constant is minus infinity: a row of padding only becomes NaN.",
        variant="bert-pytorch",
        change=masks(lambda m, y: m.o.where(m.visible, m.beside("scores"), float("-inf"))),
        cause="mask_value_infinite",
        clause="MSK-2",
    ),
    mutant(
        "mask_added_for_replaced",
        "The constant is added to the score, where the source puts it in its place.",
        variant="vanilla-encoder",
        change=option(mask_fill="add"),
        cause="mask_fill",
        clause="MSK-3",
    ),
    mutant(
        "mask_replaced_for_added",
        "The constant is put in place of the score, where the source adds it.",
        input="padding, in float64",
        change=option(mask_fill="replace"),
        cause="mask_fill",
        clause="MSK-3",
    ),
    mutant(
        "mask_empty_row_zero",
        "Where every key is masked the weights are set to 0, to be rid of NaN.",
        first=(WEIGHTS,),
        input="a row of padding only",
        change=weighs(empty_row_zero),
        cause="weights_of_empty_rows_zero",
        clause="MSK-5",
    ),
    mutant(
        "query_mask_missing",
        "The weights of padded queries are not overwritten.",
        variant="tf1-text-classifier",
        first=(OF_QUERIES,),
        change=overwrites(lambda m, y: m.beside("weights")),
        cause="query_mask",
        clause="MSK-8",
    ),
    mutant(
        "query_mask_zero",
        "The weights of padded queries become 0, as the source must have meant.",
        variant="tf1-text-classifier",
        first=(OF_QUERIES,),
        change=overwrites(queries_zeroed),
        cause="query_mask_zero",
        clause="MSK-8",
    ),
    mutant(
        "query_mask_on_keys",
        "The weights of padded keys are overwritten, not those of padded queries.",
        variant="tf1-text-classifier",
        first=(OF_QUERIES,),
        change=overwrites(keys_overwritten),
        cause="query_mask_on_keys",
        clause="MSK-8",
    ),
    mutant(
        "query_mask_added",
        "The weights of padded queries are zeroed, where the source leaves them alone.",
        variant="bert",
        first=(WEIGHTS,),
        change=weighs(queries_zeroed),
        cause="weights_of_padded_queries_zero",
        clause="MSK-8",
    ),
)
