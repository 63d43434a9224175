"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from conformance.faults.fault import Fault, option, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Attend, MultiHead, SplitHeads
from conformance.mutants.surgery import Steps

NAME = "layers.0.attention"
ROUNDING = "the same numbers in exact arithmetic: they round differently, and differ in nothing else"


def width_of_head(q: Array) -> int:
    return int(tuple(q.shape)[3])


def scaled_after_mask(family: Steps, layer: Any, scores: Array, visible: Array, constant: float) -> Array:
    """Put the constant in place before the scores are divided, so that it is divided too."""
    return layer.fill(scores * layer.divide_scores, visible, constant) / layer.divide_scores


def scaled_unless_full(family: Steps, layer: Any, q: Array, k: Array, v: Array, key_mask: Array, query_mask: Array, tap: Any) -> Any:
    """Take a fast path where nothing is masked, which forgets the scale."""
    full = bool(family.o.numpy(key_mask).all())
    return family.original(layer, q * layer.divide_scores if full else q, k, v, key_mask, query_mask, tap)


def clamped(family: Steps, layer: Any, scores: Array, q: Array) -> Array:
    """Keep scores within what a half precision could hold."""
    scaled = scores if layer.divide_scores is None else scores / layer.divide_scores
    return family.o.where(scaled > 1e4, 1e4 + 0.0 * scaled, family.o.where(scaled < -1e4, -1e4 + 0.0 * scaled, scaled))


def first_value_for_all(family: Steps, layer: Any, q: Array, k: Array, v: Array, *masks: Any, **named: Any) -> Array:
    """Loop over heads, and take the value of the first one each time."""
    heads = tuple(v.shape)[2]
    looped = layer.each_head is family.o.modules["layers"].HEADS["looped"]
    return family.original(layer, q, k, family.o.concat([v[:, :, :1]] * heads, 2) if looped else v, *masks, **named)


def split_by_reshape(family: Steps, layer: Any, x: Array) -> Array:
    """Cut (B, T, D) into (B, H, T, K) without a transposition."""
    batch, tokens, _ = tuple(x.shape)
    heads, width = layer.heads
    return family.o.transpose(family.o.reshape(x, (batch, heads, tokens, width)), (0, 2, 1, 3))


def split_interleaved(family: Steps, layer: Any, x: Array) -> Array:
    """Let head h have every H-th column."""
    batch, tokens, _ = tuple(x.shape)
    heads, width = layer.heads
    return family.o.transpose(family.o.reshape(x, (batch, tokens, width, heads)), (0, 1, 3, 2))


def joined_by_reshape(family: Steps, layer: Any, context: Array) -> Array:
    """Flatten (B, H, Q, K) without a transposition."""
    batch, queries, heads, width = tuple(context.shape)
    return family.o.reshape(family.o.transpose(context, (0, 2, 1, 3)), (batch, queries, heads * width))


def joined_in_reverse(family: Steps, layer: Any, context: Array) -> Array:
    """Join the heads from last to first."""
    batch, queries, heads, width = tuple(context.shape)
    return family.o.reshape(family.o.concat([context[:, :, h : h + 1] for h in reversed(range(heads))], 2), (batch, queries, heads * width))


def dropped(family: Steps, layer: Any, weights: Array, v: Array, k: Array) -> Array:
    """Drop every tenth weight, and enlarge the others."""
    shape = tuple(weights.shape)
    kept = (np.arange(np.prod(shape)) % 10 > 0).reshape(shape) / 0.9
    return family.product("bhqs,bshk->bqhk", weights * family.o.constant(kept, weights), v)


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "attention", "what": what, "variant": "bert", **fields})


def of_scores(name: str, what: str, **fields: Any) -> Fault:
    return mutant(name, what, **{"first": (f"{NAME}.scores",), **fields})


def of_weights(name: str, what: str, **fields: Any) -> Fault:
    return mutant(name, what, **{"first": (f"{NAME}.weights",), "input": "more than one token", **fields})


