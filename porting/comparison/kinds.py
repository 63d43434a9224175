"""In which way one tensor differs from another.

Looked for from what porting does wrong most often to what nobody can name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.precision import precision
from concord.spec.sources.layouts import contiguous

Array = NDArray[Any]

FARTHEST = 8
"""Rows by which tables are shifted at most."""

LOWER = ("bfloat16", "float16", "float32")
"""Precisions that tensors are rounded to."""

LAST_DIGITS = 8
"""Units in the last place of float32, of a tensor's largest number, that count as rounding."""

FEW_ROWS = 0.25
"""Share of rows up to which it is some rows that differ."""

LEVELS = 256
"""Different numbers that what went through 8 bits or fewer has, at most."""

ALIKE = 0.5
"""Root mean square of the differences, by that of the numbers, up to which few numbers may be the many of the
other, quantised."""

WHOLE = 2**22
"""Numbers up to which all of a tensor is looked at for what is dear to find; of a larger one so many, from
its beginning, to find what all of it is held to."""


@dataclass(frozen=True)
class TensorDifference:
    """In which way a tensor differs.

    Attributes:
        kind: one of those that :func:`concord.porting.comparison.words.say` has words for.
        by: how far: rows that it is shifted by, the number it is scaled by or that is added; how many rows,
            columns or elements; how many levels.
        precision: that it is rounded to.
        swapped: which of the two is the lower one, or has the further rows: ``"first"`` or ``"second"``.
        among: where so few levels are: in ``"all"``, in ``"each row"`` or in ``"each column"``.
        order: which of the other's heads stands where.
        rows: the first rows, columns or elements that differ.
        elements: how many numbers differ, of ``size``.
        size: how many there are.
        largest: the largest difference, where both are finite.
        relative: the root mean square of these differences, by that of the first one's numbers.
        odd: of the numbers that differ, those that are not both finite: what the first has (one of
            :data:`CALLED`), what the second has, and how often.
    """

    kind: str
    by: float = 0.0
    precision: str = ""
    swapped: str = ""
    among: str = ""
    order: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    elements: int = 0
    size: int = 0
    largest: float = 0.0
    relative: float = 0.0
    odd: tuple[tuple[str, str, int], ...] = ()


Look = Callable[[Array, Array], TensorDifference | None]
"""Says in one way how a tensor differs from another; None: not so."""

CALLED = ("a number", "NaN", "infinity", "-infinity")
"""What a number may be, as far as differences go."""


def digest(bits: Array) -> str:
    """Return the SHA-256 of a tensor's bits, in C order."""
    found = contiguous(np.asarray(bits))
    return hashlib.sha256(found.data.cast("B") if found.size else b"").hexdigest()


SIZED = ("rounded", "scaled", "offset", "all the same", "rounding", "some rows", "quantised", "different")
"""Kinds of which it is said how large the differences are."""


def classify(first: Array, second: Array, heads: int = 1, head_axis: int | None = None) -> TensorDifference:
    """Say in which way a tensor differs from another, whose bits are not the same or whose dtype is another.

    Args:
        first, second: numbers in canonical layout; bfloat16 as float32.
        heads: of the model.
        head_axis: the axis along which the blocks of heads stand; None: there are none.
    """
    if first.shape != second.shape:
        return _of_shapes(first, second)
    if _equal(first, second):
        return TensorDifference("same numbers" if first.dtype != second.dtype else "same", size=first.size)
    with np.errstate(all="ignore"):
        found = TensorDifference("different")
        if first.dtype.kind == second.dtype.kind == "f":
            moved: Look = partial(_heads, heads=heads, axis=head_axis)
            looks: list[Look] = [_signs, _transposed, moved, *_LOOKS]
            found = next(filter(None, (look(first, second) for look in looks)), found)
        sizes = _sizes(first, second) if found.kind in SIZED else {"size": first.size}
    return replace(found, **sizes)


def _of_shapes(first: Array, second: Array) -> TensorDifference:
    if first.ndim == 2 and _equal(first.T, second):
        return TensorDifference("transposed", size=first.size)
    if first.ndim == second.ndim > 0 and first.shape[1:] == second.shape[1:]:
        longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
        rows, further = len(shorter), "first" if longer is first else "second"
        if rows and _equal(longer[:rows], shorter):
            return TensorDifference("rows missing", by=len(longer) - rows, swapped=further, size=rows)
        for shift in range(1, min(FARTHEST, rows - 1, len(longer) - rows) + 1):
            if _equal(longer[shift : shift + rows], shorter):
                return TensorDifference(
                    "rows shifted", by=-shift if longer is first else shift, size=first.size
                )
    return TensorDifference("another shape", size=first.size)


def _signs(first: Array, second: Array) -> TensorDifference | None:
    if first.dtype != second.dtype or not all((one == other).all() for one, other in _strips(first, second)):
        return None
    apart = (np.count_nonzero(~_alike(one, other)) for one, other in _strips(first, second))
    return TensorDifference("signs of zeros", by=int(sum(apart)))


