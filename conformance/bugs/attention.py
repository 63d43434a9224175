"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Bug, Change, edited, option
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

NAME, PROJECTIONS = "layers.0.attention", ("query", "key", "value")
ROUNDING = "the same numbers in exact arithmetic: they round differently, and differ in nothing else"


def of_attention(edit: Edit, *names: str) -> Change:
    """Return the change of some taps of attention."""
    return edited(edit, *(f"*.attention.{name}" for name in names))


def scaled_after_mask(m: Context, y: Array) -> Array:
    """Put the constant in place before the scores are divided, so that it is divided too."""
    root = math.sqrt(m.config.head_dim)
    return m.masked(m.visible, scores=m.beside("scores") * root) / root


def clamped(m: Context, y: Array) -> Array:
    """Keep scores within what a half precision could hold."""
    return m.o.where(y > 1e4, y * 0.0 + 1e4, m.o.where(y < -1e4, y * 0.0 - 1e4, y))


def first_value_for_all(m: Context, y: Array) -> Array:
    """Loop over heads, and take the value of the first one each time."""
    first = m.beside("value")[:, :, :1]
    return (
        m.context(m.used_weights, m.o.concat([first] * m.config.num_heads, 2))
        if m.config.head_computation == "looped"
        else y
    )


def split_by_reshape(m: Context, y: Array) -> Array:
    """Cut (B, T, D) into (B, H, T, K) without a transposition."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.o.transpose(m.o.reshape(y, (batch, heads, tokens, width)), (0, 2, 1, 3))


def split_interleaved(m: Context, y: Array) -> Array:
    """Let head h have every H-th column."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.o.transpose(m.o.reshape(y, (batch, tokens, width, heads)), (0, 1, 3, 2))


def joined_by_reshape(m: Context, y: Array) -> Array:
    """Flatten (B, H, Q, K) without a transposition."""
    return m.o.reshape(m.o.transpose(m.by_heads(y), (0, 2, 1, 3)), tuple(y.shape))


def joined_in_reverse(m: Context, y: Array) -> Array:
    """Join the heads from last to first."""
    apart = m.by_heads(y)
    return m.o.reshape(
        m.o.concat([apart[:, :, h : h + 1] for h in reversed(range(m.config.num_heads))], 2), tuple(y.shape)
    )


def dropped(m: Context, y: Array) -> Array:
    """Drop every tenth weight, and enlarge the others."""
    weights = m.used_weights
    shape = tuple(weights.shape)
    kept = (np.arange(np.prod(shape)) % 10 > 0).reshape(shape) / 0.9
    return m.context(weights * m.o.constant(kept, weights))


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(**{"name": name, "group": "attention", "what": what, "variant": "bert", **fields})


def of_scores(name: str, what: str, **fields: Any) -> Bug:
    return mutant(name, what, **{"first": (f"{NAME}.scores",), **fields})


def of_weights(name: str, what: str, **fields: Any) -> Bug:
    return mutant(name, what, **{"first": (f"{NAME}.weights",), "input": "more than one token", **fields})


