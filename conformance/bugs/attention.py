"""Bugs in attention (SPEC ATT-1 to ATT-7)."""

from __future__ import annotations

import math

import numpy as np

from concord.conformance.bugs.bug import Edits
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array
from concord.spec.precision import precision

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
SCORES, WEIGHTS, CONTEXT = "*attention.scores", "*attention.weights", "*attention.context"


def divided(m: Context, **powers: float) -> Array:
    """Divide products of queries and keys by powers of sizes, and not by sqrt(K)."""
    return m.scores(divisor=m.size(**powers))


def rounded(m: Context, name: str, reciprocal: bool = False) -> Array:
    """Return scores whose scale, or its reciprocal, was rounded to a format."""
    scale = float(precision(name).round(np.float64(m.size(head_dim=-0.5 if reciprocal else 0.5))))
    return m.scores(divisor=1 / scale if reciprocal else scale)


def score_scale_after_mask(m: Context) -> Array:
    """Put the constant in place before the scores are divided, so that it is divided too."""
    root = math.sqrt(m.config.head_dim)
    return m.masked(m.visible, scores=m.beside("scores") * root) / root


def first_value_for_all(m: Context) -> Array:
    """Loop over heads, and take the value of the first one each time."""
    return m.context(m.used_weights, m.with_heads(m.beside("value"), [0] * m.config.num_heads))


def heads_split_by_reshape(m: Context) -> Array:
    """Cut (B, T, D) into (B, H, T, K) without a transposition."""
    batch, tokens, heads, width = tuple(m.y.shape)
    return m.transpose(m.reshape(m.y, (batch, heads, tokens, width)), (0, 2, 1, 3))


def heads_interleaved(m: Context) -> Array:
    """Let head h have every H-th column."""
    batch, tokens, heads, width = tuple(m.y.shape)
    return m.transpose(m.reshape(m.y, (batch, tokens, width, heads)), (0, 1, 3, 2))


def joined(m: Context, order: tuple[int, ...]) -> Array:
    """Join the heads, (B, Q, H, K), with their axes in another order."""
    return m.reshape(m.transpose(m.by_heads(m.y), order), tuple(m.y.shape))


def softmax_over(m: Context, axis: int) -> Array:
    return m.softmax(m.unnormalised, axis)


def uniform(m: Context, visible_alone: bool) -> Array:
    """Give every key, or every visible one, the same weight."""
    seen = np.broadcast_to(m.visible | (not visible_alone), tuple(m.y.shape))
    return m.y * 0.0 + m.constant(seen / np.maximum(seen.sum(-1, keepdims=True), 1.0), m.y)


def without_maximum(m: Context) -> Array:
    exponentials = m.exp(m.unnormalised)
    return exponentials / m.sum(exponentials, 3)


EDITS: Edits = {
    "score_scale_squared": lambda m: m.scores(m.beside("query") / float(m.config.head_dim), divisor=1.0),
    "score_scale_lost_without_padding": lambda m: m.scores(divisor=1.0) if m.real.all() else m.y,
    "scores_of_queries": lambda m: m.scores(k=m.beside("query")),
    "softmax_of_powers_of_two": lambda m: m.softmax(m.unnormalised * math.log(2), 3),
    "sigmoid_for_softmax": lambda m: m.sigmoid(m.unnormalised),
    "softmax_left_out": lambda m: m.unnormalised,
    "heads_joined_in_reverse": lambda m: m.with_heads(m.y, reversed(range(m.config.num_heads))),
    "context_of_keys": lambda m: m.context(m.used_weights, m.beside("key")),
    "context_of_queries": lambda m: m.context(m.used_weights, m.beside("query")),
    "weights_transposed": lambda m: m.context(m.transpose(m.used_weights, (0, 1, 3, 2))),
    "attention_dropout_left_on": lambda m: m.context(m.dropped(m.used_weights, 10)),
}
