"""Least-squares fits of values that no list of candidates contains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.spec.arrays import Array

# A function from fitted values to residuals, a vector of any dtype.
Left = Callable[[Array], Array]

# A slope up to this size counts as zero: the result does not depend on the value.
NEVER = 1e-30

# Limit on the steps; relative nudge for finite differences; relative change at which the fit has converged.
ROUNDS, NUDGE, SETTLED = 6, 1e-4, 1e-9

# A fitted value below this may be 0, because the steps stop before reaching it.
NOUGHT = 1e-9

# A shorter value may increase the mean square residual by this factor, since rounding hides the difference.
NEARLY = 1.1

# Starting exponents for the fit of a small value.
POWERS = np.arange(-13.0, 1.0)


def fitted(left: Left, *start: float) -> list[float]:
    """Minimize the squared residuals by Gauss-Newton steps from ``start``.

    Raises:
        ValueError: if the residuals are not finite or do not depend on a value.
    """
    numbers = np.array(start)
    for _ in range(ROUNDS):
        residuals = left(numbers).astype(np.float64)
        nudges = np.where(numbers == 0, NUDGE, -NUDGE * numbers)  # towards 0: a share of 1 must not grow
        slopes = [
            (residuals - left(numbers + nudge * unit).astype(np.float64)) / nudge
            for nudge, unit in zip(nudges, np.eye(len(numbers)), strict=True)
        ]
        if (
            not np.isfinite(residuals).all()
            or min(float(np.max(abs(s), initial=0.0)) for s in slopes) <= NEVER
        ):
            raise ValueError("a number that nothing depends on")
        change = np.linalg.lstsq(np.stack(slopes, axis=1), residuals, rcond=None)[0]
        numbers = numbers + change
        if (abs(change) <= SETTLED * abs(numbers)).all():
            break
    return [float(number) for number in numbers]


def power(left: Left) -> float:
    """Return the power of ten's exponent that minimizes squared residuals, or raise ``ValueError``."""
    squares = [np.nan_to_num(np.square(left(POWERS[[i]])).sum(), nan=np.inf) for i in range(len(POWERS))]
    (exponent,) = fitted(left, float(POWERS[int(np.argmin(squares))]))
    return min(max(exponent, float(POWERS[0])), float(POWERS[-1]))


def shortest(left: Left, number: float) -> float:
    """Round ``number`` to the fewest digits that hardly increase the residuals."""
    candidates = [float(f"{number:.{digits}g}") for digits in range(1, 10)]
    if abs(number) < NOUGHT:
        candidates.insert(0, 0.0)
    squares = [np.square(left(np.array([value]))).mean() for value in (*candidates, number)]
    return next(
        (value for value, square in zip(candidates, squares, strict=False) if square <= NEARLY * squares[-1]),
        number,
    )