FAULTS = (
    of_scores(
        "score_scale_missing", "Scores are not divided by sqrt(K).", change=steps(Attend, scale=lambda family, layer, scores, q: scores)
    ),
    of_scores(
        "score_scale_twice",
        "Queries are scaled when they are projected, and scores again.",
        change=steps(Attend, scale=lambda family, layer, scores, q: scores / width_of_head(q)),
    ),
    of_scores(
        "score_scale_of_d_model",
        "Scores are divided by sqrt(D), not by sqrt(K).",
        change=steps(Attend, scale=lambda family, layer, scores, q: scores / math.sqrt(width_of_head(q) * tuple(q.shape)[2])),
    ),
    of_scores(
        "score_scale_squared",
        "The query is multiplied by 1 / K, where 1 / sqrt(K) is due.",
        variant="nndl-paddle",
        change=steps(Attend, scale_query=lambda family, layer, q: q / width_of_head(q)),
    ),
    of_scores(
        "score_scale_after_mask",
        "The mask's constant is put in place before the scores are divided, and is divided too.",
        variant="vanilla-encoder",
        first=(f"{NAME}.masked_scores",),
        input="padding",
        change=steps(Attend, mask=scaled_after_mask),
    ),
    of_scores(
        "score_scale_lost_without_padding",
        "A fast path for batches without padding forgets the scale.",
        variant="vanilla-encoder",
        scenario="full",
        input="no padding at all",
        change=steps(Attend, run=scaled_unless_full),
    ),
    of_scores(
        "scores_clamped",
        "Scores are clamped to 10000, as recipes for half precisions do.",
        scenario="peaked",
        input="scores beyond 10000",
        alone=True,
        change=steps(Attend, scale=clamped),
    ),
    mutant(
        "heads_loop_keeps_first_value",
        "A loop over heads takes the value of the first one each time.",
        variant="keras-attention",
        scenario="looped",
        first=(f"{NAME}.context",),
        input="one head after the other",
        alone=True,
        change=steps(Attend, run=first_value_for_all),
    ),
    of_scores(
        "scores_transposed",
        "The product is that of keys and queries: rows and columns have changed places.",
        change=steps(Attend, scale=lambda family, layer, scores, q: family.o.transpose(scores, (0, 1, 3, 2)) / layer.divide_scores),
        input="more than one token",
    ),
    mutant(
        "heads_split_by_reshape",
        "Heads are split by a reshape to (B, H, T, K), which needs a transposition.",
        first=(f"{NAME}.query",),
        input="more than one token",
        change=steps(SplitHeads, run=split_by_reshape),
    ),
    mutant(
        "heads_interleaved",
        "A head has every H-th column, not K columns in a row.",
        first=(f"{NAME}.query",),
        change=steps(SplitHeads, run=split_interleaved),
    ),
    mutant(
        "heads_joined_by_reshape",
        "Heads are joined by a reshape of (B, H, Q, K), which needs a transposition.",
        first=(f"{NAME}.context",),
        input="more than one token",
        change=steps(Attend, join=joined_by_reshape),
    ),
    mutant(
        "heads_joined_in_reverse",
        "Heads are joined from last to first.",
        first=(f"{NAME}.context",),
        change=steps(Attend, join=joined_in_reverse),
    ),
    of_weights(
        "softmax_over_queries",
        "The softmax runs over queries, not over keys.",
        change=steps(Attend, softmax=lambda family, layer, scores, unmasked, visible: family.o.softmax(scores, 2)),
    ),
    of_weights(
        "softmax_over_heads",
        "The softmax runs over heads, not over keys.",
        input="any",
        change=steps(Attend, softmax=lambda family, layer, scores, unmasked, visible: family.o.softmax(scores, 1)),
    ),
    of_weights(
        "sigmoid_for_softmax",
        "Weights are the logistic function of the scores.",
        input="any",
        change=steps(Attend, softmax=lambda family, layer, scores, unmasked, visible: family.o.sigmoid(scores)),
    ),
    mutant(
        "context_of_keys",
        "The weighted sum is one of keys, not of values.",
        first=(f"{NAME}.context",),
        change=steps(Attend, context=lambda family, layer, weights, v, k: family.product("bhqs,bshk->bqhk", weights, k)),
    ),
    mutant(
        "attention_dropout_left_on",
        "Dropout on attention weights stays on in evaluation.",
        first=(f"{NAME}.context",),
        change=steps(Attend, context=dropped),
    ),
    mutant(
        "output_projection_skipped",
        "The context is taken for the result: both have the same shape.",
        first=(f"{NAME}.output",),
        change=steps(MultiHead, output=lambda family, projection, context: context),
    ),
    mutant(
        "query_relu_missing",
        "The query is not passed through the ReLU that keys and values have.",
        variant="tf1-text-classifier",
        first=(f"{NAME}.query",),
        change=steps(
            MultiHead,
            project=lambda family, layer, role, x: (
                getattr(layer, role)(x) if role == "query" else layer.activation(getattr(layer, role)(x))
            ),
        ),
    ),
    mutant(
        "projections_relu_added",
        "Query, key and value pass through a ReLU that the source has not.",
        first=(f"{NAME}.query",),
        change=steps(MultiHead, project=lambda family, layer, role, x: family.o.relu(getattr(layer, role)(x))),
    ),
    mutant(
        "score_scale_on_query",
        "The query is multiplied by K^-0.5 instead of dividing the scores.",
        first=(),
        equivalent={"float64": ROUNDING, "float32": ROUNDING},
        change=option(score_scale="multiply_query"),
    ),
    mutant(
        "heads_one_by_one",
        "Heads attend one after the other instead of all at once.",
        first=(),
        equivalent={"float64": ROUNDING, "float32": ROUNDING},
        change=option(head_computation="looped"),
    ),
)