def _transposed(first: Array, second: Array) -> TensorDifference | None:
    return TensorDifference("transposed") if first.ndim == 2 and _equal(first.T, second) else None


def _heads(first: Array, second: Array, heads: int, axis: int | None) -> TensorDifference | None:
    if (
        axis is None
        or heads < 2
        or first.shape[axis] % heads
        or _signs(first, second)
        or _transposed(first, second)
    ):
        return None
    mine, other = ([digest(block) for block in np.split(array, heads, axis)] for array in (first, second))
    if sorted(mine) == sorted(other):
        places: dict[str, list[int]] = {}
        for place, key in enumerate(mine):
            places.setdefault(key, []).append(place)
        return TensorDifference("heads permuted", order=tuple(places[key].pop(0) for key in other))
    width = first.shape[axis] // heads
    for outer, inner in ((heads, width), (width, heads)):
        split = (*first.shape[:axis], outer, inner, *first.shape[axis + 1 :])
        if _equal(first.reshape(split).swapaxes(axis, axis + 1).reshape(first.shape), second):
            return TensorDifference("heads interleaved")
    return None


def _shifted(first: Array, second: Array) -> TensorDifference | None:
    for shift in range(1, min(FARTHEST, len(first) - 2) + 1) if first.ndim == 2 else ():
        for by, above, below in ((shift, first, second), (-shift, second, first)):
            if _equal(above[:-shift], below[shift:]):
                return TensorDifference("rows shifted", by=by)
    return None


def _reordered(first: Array, second: Array) -> TensorDifference | None:
    if first.dtype != second.dtype or not 1 <= first.ndim <= 2:
        return None
    for axis, kind in enumerate(_PERMUTED[first.ndim]):
        mine, other = (contiguous(np.moveaxis(array, axis, 0)) for array in (first, second))
        moved = np.flatnonzero(~_alike(mine, other).reshape(len(mine), -1).all(1))
        if sorted(digest(mine[place]) for place in moved) == sorted(digest(other[place]) for place in moved):
            return TensorDifference(kind, by=len(moved), rows=tuple(moved[:5].tolist()))
    return None


_PERMUTED: dict[int, tuple[str, ...]] = {1: ("elements permuted",), 2: ("rows permuted", "columns permuted")}
"""What is permuted along each axis, by the number of axes."""


def _sides(first: Array, second: Array) -> tuple[tuple[Array, Array, str], ...]:
    """Return one and the other of two tensors, and which the one is; the second comes first."""
    return (second, first, "second"), (first, second, "first")


def _rounded(first: Array, second: Array) -> TensorDifference | None:
    for name in LOWER:
        for low, high, which in _sides(first, second):
            if _equal(precision(name).round(high), low) and np.isfinite(low).all():
                return TensorDifference("rounded", precision=name, swapped=which)
    return None


def _constant(first: Array, second: Array) -> TensorDifference | None:
    if first.size < 2 or (np.isnan(first).all() and np.isnan(second).all()):
        return None
    for one, _, which in _sides(first, second):
        if (one == one.flat[0]).all() or np.isnan(one).all():
            return TensorDifference("all the same", by=float(one.flat[0]), swapped=which)
    return None


def _scaled(first: Array, second: Array) -> TensorDifference | None:
    mine, other = _wide(first), _wide(second)
    squares = float(mine @ mine)
    by = float(mine @ other) / squares if squares else 0.0
    if first.size < 2 or by == 0.0 or not np.isfinite(by) or abs(by - 1) < 1e-6:
        return None
    return TensorDifference("scaled", by=by) if _near(first, second, lambda numbers: numbers * by) else None


def _offset(first: Array, second: Array) -> TensorDifference | None:
    by = float(np.median(_wide(second) - _wide(first)))
    if first.size < 2 or by == 0.0 or not np.isfinite(by):
        return None
    largest = max(_largest(wide.astype(np.float64)) for pair in _strips(first, second) for wide in pair)
    near = abs(by) > 1e-5 * largest and _near(first, second, lambda numbers: numbers + by, largest)
    return TensorDifference("offset", by=by) if near else None


def _rounding(first: Array, second: Array) -> TensorDifference | None:
    return TensorDifference("rounding") if _near(first, second) else None


def _rows(first: Array, second: Array) -> TensorDifference | None:
    if first.ndim != 2:
        return None
    apart = np.flatnonzero(~_alike(first, second).all(1))
    few = len(apart) <= FEW_ROWS * len(first)
    return TensorDifference("some rows", by=len(apart), rows=tuple(apart[:5].tolist())) if few else None


