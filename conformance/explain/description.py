"""Descriptions of a wrong tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.context import Flags, norm_of
from concord.conformance.bugs.norms import NORMS
from concord.conformance.explain.computation import Computation, within
from concord.conformance.explain.mask_rules import clauses_of_mask
from concord.conformance.explain.question import Question
from concord.conformance.judging.breakdown import axes_of
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.padding import padded_rows, seen_keys
from concord.conformance.wording import few, instead_of, multiple
from concord.spec.arrays import Array
from concord.spec.precision import precision
from concord.spec.tensors import clause_of

# Share of a region that must be wrong, since some errors are small by chance.
FILLED = 0.9

# Longest axis whose places are compared with one another, at quadratic cost.
MOST_PLACES = 512

# At least this many unordered errors, up to this share of a value (bfloat16's unit), may come from fewer bits
# (PRC-2).
MANY, COARSE = 30, 2.0**-8

# Minimum number of distinct values that identify the source of a place: fewer values occur anywhere.
MOVED = 3

# Minimum number of wrong elements for a credible relation: two or three are related by chance.
FEW = 5

# Kinds of relations that may apply to single elements at any place.
BY_ELEMENT = ("zero", "constant", "factor")

# Elementwise taps.
FUNCTIONS = ("*.feed_forward.activation", "pooler.output")

# Taps that reveal a row without visible keys.
ATTENDING = ("*.weights", "*.masked_weights", "*.context", "*.attention.output")

# No other error reaches this share of the mask constant.
LARGE = 1e-3

BLIND = "rows without a visible key"

NOT_FINITE = ((np.isnan, "is not a number (NaN)"), (np.isinf, "is infinite"))

# Kind (or axis) of a relation between wrong elements and correct ones, and its words.
Relation = tuple[str, str]

NONE: Relation = ("", "")

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

# Axes within one token or sample.
COLUMNS = ("head_dim", "d_model", "d_ff", "features", "classes", "vocab")

# For tensors defined by several clauses, the one most often broken.
USUAL = (
    (("embeddings.token",), "EMB-1"),
    (NORMS, "NRM-2"),
    (("*masked_scores",), "MSK-1"),
    (PROJECTIONS, "ATT-1"),
)
# Patterns of taps, kinds of relations, and the clause that such a relation indicates.
RELATED = (
    (("embeddings.token",), ("factor",), "EMB-2"),
    (("embeddings.position",), ("d_model",), "POS-2"),
    (PROJECTIONS, ("heads", "head_dim"), "ATT-2"),
    (("*attention.scores",), ("heads",), "ATT-2"),
    (("*attention.scores",), ("query", "key", "offset"), "ATT-3"),
)


@dataclass(frozen=True)
class Description:
    """Description of a wrong tensor that names no cause.

    Attributes:
        where: words after "only in"; empty for the whole tensor.
        what: relation to correct elements, if any, in words after the tensor's name.
        relative: median relative error of wrong elements; may be infinite.
    """

    tensor: str
    where: str
    what: str
    wrong: int = 0
    size: int = 0
    relative: float = float("inf")

    @property
    def text(self) -> str:
        if self.size == 1 and self.what:
            return f"`{self.tensor}` {self.what}"
        share = f"{self.wrong} of {self.size} elements"
        if self.where:
            suffix = f": there it {self.what}" if self.what else ""
            return f"`{self.tensor}` is wrong only in {self.where} ({share}){suffix}"
        if self.what:
            return f"`{self.tensor}` {self.what} ({share} are wrong)"
        size = f", by about {self.relative:.1g} of their magnitude" if 0 < self.relative < 1 else ""
        return f"`{self.tensor}` is wrong in {share}{size}, in no known pattern"


def describe(question: Question) -> tuple[Description | None, Flags, str]:
    """Describe a wrong tensor, its region, and its kind of relation; None if no element is wrong."""
    with np.errstate(all="ignore"):
        wrong = wrong_elements(question)
        everywhere = np.ones_like(wrong)
        if not wrong.any():
            return None, everywhere, ""
        where, region = _region(question, wrong)
        kind, words = _relation(question, region)
        if where and not words and (wrong & region).sum() < FILLED * region.sum():
            where, region, (kind, words) = "", everywhere, _relation(question, everywhere)
        if not words and wrong.sum() >= FEW and (of_wrong := _relation(question, wrong))[0] in BY_ELEMENT:
            kind, words = of_wrong[0], f"{of_wrong[1]} where it is wrong"
        expected = question.right.value[wrong]
        shares = abs(question.actual[wrong] - expected) / abs(expected)
    relative = float(np.median(np.nan_to_num(shares, nan=np.inf, posinf=np.inf)))
    return Description(question.tensor, where, words, int(wrong.sum()), wrong.size, relative), region, kind


def wrong_elements(question: Computation) -> Flags:
    """Elements wrong by more than Z sigma or, if none, R sigma."""
    # R applies if only the root mean square of all elements is wrong.
    actual, expected, sigma = question.actual, question.right.value, question.right.sigma
    infinite = np.isfinite(actual) != np.isfinite(expected)
    scores = np.where(np.isfinite(sigma), abs(actual - expected) / sigma, 0.0)
    for limit in (Z, R):
        wrong = infinite | (np.nan_to_num(scores, nan=np.inf) > limit) & np.isfinite(expected)
        if wrong.any():
            return np.asarray(wrong)
    return np.asarray(infinite)


def clauses_of(question: Question, seen: Description | None, kind: str, defining: str) -> tuple[str, ...]:
    """Clauses that a wrong tensor may break, likeliest first."""
    clauses = list[str]()
    if question.is_tap(("*",)) and seen:
        clauses += clauses_of_mask(question, seen.where, kind)
        clauses += clauses_of_rows(question, seen, kind)
        # A relation in one row of a table concerns that row, not the step.
        one_id = seen.where.startswith("id ")
        clauses += [
            clause
            for taps, kinds, clause in RELATED
            if kind in kinds and question.is_tap(taps) and not one_id
        ]
        small = seen.relative < COARSE and seen.wrong >= MANY
        # Otherwise whole vectors are wrong: the wrong rows were looked up in a correct table.
        of_table = not seen.where or "column" in seen.where
        if question.is_tap(("embeddings.position",)) and of_table and kind != "tokens":
            clauses += ["POS-4"] if small else ["POS-3"] if question.config.positions == "sinusoidal" else []
        elif not seen.what and small and _is_noise(question):
            clauses.append("PRC-2")
    return tuple(dict.fromkeys((*clauses, usual_clause(question), defining)))


def usual_clause(question: Question) -> str:
    default = clause_of(question.config, question.tensor, question.case.part)
    return next((clause for patterns, clause in USUAL if question.is_tap(patterns)), default)


def clauses_of_rows(question: Question, seen: Description, kind: str) -> tuple[str, ...]:
    if seen.where.startswith(BLIND):
        return ("MSK-5",)
    padded = seen.where.startswith("padded")
    if question.config.query_mask == "overwrite" and question.is_tap(("*.masked_weights", "*.context")):
        # No other step has an error as large as the constant.
        error = np.nanmax(abs(question.actual - question.right.value), initial=0.0)
        return ("MSK-8",) if padded or error > LARGE * abs(question.config.mask_value) else ()
    if not padded:
        return ()
    return ("MSK-4",) if kind == "zero" or "attention" in seen.tensor else ()


# Rounding errors up to this share may have one sign, or depend on a step's input, by chance.
BALANCED = 0.5


def _is_noise(question: Question) -> bool:
    # A constant of few digits, or an epsilon added to a sum, causes errors as small but not random.
    finite = np.isfinite(question.actual) & np.isfinite(question.right.value)
    expected = question.right.value[finite].astype(np.float64)
    error = question.actual[finite] - expected
    if abs(np.sign(error * expected).mean()) > BALANCED:
        return False
    if question.is_tap(NORMS):  # a different variance stretches each row about its offset
        owner = norm_of(question.config.norm_sharing, question.tensor)
        offset = np.broadcast_to(question.case.weights[f"{owner}.bias"], finite.shape)[finite]
        follows = np.corrcoef(error, expected - offset)[0, 1] ** 2
    elif question.is_tap(FUNCTIONS):  # with a different function, elements with close inputs err alike
        shares = error[np.argsort(question.entered[finite])]
        follows = 1 - np.square(np.diff(shares)).mean() / (2 * shares.var())
    else:
        return True
    return bool(follows <= BALANCED)


# Where.


def _by_heads(question: Question) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of axes, with joined heads as a separate axis."""
    shape, config = question.actual.shape, question.config
    axes = axes_of(question.case, question.tensor, len(shape))
    if question.is_tap(("*context",)) and len(shape) == 3:
        return (*axes[:-1], "heads", "head_dim"), (*shape[:-1], config.num_heads, config.head_dim)
    return axes, shape


