"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"


def divided(divisor: Callable[[EncoderConfig], float]) -> Edit:
    """Return products of queries and keys divided by something else than sqrt(K)."""
    return lambda m, y: m.scores(divisor=float(divisor(m.config)))


def rounded(name: str, reciprocal: bool = False) -> Edit:
    """Return scores whose scale, or its reciprocal, was rounded to a format."""

    def divisor(config: EncoderConfig) -> float:
        exact = config.head_dim**-0.5 if reciprocal else math.sqrt(config.head_dim)
        value = float(precision(name).round(np.float64(exact)))
        return 1 / value if reciprocal else value

    return divided(divisor)


def score_scale_after_mask(m: Context, y: Array) -> Array:
    """Put the constant in place before the scores are divided, so that it is divided too."""
    root = math.sqrt(m.config.head_dim)
    return m.masked(m.visible, scores=m.beside("scores") * root) / root


def first_value_for_all(m: Context, y: Array) -> Array:
    """Loop over heads, and take the value of the first one each time."""
    return m.context(m.used_weights, m.with_heads(m.beside("value"), [0] * m.config.num_heads))


def heads_split_by_reshape(m: Context, y: Array) -> Array:
    """Cut (B, T, D) into (B, H, T, K) without a transposition."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.transpose(m.reshape(y, (batch, heads, tokens, width)), (0, 2, 1, 3))


def heads_interleaved(m: Context, y: Array) -> Array:
    """Let head h have every H-th column."""
    batch, tokens, heads, width = tuple(y.shape)
    return m.transpose(m.reshape(y, (batch, tokens, width, heads)), (0, 1, 3, 2))


def joined(order: tuple[int, ...]) -> Edit:
    """Return the heads, (B, Q, H, K), joined with their axes in another order."""
    return lambda m, y: m.reshape(m.transpose(m.by_heads(y), order), tuple(y.shape))


def softmax_over(axis: int) -> Edit:
    return lambda m, y: m.softmax(m.unnormalised, axis)


def without_maximum(m: Context, y: Array) -> Array:
    exponentials = m.exp(m.unnormalised)
    return exponentials / m.sum(exponentials, 3)


EDITS: Changes = {
    "score_scale_missing": divided(lambda config: 1),
    "score_scale_twice": divided(lambda config: config.head_dim),
    "score_scale_of_d_model": divided(lambda config: math.sqrt(config.d_model)),
    "score_scale_of_square": divided(lambda config: config.d_model),
    "score_scale_inverted": divided(lambda config: config.head_dim**-0.5),
    "score_scale_of_heads": divided(lambda config: config.num_heads**0.5),
    "score_scale_fourth_root": divided(lambda config: config.head_dim**0.25),
    "score_scale_rounded": {
        "float32": rounded("float32"),
        "float32 as a reciprocal": rounded("float32", reciprocal=True),
        "float16 as a reciprocal": rounded("float16", reciprocal=True),
        "bfloat16": rounded("bfloat16"),
        "bfloat16 as a reciprocal": rounded("bfloat16", reciprocal=True),
    },
    "score_scale_squared": lambda m, y: m.scores(m.beside("query") / float(m.config.head_dim), divisor=1.0),
    "score_scale_lost_without_padding": lambda m, y: m.scores(divisor=1.0) if m.real.all() else y,
    "scores_clamped": lambda m, y: m.within(y, -1e4, 1e4),
    "scores_transposed": lambda m, y: m.transpose(y, (0, 1, 3, 2)),
    "scores_of_queries": lambda m, y: m.scores(k=m.beside("query")),
    "projection_scaled": {
        "sqrt(K)": lambda m, y: y * float(m.config.head_dim**-0.5),
        "sqrt(sqrt(K))": lambda m, y: y * float(m.config.head_dim**-0.25),
    },
    "query_relu_missing": lambda m, y: m.projected(y),
    "projections_relu_added": lambda m, y: m.relu(y),
    "softmax_of_powers_of_two": lambda m, y: m.softmax(m.unnormalised * math.log(2), 3),
    "sigmoid_for_softmax": lambda m, y: m.sigmoid(m.unnormalised),
    "softmax_left_out": lambda m, y: m.unnormalised,
    "heads_joined_in_reverse": lambda m, y: m.with_heads(y, reversed(range(m.config.num_heads))),
    "context_of_keys": lambda m, y: m.context(m.used_weights, m.beside("key")),
    "context_of_queries": lambda m, y: m.context(m.used_weights, m.beside("query")),
    "weights_transposed": lambda m, y: m.context(m.transpose(m.used_weights, (0, 1, 3, 2))),
    "attention_dropout_left_on": lambda m, y: m.context(m.dropped(m.used_weights, 10)),
}
