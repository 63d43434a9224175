"""What is seen of a wrong tensor: which elements are wrong, and how they are related to the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.context import Flags
from concord.conformance.estimate import R, Z
from concord.conformance.explain.breakdown import axes_of
from concord.conformance.explain.computation import within
from concord.conformance.explain.question import Question
from concord.conformance.explain.said import Description
from concord.conformance.padding import padded_rows, seen_keys
from concord.conformance.wording import few, multiple
from concord.spec.arrays import Array
from concord.spec.precision import precision

FILLED = 0.9
"""Which share of a region has to be wrong for the region to be said: some errors are small by chance."""

MOST_PLACES = 512
"""Along a longer axis no place is compared with each other one."""

MANY, COARSE = 30, 2.0**-8
"""So many errors without an order, up to this share of a number, are those of a step that has fewer bits."""

WORDS = {
    "batch": "sample",
    "tokens": "token",
    "heads": "head",
    "head_dim": "column",
    "d_model": "column",
    "d_ff": "column",
    "features": "column",
    "classes": "class",
    "vocab": "id",
}

USUAL = {
    "embeddings.token": "EMB-1",
    "*norm*": "NRM-2",
    "*masked_scores": "MSK-1",
    "*attention.query": "ATT-1",
    "*attention.key": "ATT-1",
    "*attention.value": "ATT-1",
}
"""The clause that is broken most often by a wrong tensor that several define."""


def describe(question: Question) -> tuple[Description | None, Flags]:
    """Return what is seen of the tensor in question, if anything is wrong with it by itself, and where."""
    with np.errstate(all="ignore"):
        wrong = wrong_elements(question)
        there = np.ones_like(wrong)
        if not wrong.any():
            return None, there
        where, region = _region(question, wrong)
        what = _relation(question, region)
        if where and not what and (wrong & region).sum() < FILLED * region.sum():
            where, region, what = "", there, _relation(question, there)
        right = question.right.value[wrong]
        shares = abs(question.actual[wrong] - right) / abs(right)
    relative = float(np.median(np.nan_to_num(shares, nan=np.inf, posinf=np.inf)))
    return Description(question.tensor, where, what, int(wrong.sum()), wrong.size, relative), region


def wrong_elements(question: Question) -> Flags:
    """Return which elements are wrong; if none is by itself, those that err more than chance lets many."""
    actual, right, sigma = question.actual, question.right.value, question.right.sigma
    infinite = np.isfinite(actual) != np.isfinite(right)
    scores = np.where(np.isfinite(sigma), abs(actual - right) / sigma, 0.0)
    for limit in (Z, R):
        wrong = infinite | (np.nan_to_num(scores, nan=np.inf) > limit) & np.isfinite(right)
        if wrong.any():
            return np.asarray(wrong)
    return np.asarray(infinite)


def clauses_of(question: Question, seen: Description | None, defining: str) -> tuple[str, ...]:
    """Return the clauses that a wrong tensor may break, the likeliest first.

    Args:
        seen: what is seen of it.
        defining: the clause that defines it.
    """
    tap, found = question.is_tap(("*",)), list[str]()
    if tap and seen:
        disorderly = not seen.what and seen.wrong >= MANY and seen.relative < COARSE
        found += ["PRC-2"] if disorderly else []
        found += ["MSK-4"] if seen.where.startswith("padded") and "attention" in seen.tensor else []
    found += [clause for pattern, clause in USUAL.items() if tap and fits(question.tensor, (pattern,))]
    return tuple(dict.fromkeys((*found, defining)))


# Where.


def _by_heads(question: Question) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and sizes of the axes of the tensor in question, joined heads by themselves."""
    shape, config = question.actual.shape, question.config
    axes = axes_of(question.case, question.tensor, len(shape))
    if question.is_tap(("*context",)) and len(shape) == 3:
        return (*axes[:-1], "heads", "head_dim"), (*shape[:-1], config.num_heads, config.head_dim)
    return axes, shape


def _region(question: Question, wrong: Flags) -> tuple[str, Flags]:
    """Return the plainest region that holds all wrong elements, and whose elements are nearly all wrong."""
    found = [("", np.ones_like(wrong))]
    axes, shape = _by_heads(question)
    wrong = wrong.reshape(shape)
    if wrong.mean() < FILLED:
        for condition, flags in _conditions(question, axes, wrong):
            text, narrowed = _narrowed(condition, np.broadcast_to(flags, shape), wrong, axes)
            found += [] if (wrong & ~flags).any() else [(text, narrowed.reshape(question.actual.shape))]

    def worth(one: tuple[str, Flags]) -> tuple[float, int]:
        text, flags = one
        return round(20 * min(float(wrong.sum() / flags.sum()), FILLED)), -len(text.split(", "))

    return max(found, key=worth)


