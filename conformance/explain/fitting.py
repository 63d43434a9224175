"""Numbers that nobody would guess: they are fitted to what was delivered, and then tried as any other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.spec.arrays import Array

Left = Callable[[Array], Array]
"""Returns what numbers leave of what was delivered, as a vector: float64 is enough, whatever it comes in."""

NEVER = 1e-30
"""What is smaller says nothing of a number."""

ROUNDS, NUDGE, SETTLED = 6, 1e-4, 1e-9
"""Steps at most, the share of a number by which a slope is taken, and the share that ends the search."""

NOUGHT = 1e-9
"""A number that was solved for and is smaller may be 0: steps of it end before."""

NEARLY = 1.1
"""How much more a number of few digits may leave, as a square: rounding hides the rest."""

POWERS = np.arange(-13.0, 1.0)
"""Powers of ten that a small number is looked for by."""


def fitted(left: Left, *start: float) -> list[float]:
    """Return the numbers by which least is left, found by steps of Gauss and Newton.

    Args:
        start: the numbers to begin with.

    Raises:
        ValueError: where what is left says nothing of one of them.
    """
    numbers = np.array(start)
    for _ in range(ROUNDS):
        there = left(numbers).astype(np.float64)
        nudges = np.where(numbers == 0, NUDGE, -NUDGE * numbers)  # a share of 1 stays below it
        slopes = [
            (there - left(numbers + by * one).astype(np.float64)) / by
            for by, one in zip(nudges, np.eye(len(numbers)), strict=True)
        ]
        if not np.isfinite(there).all() or min(float(np.max(abs(s), initial=0.0)) for s in slopes) <= NEVER:
            raise ValueError("a number that nothing depends on")
        change = np.linalg.lstsq(np.stack(slopes, axis=1), there, rcond=None)[0]
        numbers = numbers + change
        if (abs(change) <= SETTLED * abs(numbers)).all():
            break
    return [float(number) for number in numbers]


def power(left: Left) -> float:
    """Return the power of ten by which least is left.

    Raises:
        ValueError: as :func:`fitted` does.
    """
    squares = [np.nan_to_num(np.square(left(POWERS[[i]])).sum(), nan=np.inf) for i in range(len(POWERS))]
    (found,) = fitted(left, float(POWERS[int(np.argmin(squares))]))
    return min(max(found, float(POWERS[0])), float(POWERS[-1]))


def shortest(left: Left, number: float) -> float:
    """Return the number with the fewest digits that leaves hardly more than another does."""
    shorter = [float(f"{number:.{digits}g}") for digits in range(1, 10)]
    if abs(number) < NOUGHT:
        shorter.insert(0, 0.0)
    squares = [np.square(left(np.array([one]))).mean() for one in (*shorter, number)]
    return next(
        (one for one, square in zip(shorter, squares, strict=False) if square <= NEARLY * squares[-1]), number
    )