def _quantised(first: Array, second: Array) -> TensorDifference | None:
    if first.ndim != 2 or _sizes(first, second)["relative"] > ALIKE:
        return None
    for low, high, which in _sides(first, second):
        for axis, among in ((None, "all"), (0, "each row"), (1, "each column")):
            few, many = _levels(low, axis), _levels(high, axis)
            if few <= LEVELS and 2 * few < many:
                return TensorDifference("quantised", by=few, swapped=which, among=among)
    return None


def _levels(array: Array, axis: int | None) -> int:
    """Return how many different numbers a matrix has, or the most that a row or column has: axis 0 or 1."""
    if axis is None:
        beginning = np.unique(array.reshape(-1)[:WHOLE]).size
        return beginning if beginning > LEVELS or array.size <= WHOLE else np.unique(array).size
    ordered = np.sort(np.moveaxis(array, axis, 0), axis=1)
    return int(np.count_nonzero(np.diff(ordered, axis=1), axis=1).max(initial=0)) + 1


_LOOKS: tuple[Look, ...] = (
    _shifted,
    _reordered,
    _rounded,
    _constant,
    _scaled,
    _offset,
    _rounding,
    _rows,
    _quantised,
)
"""What is looked for after that, from what porting does wrong most often on."""


def _equal(first: Array, second: Array) -> bool:
    return first.shape == second.shape and all(
        _alike(one, other).all() for one, other in _strips(first, second)
    )


def _alike(one: Array, other: Array) -> NDArray[np.bool_]:
    """Say of each number whether it has the same bits in both.

    Of two dtypes, whether it is the same number, or NaN in both.
    """
    if one.dtype == other.dtype:
        bits = f"u{one.dtype.itemsize}"
        return np.asarray(one.view(bits) == other.view(bits))
    nan = [np.isnan(array) if array.dtype.kind == "f" else np.False_ for array in (one, other)]
    return np.asarray((one == other) | (nan[0] & nan[1]))


def _strips(first: Array, second: Array) -> Iterator[tuple[Array, Array]]:
    """Yield pieces of two arrays: most that differ do so in the first."""
    if first.ndim == 0:
        yield first, second
        return
    step = max(1, WHOLE // max(first[:1].size, 1))
    for begin in range(0, len(first), step):
        yield first[begin : begin + step], second[begin : begin + step]


def _wide(array: Array) -> NDArray[np.float64]:
    """Return the numbers in float64, of a large tensor the first ones."""
    return np.ascontiguousarray(array.reshape(-1)[:WHOLE], np.float64)


def _near(
    first: Array,
    second: Array,
    change: Callable[[Array], Array] = lambda numbers: numbers,
    scale: float | None = None,
) -> bool:
    """Say whether all numbers are the same but for their last digits.

    Args:
        change: is made of the first one's numbers.
        scale: whose last digits count; None: those of each number.
    """
    digits = max(precision(array.dtype.name).unit_roundoff for array in (first, second))
    for one, other in _strips(first, second):
        mine, theirs = change(one.astype(np.float64)), other.astype(np.float64)
        size = np.maximum(abs(mine), abs(theirs))
        close = abs(mine - theirs) <= LAST_DIGITS * digits * (size if scale is None else scale)
        if not np.where(np.isfinite(size), close, (mine == theirs) | _alike(one, other)).all():
            return False
    return True


def _sizes(first: Array, second: Array) -> dict[str, Any]:
    """Return how large the differences are."""
    count, largest, squares, whole = 0, 0.0, 0.0, 0.0
    odd = np.zeros((len(CALLED), len(CALLED)), np.int64)
    scale = (
        max((_largest(one.astype(np.float64)) for one, _ in _strips(first, second)), default=0.0) or 1.0
    )  # squares need not be finite
    for one, other in _strips(first, second):
        differ, mine, theirs = ~_alike(one, other), one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(mine) & np.isfinite(theirs)
        gaps = np.where(finite, abs(theirs - mine), 0.0)
        count += int(np.count_nonzero(differ))
        largest = max(largest, float(np.max(gaps, initial=0.0)))
        squares += float(np.square(gaps / scale).sum())
        whole += float(np.square(np.where(finite, mine, 0.0) / scale).sum())
        np.add.at(odd, tuple(_kinds(array[differ & ~finite]) for array in (mine, theirs)), 1)
    relative = float(np.sqrt(squares / whole)) if whole else float("inf") if squares else 0.0
    named = tuple((CALLED[mine], CALLED[theirs], int(odd[mine, theirs])) for mine, theirs in np.argwhere(odd))
    return {"elements": count, "size": first.size, "largest": largest, "relative": relative, "odd": named}


def _largest(array: Array) -> float:
    return float(np.max(abs(array), where=np.isfinite(array), initial=0.0))


def _kinds(array: Array) -> NDArray[np.int64]:
    """Return what each number is, by its place in :data:`CALLED`."""
    return np.select([np.isnan(array), np.isposinf(array), np.isneginf(array)], [1, 2, 3], 0).astype(np.int64)
