"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math

import numpy as np

from concord.conformance.bugs.bug import Changes
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.precision import precision

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"


def divided(**powers: float) -> Edit:
    """Return products of queries and keys divided by powers of sizes, and not by sqrt(K)."""
    return lambda m, y: m.scores(divisor=m.size(**powers))


def rounded(name: str, reciprocal: bool = False) -> Edit:
    """Return scores whose scale, or its reciprocal, was rounded to a format."""

    def edit(m: Context, y: Array) -> Array:
        scale = float(precision(name).round(np.float64(m.size(head_dim=-0.5 if reciprocal else 0.5))))
        return m.scores(divisor=1 / scale if reciprocal else scale)

    return edit


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
    "score_scale_squared": lambda m, y: m.scores(m.beside("query") / float(m.config.head_dim), divisor=1.0),
    "score_scale_lost_without_padding": lambda m, y: m.scores(divisor=1.0) if m.real.all() else y,
    "scores_of_queries": lambda m, y: m.scores(k=m.beside("query")),
    "softmax_of_powers_of_two": lambda m, y: m.softmax(m.unnormalised * math.log(2), 3),
    "sigmoid_for_softmax": lambda m, y: m.sigmoid(m.unnormalised),
    "softmax_left_out": lambda m, y: m.unnormalised,
    "heads_joined_in_reverse": lambda m, y: m.with_heads(y, reversed(range(m.config.num_heads))),
    "context_of_keys": lambda m, y: m.context(m.used_weights, m.beside("key")),
    "context_of_queries": lambda m, y: m.context(m.used_weights, m.beside("query")),
    "weights_transposed": lambda m, y: m.context(m.transpose(m.used_weights, (0, 1, 3, 2))),
    "attention_dropout_left_on": lambda m, y: m.context(m.dropped(m.used_weights, 10)),
}
