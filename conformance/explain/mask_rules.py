"""Mask rules: the keys that a run hides, inferred from its masked scores (SPEC MSK-1 to MSK-7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from concord.conformance.bugs.context import Flags
from concord.conformance.explain.computation import within
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question
from concord.spec.masks import mask_constant, visible_keys
from concord.spec.precision import precision

MOST_SAMPLES = 64

# A rule must hide at least this many additional keys to be credible, since fewer fit any rule.
FEWEST = 5


def hidden_keys(question: Question) -> tuple[Flags, Flags] | None:
    """Keys that the run hides, and keys that it should hide, (B, H, Q, S) each; None if a score matches
    neither kind of key.
    """
    if not question.is_tap(("*.masked_scores",)) or not np.isfinite(question.actual).all():
        return None
    config, exact = question.config, question.exact
    scores = exact.now[f"{question.tensor.rpartition('.')[0]}.scores"].value
    constant = mask_constant(config, question.case.dtype)
    masked = constant if config.mask_fill == "replace" else scores + constant
    actual, unit = question.actual, precision(question.case.dtype).unit_roundoff
    hides = abs(actual - masked) < abs(actual - scores)
    value = np.where(hides, masked, scores)
    if not within(actual - value, np.hypot(np.where(hides, 0.0, question.right.sigma), unit * abs(value))):
        return None
    return hides, np.broadcast_to(~visible_keys(config, exact.context.real, scores.shape[1]), hides.shape)


def of_mask(question: Question) -> Iterator[Hypothesis]:
    hidden = hidden_keys(question)
    if hidden is None:
        return
    hides, visible = hidden[0], ~hidden[1]
    for text, clause, real in _of_others(question.exact.context.real):
        candidate = visible_keys(question.config, real, hides.shape[1])
        if hides.any() and np.array_equal(hides, np.broadcast_to(~candidate, hides.shape)):
            yield Hypothesis("mask_of_other_tokens", text, clause)
            return
    if (hidden[1] & ~hidden[0]).any():
        return
    queries, keys = hides.shape[2:]
    offsets = np.broadcast_to(np.arange(keys) - np.arange(queries)[:, None], hides.shape)  # key minus query
    expected, actual = offsets[visible], offsets[visible & ~hides]
    if not actual.size or (hides & visible).sum() < FEWEST:
        return
    low, high = int(actual.min()), int(actual.max())
    if np.array_equal(hides & visible, visible & ((offsets < low) | (offsets > high))):
        rules = [_beyond(high, "later")] if high < expected.max() else []
        rules = [*rules, _beyond(-low, "earlier")] if low > expected.min() else rules
        text = (
            f"keys more than {high} positions from their query"
            if -low == high and len(rules) > 1
            else " and ".join(rules)
        )
        yield Hypothesis("mask_by_distance", f"a mask that also hides {text}", "MSK-4")
        return
    query, key = np.arange(queries)[:, None], np.arange(keys)
    for size in range(1, keys):
        for text, rule in (
            (f"keys outside a query's block of {size}", query // size != key // size),
            (f"all later keys except the first {size}", (key > query) & (key >= size)),
        ):
            if np.array_equal(hides & visible, visible & rule):
                yield Hypothesis("mask_by_rule", f"a mask that also hides {text}", "MSK-4")
                return
    several = visible.sum(-1, keepdims=True) > 1  # a rule may exclude a sample's only token
    for side, real in (("last", visible[..., ::-1]), ("first", visible)):
        end = real & (np.cumsum(real, -1) == 1)
        end = end[..., ::-1] if side == "last" else end
        if any(np.array_equal(hides & visible, end & subset) for subset in (visible, several)):
            yield Hypothesis("mask_of_end", f"a mask that also hides the {side} real token", "MSK-1")
            return


def _of_others(real: Flags) -> Iterator[tuple[str, str, Flags]]:
    """Yield a wrong mask's description, its clause, and the tokens treated as real."""
    for shift in (1, -1, 2, -2):
        yield (
            f"a mask shifted by {abs(shift)} to the {'right' if shift > 0 else 'left'}",
            "MSK-1",
            np.roll(real, shift, -1),
        )
    for shift in (1, -1):
        shifted = np.roll(real, shift, -1)
        shifted[..., 0 if shift > 0 else -1] = False
        yield f"a mask that hides one key too many at the {'start' if shift > 0 else 'end'}", "MSK-1", shifted
    yield "a mask whose keys are in reverse order", "MSK-1", real[..., ::-1]
    first = -np.sort(-real.astype(np.int8), -1) > 0
    yield "a mask of the first n keys, where n tokens are real", "MSK-1", first
    last = np.maximum.accumulate(real[..., ::-1], -1)[..., ::-1]
    yield "a mask that ends at the last real token", "MSK-1", last
    yield "a mask that ends before the first padding token", "MSK-1", np.minimum.accumulate(real, -1)
    for sample in range(min(len(real), MOST_SAMPLES)):
        flags = np.broadcast_to(real[sample : sample + 1], real.shape)
        yield f"the mask of sample {sample}, used for all samples", "MSK-7", flags
    for shift, side in ((1, "previous"), (-1, "next")):
        yield f"the mask of the {side} sample", "MSK-7", np.roll(real, shift, 0)
    if real.ndim == 2:
        queries = np.broadcast_to(real[..., None], (*real.shape, real.shape[1]))
        yield "a mask of queries in place of keys", "MSK-4", queries
        yield "a mask of queries and keys", "MSK-4", queries & real[:, None]


def _beyond(limit: int, side: str) -> str:
    if limit > 0:
        return f"keys more than {limit} positions {side}"
    if limit == 0:
        return f"{side} keys"
    opposite = "earlier" if side == "later" else "later"
    if limit == -1:
        return f"a query's own key and {side} keys"
    return f"a query's own key, {side} keys, and keys fewer than {-limit} positions {opposite}"


def clauses_of_mask(question: Question, where: str, kind: str) -> tuple[str, ...]:
    hidden = hidden_keys(question)
    if hidden is None:
        of_constant = kind in ("constant", "not finite")
        return (("MSK-2" if of_constant else "MSK-3"),) if where.startswith("masked keys") else ()
    wrong = hidden[0] != hidden[1]
    for axis, clause in ((1, "MSK-7"), (2, "MSK-4")):
        if (wrong != np.take(wrong, [0], axis)).any():
            return (clause,)
    return ("MSK-1",) if wrong.any() else ()