def _region(question: Question, wrong: Flags) -> tuple[str, Flags]:
    """The simplest region with all wrong elements and few others."""
    regions = [("", np.ones_like(wrong))]
    axes, shape = _by_heads(question)
    wrong = wrong.reshape(shape)
    if wrong.mean() < FILLED:
        for condition, flags in _conditions(question, axes, wrong):
            text, subregion = _narrowed(condition, np.broadcast_to(flags, shape), wrong, axes)
            regions += [] if (wrong & ~flags).any() else [(text, subregion.reshape(question.actual.shape))]

    # Shares in steps of a twentieth: a slightly fuller region does not justify another condition.
    def worth(region: tuple[str, Flags]) -> tuple[float, int]:
        text, flags = region
        return round(20 * min(float(wrong.sum() / flags.sum()), FILLED)), -len(text.split(", "))

    return max(regions, key=worth)


def _narrowed(condition: str, flags: Flags, wrong: Flags, axes: tuple[str, ...]) -> tuple[str, Flags]:
    words = [condition] if condition else []
    for place, axis in enumerate(axes):
        other_axes = tuple(i for i in range(len(axes)) if i != place)
        wrong_places = np.asarray(wrong.any(other_axes))
        if wrong_places.sum() < flags.any(other_axes).sum():
            words.append(f"{WORDS.get(axis, axis)} {listed(np.flatnonzero(wrong_places))}")
            flags = flags & _stretched(wrong_places, axes, place)
    return ", ".join(words), flags


