"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import group, option
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"
ROUNDING = "the same numbers in exact arithmetic: they round differently, and differ in nothing else"
SEVERAL = "more than one token"

GROUP = group("attention")
OF_SCORES, OF_WEIGHTS = (
    group("attention", SCORES, clause="ATT-4"),
    group("attention", WEIGHTS, clause="ATT-5"),
)
bug, scores, weights = GROUP.bug, OF_SCORES.bug, OF_WEIGHTS.bug


def divided(divisor: Callable[[EncoderConfig], float]) -> Edit:
    """Return products of queries and keys divided by something else than sqrt(K)."""
    return lambda m, y: m.scores(divisor=float(divisor(m.config)))


def in_format(name: str, value: float) -> float:
    """Return a number rounded to a format."""
    return float(precision(name).round(np.float64(value)))


def rounded(name: str, reciprocal: bool) -> Edit:
    """Return scores whose scale, or its reciprocal, was rounded to a format."""
    if reciprocal:
        return divided(lambda config: 1 / in_format(name, config.head_dim**-0.5))
    return divided(lambda config: in_format(name, math.sqrt(config.head_dim)))


def scaled_after_mask(m: Context, y: Array) -> Array:
    """Put the constant in place before the scores are divided, so that it is divided too."""
    root = math.sqrt(m.config.head_dim)
    return m.masked(m.visible, scores=m.beside("scores") * root) / root


def first_value_for_all(m: Context, y: Array) -> Array:
    """Loop over heads, and take the value of the first one each time."""
    return m.context(m.used_weights, m.with_heads(m.beside("value"), [0] * m.config.num_heads))


def split_by_reshape(m: Context, y: Array) -> Array:
    """Cut (B, T, D) into (B, H, T, K) without a transposition."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.o.transpose(m.o.reshape(y, (batch, heads, tokens, width)), (0, 2, 1, 3))


def split_interleaved(m: Context, y: Array) -> Array:
    """Let head h have every H-th column."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.o.transpose(m.o.reshape(y, (batch, tokens, width, heads)), (0, 1, 3, 2))


def joined(order: tuple[int, ...]) -> Edit:
    """Return the heads, (B, Q, H, K), joined with their axes in another order."""
    return lambda m, y: m.o.reshape(m.o.transpose(m.by_heads(y), order), tuple(y.shape))


def times_width(power: float) -> Edit:
    return lambda m, y: y * float(m.config.head_dim**power)


def softmax_over(axis: int) -> Edit:
    return lambda m, y: m.o.softmax(m.unnormalised, axis)


def without_maximum(m: Context, y: Array) -> Array:
    exponentials = m.o.exp(m.unnormalised)
    return exponentials / m.o.sum(exponentials, 3)


