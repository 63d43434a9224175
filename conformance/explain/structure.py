"""Causes that are read off the tensor: what it has in common with the right one says what became of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from concord.conformance.bugs.context import norm_of
from concord.conformance.bugs.norms import NORMS, RESIDUALS
from concord.conformance.bugs.precision import variance_by_squares
from concord.conformance.estimate import R, Z
from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.explain.reading import LEAST, clear, root_mean_square, within
from concord.spec.tensors import clause_of

# Limits.


def of_limit(question: Question) -> Iterator[Hypothesis]:
    """Read off that whatever is beyond a limit was set to it."""
    right, actual, clause = (
        question.right.value,
        question.actual,
        clause_of(question.config, question.tensor, question.case.part),
    )
    masked = question.is_tap(
        ("*.masked_scores", "*.masked_weights")
    )  # where a constant is no sign of a limit
    if masked or not (np.isfinite(right).all() and np.isfinite(actual).all()):
        return
    limit = float(abs(actual).max())
    for text, low, high in (
        ("be at least ", float(actual.min()), math.inf),
        ("be at most ", -math.inf, float(actual.max())),
        ("", -limit, limit),
    ):
        limited = np.clip(right, low, high)
        beyond = limited != right
        if (
            beyond.sum() >= 3
            and ((~beyond).sum() >= 3 or not text)
            and clear(actual - right, actual - limited, question.right.sigma)
        ):
            reached = low if math.isfinite(low) and text else high
            yield Hypothesis("clamped", f"numbers that are clamped to {text}{reached:.6g}", clause)
            return


# Dropout.

DROPPED = (
    "embeddings.sum",
    "embeddings.norm",
    "*.attention.weights",
    "*.attention.output",
    "*.feed_forward.activation",
    "*.feed_forward.outer",
    "pooling",
    "pooler.output",
)


def of_dropout(question: Question) -> Iterator[Hypothesis]:
    """Read off that some numbers are 0 and the others are all enlarged by the same factor."""
    if question.is_tap(DROPPED):
        base: Array = np.zeros_like(question.actual)
    elif question.is_tap(RESIDUALS):
        base = question.exact.entered[question.tensor.replace("residual", "norm")].value
    else:
        return
    right, actual, sigma = question.right.value - base, question.actual - base, question.right.sigma
    if not np.isfinite(actual).all() or not np.isfinite(right).all():
        return
    visible = abs(right) > 2 * Z * sigma
    dropped = visible & (abs(actual) <= Z * sigma)
    kept = visible & ~dropped
    if dropped.sum() < 2 or kept.sum() < 5:
        return
    factor = float((actual[kept] * right[kept]).sum() / np.square(right[kept]).sum())
    if factor > 1 and within(np.where(kept, actual - factor * right, 0.0), factor * sigma):
        share = 1 - 1 / factor
        expected = share * visible.sum()
        if abs(dropped.sum() - expected) <= 5 * math.sqrt(expected) + 1:
            yield Hypothesis("dropout", f"dropout of {100 * share:.3g} % that was left on", "DRP-1")


SHARES = (0.1, 0.2, 0.5, 0.3, 0.4, 0.25, 0.15, 0.05)
"""What dropout may drop."""

MOST_KEYS = 12
"""How many keys the attention weights may be tried out for, kept and dropped.

There are 2 to that power ways.
"""


def of_dropped_weights(question: Question) -> Iterator[Hypothesis]:
    """Read off that each query's context is that of some keys alone, their weights all enlarged by the
    same factor.
    """
    if not question.is_tap(("*attention.context",)):
        return
    tap, config, exact = question.tensor, question.config, question.exact
    prefix = tap.rpartition(".")[0]
    weights = exact.now.get(f"{prefix}.masked_weights", exact.now[f"{prefix}.weights"]).value  # (B, H, Q, S)
    values = (exact.now.get(f"{prefix}.value") or exact.given["value"]).value  # (B, S, H, K)
    batch, heads, queries, keys = weights.shape
    if keys > MOST_KEYS:
        return
    kept = (np.arange(2**keys)[:, None] >> np.arange(keys)) % 2
    actual, sigma = (
        np.broadcast_to(x, question.actual.shape).reshape(batch, queries, heads, config.head_dim)
        for x in (question.actual, question.right.sigma)
    )
    left, whole = list(SHARES), 0
    for b, h, q in np.ndindex(batch, heads, queries):
        possible = kept @ (weights[b, h, q][:, None] * values[b, :, h])  # (2^S, K)
        fits = {
            p: (abs(actual[b, q, h] - possible / (1 - p)) <= Z * sigma[b, q, h] / (1 - p)).min(-1)
            for p in left
        }
        left = [p for p in left if fits[p].any()]
        whole += sum(bool(fits[p][-1]) for p in left[:1])  # the last way keeps every key
        if not left:
            return
    if len(left) == 1 and whole <= batch * heads * queries - 2:
        yield Hypothesis(
            "dropout", f"dropout of {100 * left[0]:.3g} % of the attention weights that was left on", "DRP-1"
        )


# A variance that loses digits.


def of_cancellation(question: Question) -> Iterator[Hypothesis]:
    """Read off that each row is stretched by a factor of its own, as large as rounding makes it in E[x²] -
    E[x]².
    """
    if not question.is_tap(NORMS):
        return
    text = "a variance computed as E[x²] - E[x]²"
    hypothesis = Hypothesis(
        "variance_by_squares", text, "NRM-2", change=variance_by_squares, on=(question.tensor,)
    )
    prediction = question.predict(hypothesis)
    error = question.actual - question.right.value
    offset = question.case.weights[f"{norm_of(question.config.norm_sharing, question.tensor)}.bias"].astype(
        np.float64
    )
    gained = question.right.value - offset
    stretch = (error * gained).sum(-1, keepdims=True) / np.square(gained).sum(-1, keepdims=True)
    if (
        np.isfinite(stretch).all()
        and within(error, prediction.sigma)
        and clear(error, error - stretch * gained, question.right.sigma)
        and root_mean_square(error) >= LEAST * root_mean_square(prediction.sigma)
        and root_mean_square(prediction.sigma)
        >= R * root_mean_square(question.right.sigma)  # else it is no worse than any other
    ):
        yield hypothesis
