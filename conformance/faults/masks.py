"""Bugs in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from backends.interface import Request
from conformance.faults.fault import Change, Fault, option, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Attend, EncoderLayer, RealTokens
from conformance.mutants.surgery import Steps

MASKED, WEIGHTS = "layers.0.attention.masked_scores", "layers.0.attention.weights"


def by_length(family: Steps, model: Any, inputs: Any) -> Array:
    """Take padding for something that stands at the end alone."""
    real = np.not_equal(family.o.numpy(inputs["input_ids"]), model.pad_id)
    return family.o.constant(np.less(np.arange(real.shape[1]), real.sum(axis=1, keepdims=True)))


def lost_where_lengths_are_equal(family: Steps, model: Any, inputs: Any) -> Array:
    """Take a batch whose rows all have the same length for one without padding."""
    real = np.not_equal(family.o.numpy(inputs["input_ids"]), model.pad_id)
    lengths = real.sum(axis=1)
    return family.o.constant(np.ones_like(real) if (lengths == lengths[0]).all() else real)


def causal_where_full(family: Attend, layer: Any, key_mask: Array, q: Array) -> Array:
    """Take a fast path where nothing is masked, which is made for causal attention."""
    return causal(family, layer, key_mask, q) if family.o.numpy(key_mask).all() else Attend.visible(family, layer, key_mask, q)


def batch_major_at_once(request: Request) -> Request:
    """Give samples the masks of others, where all heads are computed at once."""
    if request.config.head_computation != "batched":
        return request
    return dataclasses.replace(request, config=request.config.replace(mask_assignment="batch_major"))


def on_queries(family: Steps, layer: Any, key_mask: Array, q: Array) -> Array:
    """Mask rows instead of columns."""
    hidden = ~key_mask[:, None, :, None]
    return ~(hidden & (hidden | key_mask[:, None, None, :]))


def causal(family: Steps, layer: Any, key_mask: Array, q: Array) -> Array:
    """Hide later tokens too."""
    tokens = tuple(key_mask.shape)[1]
    return key_mask[:, None, None, :] & family.o.constant(np.tri(tokens, dtype=bool))[None, None]


def after_softmax(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
    """Let masked keys have their share of the softmax, and take it away afterwards."""
    return family.o.where(visible, family.o.softmax(unmasked, -1), 0.0)


def empty_row_zero(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
    """Give no weight at all where no key is visible."""
    some = family.o.constant(np.any(family.o.numpy(visible), axis=-1, keepdims=True))
    return family.o.where(some, family.o.softmax(scores, -1), 0.0)


def first_layer_alone(family: Steps, layer: Any, x: Array, real: Array, tap: Any) -> Array:
    """Pass the mask to the first layer, and no other."""
    return family.original(layer, x, real if layer.name == "layers.0" else real == real, tap=tap)


def padded_queries_zeroed(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
    """Zero the weights of padded queries; in self-attention they are the masked keys."""
    queries = family.o.transpose(visible, (0, 1, 3, 2))
    return family.o.where(queries, family.o.softmax(scores, -1), 0.0)


def on_keys(family: Steps, layer: Any, weights: Array, queries: Array, constant: float) -> Array:
    """Overwrite columns instead of rows."""
    return family.o.where(family.o.transpose(queries, (0, 1, 3, 2)), weights, constant)


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(
        **{"name": name, "group": "masks", "what": what, "variant": "nndl-paddle", "first": (MASKED,), "input": "padding", **fields}
    )


FAULTS = (
    mutant("mask_missing", "Padding is not masked.", change=steps(Attend, mask=lambda family, layer, scores, visible, constant: scores)),
    mutant(
        "mask_inverted",
        "The mask is True where a key is hidden, and is read as True where it is visible.",
        input="any",
        change=steps(Attend, mask=lambda family, layer, scores, visible, constant: layer.fill(scores, ~visible, constant)),
    ),
    mutant(
        "mask_off_by_one",
        "The mask stands one token to the right, as if a start token had been put in front.",
        change=steps(RealTokens, run=lambda family, model, inputs: family.o.roll(family.original(model, inputs), 1, 1)),
    ),
    mutant(
        "mask_by_length",
        "The mask is made of the number of real tokens, as if padding stood at the end alone.",
        input="padding inside the text",
        change=steps(RealTokens, run=by_length),
    ),
    mutant("mask_of_id_0", "Id 0 is masked, whatever the id of padding is.", variant="vanilla-encoder", change=option(pad_id=0)),
    mutant(
        "mask_of_first_sample",
        "The mask of the first sample is used for all.",
        input="masks that differ within a batch",
        change=steps(
            RealTokens, run=lambda family, model, inputs: family.original(model, inputs)[:1] & (inputs["input_ids"] == inputs["input_ids"])
        ),
    ),
    mutant(
        "mask_of_wrong_sample",
        "Masks are repeated sample by sample, while heads are stacked before samples.",
        variant="vanilla-encoder",
        input="masks that differ within a batch",
        change=option(mask_assignment="batch_major"),
    ),
    mutant(
        "mask_of_right_sample",
        "Each sample gets its own mask, where the published model does not do so.",
        variant="keras-attention",
        input="masks that differ within a batch",
        change=option(mask_assignment="per_sample"),
    ),
    mutant(
        "mask_repeated_for_heads_at_once",
        "Masks are repeated sample by sample where all heads are computed at once, though the model has that mistake no more.",
        variant="keras-attention",
        scenario="batched",
        input="masks that differ within a batch, all heads at once",
        alone=True,
        change=Change(batch_major_at_once),
    ),
    mutant(
        "mask_lost_where_lengths_are_equal",
        "A batch whose rows all have the same length is taken for one without padding.",
        scenario="equal",
        input="the same padding in every row",
        alone=True,
        change=steps(RealTokens, run=lost_where_lengths_are_equal),
    ),
    mutant(
        "mask_causal_without_padding",
        "A fast path for batches without padding is made for causal attention.",
        scenario="full",
        input="no padding at all",
        alone=True,
        change=steps(Attend, visible=causal_where_full),
    ),
    mutant(
        "mask_on_queries",
        "The mask hides rows of the scores, not columns.",
        variant="vanilla-encoder",
        change=steps(Attend, visible=on_queries),
    ),
    mutant(
        "mask_causal_too",
        "Later tokens are hidden too, as in a decoder.",
        variant="bert",
        input="any",
        change=steps(Attend, visible=causal),
    ),
    mutant(
        "mask_in_first_layer_only",
        "The mask is passed to the first layer and to no other.",
        first=("layers.1.attention.masked_scores",),
        input="padding, and two layers",
        change=steps(EncoderLayer, run=first_layer_alone),
    ),
    mutant(
        "mask_result_dropped",
        "The masked scores are computed and not used: an operation taken for one in place.",
        first=(WEIGHTS,),
        variant="bert-pytorch",
        change=steps(Attend, softmax=lambda family, layer, scores, unmasked, visible: family.o.softmax(unmasked, -1)),
    ),
    mutant(
        "mask_after_softmax",
        "Weights of masked keys are zeroed after the softmax, so that a row no longer sums to 1.",
        first=(WEIGHTS,),
        variant="bert-pytorch",
        change=steps(Attend, softmax=after_softmax),
    ),
    mutant(
        "mask_multiplied",
        "Scores are multiplied by the mask: a hidden key has score 0.",
        variant="vanilla-encoder",
        change=steps(Attend, mask=lambda family, layer, scores, visible, constant: family.o.where(visible, scores, 0.0)),
    ),
    mutant(
        "mask_constant_without_sign",
        "The constant of the mask is positive.",
        change=steps(Attend, mask=lambda family, layer, scores, visible, constant: layer.fill(scores, visible, -constant)),
    ),
    mutant(
        "mask_added_twice",
        "The mask is added by the model and again by the layer.",
        change=steps(
            Attend,
            mask=lambda family, layer, scores, visible, constant: layer.fill(layer.fill(scores, visible, constant), visible, constant),
        ),
    ),
    mutant("mask_constant_1e4_for_1e9", "The constant is -1e4 instead of -1e9.", change=option(mask_value=-1e4)),
    mutant("mask_constant_1e9_for_1e4", "The constant is -1e9 instead of -1e4.", variant="vanilla-encoder", change=option(mask_value=-1e9)),
    mutant("mask_constant_of_float16", "The constant is the lowest float16 instead of -1e9.", change=option(mask_value=-65504.0)),
    mutant(
        "mask_constant_lowest",
        "The constant is the lowest float32 instead of -1e9.",
        variant="bert-pytorch",
        change=option(mask_value=-3.4028234663852886e38),
    ),
    mutant(
        "mask_minus_infinity",
        "The constant is minus infinity: a row of padding only becomes NaN.",
        variant="bert-pytorch",
        change=steps(Attend, mask=lambda family, layer, scores, visible, constant: family.o.where(visible, scores, float("-inf"))),
    ),
    mutant(
        "mask_added_for_replaced",
        "The constant is added to the score, where the source puts it in its place.",
        variant="vanilla-encoder",
        change=option(mask_fill="add"),
    ),
    mutant(
        "mask_replaced_for_added",
        "The constant is put in place of the score, where the source adds it.",
        input="padding, in float64",
        change=option(mask_fill="replace"),
    ),
    mutant(
        "mask_empty_row_zero",
        "Where every key is masked the weights are set to 0, to be rid of NaN.",
        first=(WEIGHTS,),
        input="a row of padding only",
        change=steps(Attend, softmax=empty_row_zero),
    ),
    mutant(
        "query_mask_missing",
        "The weights of padded queries are not overwritten.",
        variant="tf1-text-classifier",
        first=("layers.0.attention.masked_weights",),
        change=steps(Attend, overwrite=lambda family, layer, weights, queries, constant: weights),
    ),
    mutant(
        "query_mask_zero",
        "The weights of padded queries become 0, as the source must have meant.",
        variant="tf1-text-classifier",
        first=("layers.0.attention.masked_weights",),
        change=steps(Attend, overwrite=lambda family, layer, weights, queries, constant: family.o.where(queries, weights, 0.0)),
    ),
    mutant(
        "query_mask_on_keys",
        "The weights of padded keys are overwritten, not those of padded queries.",
        variant="tf1-text-classifier",
        first=("layers.0.attention.masked_weights",),
        change=steps(Attend, overwrite=on_keys),
    ),
    mutant(
        "query_mask_added",
        "The weights of padded queries are zeroed, where the source leaves them alone.",
        variant="bert",
        first=(WEIGHTS,),
        change=steps(Attend, softmax=padded_queries_zeroed),
    ),
)