BUGS = (
    scores(
        "score_scale_missing",
        "Scores are not divided by sqrt(K).",
        divided(lambda config: 1),
        cause="no_score_scale",
    ),
    scores(
        "score_scale_twice",
        "Queries are scaled when they are projected, and scores again.",
        divided(lambda config: config.head_dim),
    ),
    scores(
        "score_scale_of_d_model",
        "Scores are divided by sqrt(D), not by sqrt(K).",
        divided(lambda config: math.sqrt(config.d_model)),
    ),
    *(
        OF_SCORES.also(cause, f"scores that are {text}", divided(divisor))
        for cause, text, divisor in (
            ("score_scale_of_d_model", "divided by D instead of sqrt(K)", lambda config: config.d_model),
            ("score_scale_inverted", "multiplied by sqrt(K)", lambda config: config.head_dim**-0.5),
            (
                "score_scale_of_heads",
                "divided by sqrt(H) instead of sqrt(K)",
                lambda config: config.num_heads**0.5,
            ),
            ("score_scale_fourth_root", "divided by the fourth root of K", lambda c: c.head_dim**0.25),
        )
    ),
    *(
        OF_SCORES.also(
            "score_scale_rounded", f"a score scale that was rounded to {name}", rounded(name, reciprocal)
        )
        for name in ("float32", "float16", "bfloat16")
        for reciprocal in (False, True)
        if name != "float16" or reciprocal
    ),
    scores(
        "score_scale_through_float16",
        "sqrt(K) was stored in float16.",
        rounded("float16", False),
        cause="score_scale_rounded",
    ),
    scores(
        "score_scale_squared",
        "The query is multiplied by 1 / K, where 1 / sqrt(K) is due.",
        lambda m, y: m.scores(m.beside("query") / float(m.config.head_dim), divisor=1.0),
        variant="nndl-paddle",
        cause="score_scale_twice",
    ),
    scores(
        "score_scale_after_mask",
        "The mask's constant is put in place before the scores are divided, and is divided too.",
        scaled_after_mask,
        "*attention.masked_scores",
        variant="vanilla-encoder",
        input="padding",
        cause="scale_after_mask",
    ),
    scores(
        "score_scale_lost_without_padding",
        "A fast path for batches without padding forgets the scale.",
        lambda m, y: m.scores(divisor=1.0) if m.real.all() else y,
        variant="vanilla-encoder",
        scenario="full",
        input="no padding at all",
        cause="no_score_scale",
    ),
    scores(
        "scores_clamped",
        "Scores are clamped to 10000, as recipes for half precisions do.",
        lambda m, y: m.o.within(y, -1e4, 1e4),
        scenario="peaked",
        input="scores beyond 10000",
        alone=True,
        cause="clamped",
    ),
    scores(
        "scores_transposed",
        "The product is that of keys and queries: rows and columns have changed places.",
        lambda m, y: m.o.transpose(y, (0, 1, 3, 2)),
        input=SEVERAL,
        clause="ATT-3",
    ),
    OF_SCORES.also(
        "scores_of_queries",
        "the product of queries with themselves",
        lambda m, y: m.scores(k=m.beside("query")),
        clause="ATT-3",
    ),
    bug(
        "heads_split_by_reshape",
        "Heads are split by a reshape to (B, H, T, K), which needs a transposition.",
        split_by_reshape,
        *PROJECTIONS,
        input=SEVERAL,
    ),
    bug(
        "heads_interleaved",
        "A head has every H-th column, not K columns in a row.",
        split_interleaved,
        *PROJECTIONS,
    ),
    *(
        GROUP.also(
            "projection_scaled",
            f"a vector that has been multiplied by {text} already",
            times_width(power),
            *PROJECTIONS[:2],
            clause="ATT-4",
        )
        for text, power in (("1 / sqrt(K)", -0.5), ("1 / sqrt(sqrt(K))", -0.25))
    ),
    bug(
        "query_relu_missing",
        "The query is not passed through the ReLU that keys and values have.",
        lambda m, y: m.projected(y),
        "*attention.query",
        variant="tf1-text-classifier",
        cause="qkv_activation",
        clause="ATT-1",
    ),
    bug(
        "projections_relu_added",
        "Query, key and value pass through a ReLU that the source has not.",
        lambda m, y: m.o.relu(y),
        *PROJECTIONS,
        cause="qkv_activation",
        clause="ATT-1",
    ),
    weights(
        "softmax_over_queries",
        "The softmax runs over queries, not over keys.",
        softmax_over(2),
        input=SEVERAL,
        cause="softmax_axis",
    ),
    weights(
        "softmax_over_heads",
        "The softmax runs over heads, not over keys.",
        softmax_over(1),
        cause="softmax_axis",
    ),
    OF_WEIGHTS.also("softmax_axis", "a softmax over samples instead of keys", softmax_over(0)),
    OF_WEIGHTS.also(
        "softmax_of_powers_of_two",
        "powers of 2 instead of e",
        lambda m, y: m.o.softmax(m.unnormalised * math.log(2), 3),
    ),
    weights(
        "sigmoid_for_softmax",
        "Weights are the logistic function of the scores.",
        lambda m, y: m.o.sigmoid(m.unnormalised),
    ),
    OF_WEIGHTS.also("softmax_left_out", "scores without a softmax", lambda m, y: m.unnormalised),
    weights(
        "softmax_without_maximum",
        "The largest score is not taken off before the exponential function.",
        without_maximum,
        variant="bert-pytorch",
        input="a row of padding only, or huge scores",
    ),
    bug(
        "heads_joined_by_reshape",
        "Heads are joined by a reshape of (B, H, Q, K), which needs a transposition.",
        joined((0, 2, 1, 3)),
        CONTEXT,
        input=SEVERAL,
    ),
    GROUP.also("heads_interleaved", "heads joined column by column", joined((0, 1, 3, 2)), CONTEXT),
    bug(
        "heads_joined_in_reverse",
        "Heads are joined from last to first.",
        lambda m, y: m.with_heads(y, reversed(range(m.config.num_heads))),
        CONTEXT,
        cause="heads_permuted",
    ),
    bug(
        "heads_loop_keeps_first_value",
        "A loop over heads takes the value of the first one each time.",
        lambda m, y: first_value_for_all(m, y) if m.config.head_computation == "looped" else y,
        CONTEXT,
        variant="keras-attention",
        scenario="looped",
        input="one head after the other",
        alone=True,
        cause="value_of_first_head",
        clause="ATT-7",
    ),
    GROUP.also(
        "value_of_first_head",
        "the values of the first head for all",
        first_value_for_all,
        CONTEXT,
        clause="ATT-7",
    ),
    bug(
        "context_of_keys",
        "The weighted sum is one of keys, not of values.",
        lambda m, y: m.context(m.used_weights, m.beside("key")),
        CONTEXT,
    ),
    GROUP.also(
        "context_of_queries",
        "a weighted sum of queries instead of values",
        lambda m, y: m.context(m.used_weights, m.beside("query")),
        CONTEXT,
    ),
    GROUP.also(
        "weights_transposed",
        "weights whose queries and keys have changed places",
        lambda m, y: m.context(m.o.transpose(m.used_weights, (0, 1, 3, 2))),
        CONTEXT,
    ),
    bug(
        "attention_dropout_left_on",
        "Dropout on attention weights stays on in evaluation.",
        lambda m, y: m.context(m.dropped(m.used_weights, 10)),
        CONTEXT,
        cause="dropout",
        clause="DRP-1",
    ),
    bug(
        "output_projection_skipped",
        "The context is taken for the result: both have the same shape.",
        lambda m, y: m.source(),
        "*attention.output",
        cause="linear_missing",
    ),
    bug(
        "score_scale_on_query",
        "The query is multiplied by K^-0.5 instead of dividing the scores.",
        option(score_scale="multiply_query"),
        first=(),
        equivalent={"float64": ROUNDING, "float32": ROUNDING},
        cause=None,
    ),
    bug(
        "heads_one_by_one",
        "Heads attend one after the other instead of all at once.",
        option(head_computation="looped"),
        first=(),
        equivalent={"float64": ROUNDING, "float32": ROUNDING},
        cause=None,
    ),
)