def _narrowed(condition: str, flags: Flags, wrong: Flags, axes: tuple[str, ...]) -> tuple[str, Flags]:
    """Return what of a region lies in the places along each axis where something is wrong, in words."""
    said = [condition] if condition else []
    for place, axis in enumerate(axes):
        others = tuple(i for i in range(len(axes)) if i != place)
        touched = np.asarray(wrong.any(others))
        if touched.sum() < flags.any(others).sum():
            said.append(f"{WORDS.get(axis, axis)} {_listed(np.flatnonzero(touched))}")
            flags = flags & _stretched(touched, axes, place)
    return ", ".join(said), flags


def _listed(places: NDArray[np.integer]) -> str:
    """Return places along an axis in words."""
    first, last = int(places[0]), int(places[-1])
    return f"{first} to {last}" if last - first == len(places) - 1 > 0 else few(places)


def _stretched(numbers: Array | Flags, axes: tuple[str, ...], *along: int) -> Flags:
    """Return flags of some axes, given in their order, so that they can be broadcast to all."""
    return np.asarray(numbers, bool).reshape(
        [numbers.shape[along.index(i)] if i in along else 1 for i in range(len(axes))]
    )


def _conditions(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[tuple[str, Flags]]:
    """Yield what may be special of elements besides their place, and of none."""
    config, batch = question.config, question.case.batch
    if axes[:1] == ("batch",):
        padded = padded_rows(config, batch)
        for axis, hidden in (
            ("tokens", "padded tokens"),
            ("query", "padded queries"),
            ("key", "masked keys"),
        ):
            if axis in axes and axis in padded:
                flags = _stretched(padded[axis], axes, 0, axes.index(axis))
                yield hidden, flags
                yield f"all but {hidden}", ~flags
        if axes[1:] == ("heads", "query", "key") and (seen := seen_keys(config, batch)) is not None:
            yield "rows without a visible key", np.asarray(~seen.any(-1, keepdims=True))
    if axes[:2] == ("batch", "tokens") and batch.input_ids is not None:
        found = np.unique(batch.input_ids[wrong.reshape(*wrong.shape[:2], -1).any(-1)])
        if len(found) == 1:
            yield f"id {found[0]}", _stretched(batch.input_ids == found[0], axes, 0, 1)
    yield "", np.ones_like(wrong)


# What.


def _relation(question: Question, region: Flags) -> str:
    """Return the first relation that holds in a region to within rounding, in words; empty if none does."""
    axes, shape = _by_heads(question)
    actual, right, sigma = (
        np.broadcast_to(array, question.actual.shape).reshape(shape)
        for array in (question.actual, question.right.value, question.right.sigma)
    )
    region = region.reshape(shape)
    there, meant, spread = actual[region], right[region], sigma[region]
    if not np.isfinite(there).all():
        if np.isnan(there).all():
            return "is no number (NaN)"
        return "is infinite" if np.isinf(there).all() else ""

    def holds(value: Array, scale: float = 1.0) -> bool:
        """Return whether numbers are these, whose rounding is multiplied."""
        unit = precision(question.case.dtype).unit_roundoff
        return within(there - value, np.hypot(spread * max(1.0, scale), unit * abs(value)))

    if there.size > 1 and holds(np.full_like(meant, there[0]), 0.0):
        return f"is {there[0]:.6g} throughout" if there[0] else "is zero"
    for place, axis in enumerate(axes):
        if 2 <= right.shape[place] <= MOST_PLACES and right.size > 2 * right.shape[place]:
            source = nearest(place, region, actual, right)
            moved = [f"{i} from {j}" for i, j in enumerate(source) if i != j]
            if moved and holds(np.take(right, source, place)[region]):
                word = WORDS.get(axis, axis)
                return f"is the right one with each {word} taken from another: {few(moved)}"
    if there.size < 2:
        return ""
    weight = np.where(np.isfinite(spread) & (spread > 0), 1 / np.square(spread), 0.0)
    factor = float((weight * meant * there).sum() / (weight * np.square(meant)).sum())
    if holds(factor * meant, abs(factor)):
        return f"is multiplied by {multiple(float(f'{factor:.4g}'))}"
    offset = float((weight * (there - meant)).sum() / weight.sum())
    if holds(meant + offset):
        return f"is {abs(offset):.4g} too {'large' if offset > 0 else 'small'}"
    return ""


def nearest(place: int, region: Flags, actual: Array, right: Array) -> NDArray[np.integer]:
    """Return for each place along an axis which place of the right tensor comes nearest to it."""
    size = right.shape[place]
    where, made, meant = (
        np.moveaxis(array, place, 0).reshape(size, -1).astype(np.float64) for array in (region, actual, right)
    )
    apart = where @ np.square(meant).T - 2 * (where * made) @ meant.T
    return np.asarray(np.where(where.any(1), apart.argmin(1), np.arange(size)))