def listed(places: NDArray[np.integer]) -> str:
    first, last = int(places[0]), int(places[-1])
    return f"{first} to {last}" if last - first == len(places) - 1 > 0 else few(places)


def _stretched(numbers: Array | Flags, axes: tuple[str, ...], *along: int) -> Flags:
    return np.asarray(numbers, bool).reshape(
        [numbers.shape[along.index(i)] if i in along else 1 for i in range(len(axes))]
    )


def _conditions(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[tuple[str, Flags]]:
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
        if question.is_tap(ATTENDING) and (visible := seen_keys(config, batch)) is not None:
            blind = np.asarray(~visible.any(-1))  # (B, 1 or H, 1 or Q)
            by_query = axes[1:] == ("heads", "query", "key")
            yield BLIND, blind[..., None] if by_query else _stretched(np.asarray(blind.all(1)), axes, 0, 1)
    if axes[:2] == ("batch", "tokens") and batch.input_ids is not None:
        ids = np.unique(batch.input_ids[wrong.reshape(*wrong.shape[:2], -1).any(-1)])
        if len(ids) == 1:
            yield f"id {ids[0]}", _stretched(batch.input_ids == ids[0], axes, 0, 1)
    yield "", np.ones_like(wrong)


# What.


def _relation(question: Question, region: Flags) -> Relation:
    axes, shape = _by_heads(question)
    actual, expected, sigma = (
        np.broadcast_to(array, question.actual.shape).reshape(shape)
        for array in (question.actual, question.right.value, question.right.sigma)
    )
    return relation(axes, actual, expected, sigma, region.reshape(shape), question.case.dtype)


def relation(
    axes: Sequence[str], actual: Array, right: Array, sigma: Array, region: Flags, dtype: str
) -> Relation:
    """The first relation that is true in a region up to rounding, or :data:`NONE`."""
    values, expected, spread = actual[region], right[region], sigma[region]
    if not np.isfinite(values).all():
        return next((("not finite", text) for of, text in NOT_FINITE if of(values).all()), NONE)
    if values.size == 1:
        return "number", f"is {instead_of(float(values[0]), float(expected[0]))}"

    def holds(value: Array, scale: float = 1.0, subset: Flags | slice = slice(None)) -> bool:
        unit = precision(dtype).unit_roundoff
        error, allowed = values - value, np.hypot(spread * max(1.0, scale), unit * abs(value))
        return within(error[subset], allowed[subset])

    if holds(np.full_like(expected, values[0]), 0.0):
        return ("constant", f"is {values[0]:.6g} throughout") if values[0] else ("zero", "is zero")
    for place, axis in enumerate(axes):
        if 2 <= right.shape[place] <= MOST_PLACES and right.size > 2 * right.shape[place]:
            source = nearest(place, region, actual, right)
            moved = [i for i, j in enumerate(source) if i != j]
            if (
                moved
                and holds(np.take(right, source, place)[region])
                and _tells(place, region, actual, moved)
            ):
                words = few(f"{i} from {source[i]}" for i in moved)
                return axis, f"is correct, but each {WORDS.get(axis, axis)} is taken from another: {words}"
    if factor := _factor(values, expected, spread, holds):
        return factor
    long_axes = [
        i for i, axis in enumerate(axes) if axis not in COLUMNS and 2 <= right.shape[i] < right.size / FEW
    ]
    for place in long_axes:
        factors = _factors(place, actual, right, np.where(region, sigma, 0.0))
        places = np.unique(np.nonzero(region)[place])
        region_factors = factors.reshape(-1)[places]
        if (
            np.isfinite(region_factors).all()
            and np.ptp(region_factors)
            and holds((factors * right)[region], abs(region_factors).max())
        ):
            of = WORDS.get(axes[place], axes[place])
            words = few(f"{factor:.4g}" for factor in region_factors)
            return "factor", f"is multiplied by a factor for each {of}: {words}"
    weight = _weights(spread)
    offset = float((weight * (values - expected)).sum() / weight.sum())
    if holds(expected + offset):
        return "offset", f"is {abs(offset):.4g} too {'large' if offset > 0 else 'small'}"
    return NONE


def _factors(place: int, actual: Array, expected: Array, sigma: Array) -> Array:
    other_axes, weight = tuple(i for i in range(expected.ndim) if i != place), _weights(sigma)
    power, products = (
        (weight * expected * array).sum(other_axes, keepdims=True) for array in (expected, actual)
    )
    return np.asarray(products / np.where(power > 0, power, 1.0))


def _weights(spread: Array) -> Array:
    return np.where(np.isfinite(spread) & (spread > 0), 1 / np.square(spread), 0.0)


def _factor(values: Array, expected: Array, spread: Array, holds: Callable[..., bool]) -> Relation | None:
    zeros = (values == 0) & (expected != 0)
    weight = np.where(zeros, 0.0, _weights(spread))
    factor = float((weight * expected * values).sum() / (weight * np.square(expected)).sum())
    if (~zeros).sum() < 2 or not holds(factor * expected, abs(factor), ~zeros):
        return None
    if zeros.any() and ((~zeros).sum() < FEW or holds(expected, 1.0, ~zeros)):
        return None
    # Four digits, unless they give 1: a constant of few digits leads to a factor near 1.
    text = f"is multiplied by {multiple(float(f'{factor:.4g}') if f'{factor:.4g}' != '1' else factor)}"
    return (
        "factor",
        f"is zero in {zeros.sum()} elements, and {text[3:]} in the others" if zeros.any() else text,
    )


def _tells(place: int, region: Flags, actual: Array, moved: list[int]) -> bool:
    rows, flags = (np.moveaxis(array, place, 0) for array in (actual, region))
    return all(len(np.unique(rows[i][flags[i]])) >= MOVED for i in moved)


def nearest(place: int, region: Flags, actual: Array, right: Array) -> NDArray[np.integer]:
    """Nearest correct place for each place along an axis."""
    size = right.shape[place]
    mask, delivered, expected = (
        np.moveaxis(array, place, 0).reshape(size, -1).astype(np.float64) for array in (region, actual, right)
    )
    # |actual - right|² minus |actual|², which is the same for every place.
    distances = mask @ np.square(expected).T - 2 * (mask * delivered) @ expected.T
    return np.asarray(np.where(mask.any(1), distances.argmin(1), np.arange(size)))