BUGS = (
    of_scores(
        "score_scale_missing",
        "Scores are not divided by sqrt(K).",
        change=of_attention(lambda m, y: m.scores(divisor=1.0), "scores"),
        cause="no_score_scale",
        clause="ATT-4",
    ),
    of_scores(
        "score_scale_twice",
        "Queries are scaled when they are projected, and scores again.",
        change=of_attention(lambda m, y: m.scores(divisor=float(m.config.head_dim)), "scores"),
        cause="score_scale_twice",
        clause="ATT-4",
    ),
    of_scores(
        "score_scale_of_d_model",
        "Scores are divided by sqrt(D), not by sqrt(K).",
        change=of_attention(lambda m, y: m.scores(divisor=math.sqrt(m.config.d_model)), "scores"),
        cause="score_scale_of_d_model",
        clause="ATT-4",
    ),
    of_scores(
        "score_scale_squared",
        "The query is multiplied by 1 / K, where 1 / sqrt(K) is due.",
        variant="nndl-paddle",
        change=of_attention(
            lambda m, y: m.scores(m.beside("query") / float(m.config.head_dim), divisor=1.0), "scores"
        ),
        cause="score_scale_twice",
        clause="ATT-4",
    ),
    of_scores(
        "score_scale_after_mask",
        "The mask's constant is put in place before the scores are divided, and is divided too.",
        variant="vanilla-encoder",
        first=(f"{NAME}.masked_scores",),
        input="padding",
        change=of_attention(scaled_after_mask, "masked_scores"),
        cause="scale_after_mask",
        clause="ATT-4",
    ),
    of_scores(
        "score_scale_lost_without_padding",
        "A fast path for batches without padding forgets the scale.",
        variant="vanilla-encoder",
        scenario="full",
        input="no padding at all",
        change=of_attention(lambda m, y: m.scores(divisor=1.0) if m.real.all() else y, "scores"),
        cause="no_score_scale",
        clause="ATT-4",
    ),
    of_scores(
        "scores_clamped",
        "Scores are clamped to 10000, as recipes for half precisions do.",
        scenario="peaked",
        input="scores beyond 10000",
        alone=True,
        change=of_attention(clamped, "scores"),
        cause="clamped",
        clause="ATT-4",
    ),
    mutant(
        "heads_loop_keeps_first_value",
        "A loop over heads takes the value of the first one each time.",
        variant="keras-attention",
        scenario="looped",
        first=(f"{NAME}.context",),
        input="one head after the other",
        alone=True,
        change=of_attention(first_value_for_all, "context"),
        cause="value_of_first_head",
        clause="ATT-7",
    ),
    of_scores(
        "scores_transposed",
        "The product is that of keys and queries: rows and columns have changed places.",
        change=of_attention(lambda m, y: m.o.transpose(y, (0, 1, 3, 2)), "scores"),
        input="more than one token",
        cause="scores_transposed",
        clause="ATT-3",
    ),
    mutant(
        "heads_split_by_reshape",
        "Heads are split by a reshape to (B, H, T, K), which needs a transposition.",
        first=(f"{NAME}.query",),
        input="more than one token",
        change=of_attention(split_by_reshape, *PROJECTIONS),
        cause="heads_split_by_reshape",
        clause="ATT-2",
    ),
    mutant(
        "heads_interleaved",
        "A head has every H-th column, not K columns in a row.",
        first=(f"{NAME}.query",),
        change=of_attention(split_interleaved, *PROJECTIONS),
        cause="heads_interleaved",
        clause="ATT-2",
    ),
    mutant(
        "heads_joined_by_reshape",
        "Heads are joined by a reshape of (B, H, Q, K), which needs a transposition.",
        first=(f"{NAME}.context",),
        input="more than one token",
        change=of_attention(joined_by_reshape, "context"),
        cause="heads_joined_by_reshape",
        clause="ATT-6",
    ),
    mutant(
        "heads_joined_in_reverse",
        "Heads are joined from last to first.",
        first=(f"{NAME}.context",),
        change=of_attention(joined_in_reverse, "context"),
        cause="heads_permuted",
        clause="ATT-6",
    ),
    of_weights(
        "softmax_over_queries",
        "The softmax runs over queries, not over keys.",
        change=of_attention(lambda m, y: m.o.softmax(m.unnormalised, 2), "weights"),
        cause="softmax_axis",
        clause="ATT-5",
    ),
    of_weights(
        "softmax_over_heads",
        "The softmax runs over heads, not over keys.",
        input="any",
        change=of_attention(lambda m, y: m.o.softmax(m.unnormalised, 1), "weights"),
        cause="softmax_axis",
        clause="ATT-5",
    ),
    of_weights(
        "sigmoid_for_softmax",
        "Weights are the logistic function of the scores.",
        input="any",
        change=of_attention(lambda m, y: m.o.sigmoid(m.unnormalised), "weights"),
        cause="sigmoid_for_softmax",
        clause="ATT-5",
    ),
    mutant(
        "context_of_keys",
        "The weighted sum is one of keys, not of values.",
        first=(f"{NAME}.context",),
        change=of_attention(lambda m, y: m.context(m.used_weights, m.beside("key")), "context"),
        cause="context_of_keys",
        clause="ATT-6",
    ),
    mutant(
        "attention_dropout_left_on",
        "Dropout on attention weights stays on in evaluation.",
        first=(f"{NAME}.context",),
        change=of_attention(dropped, "context"),
        cause="dropout",
        clause="DRP-1",
    ),
    mutant(
        "output_projection_skipped",
        "The context is taken for the result: both have the same shape.",
        first=(f"{NAME}.output",),
        change=of_attention(lambda m, y: m.source(), "output"),
        cause="linear_missing",
        clause="ATT-6",
    ),
    mutant(
        "query_relu_missing",
        "The query is not passed through the ReLU that keys and values have.",
        variant="tf1-text-classifier",
        first=(f"{NAME}.query",),
        change=of_attention(lambda m, y: m.projected(y), "query"),
        cause="qkv_activation",
        clause="ATT-1",
    ),
    mutant(
        "projections_relu_added",
        "Query, key and value pass through a ReLU that the source has not.",
        first=(f"{NAME}.query",),
        change=of_attention(lambda m, y: m.o.relu(y), *PROJECTIONS),
        cause="qkv_activation",
        clause="ATT-1",
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
