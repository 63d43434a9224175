"""What a tensor shows of its cause by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance import expectation
from concord.conformance.estimate import R, Z
from concord.conformance.explain.hypothesis import Hypothesis

Array = NDArray[np.floating]


CLEAR = 5.0
"""How many times smaller an error must be under an explanation than without.

Chance makes smaller differences.
"""


@dataclass(frozen=True)
class Reading:
    """What a tensor shows.

    Attributes:
        hypothesis: what it is a sign of.
        sure: whether it can be a sign of nothing else.
    """

    hypothesis: Hypothesis
    sure: bool


def reading(name: str, text: str, clause: str, sure: bool = True) -> Reading:
    """Return what a tensor shows."""
    return Reading(Hypothesis(name=name, text=text, clause=clause), sure)


def within(error: Array, sigma: Array) -> bool:
    """Return whether errors are rounding.

    Where sigma is not finite nothing is known, and what is nowhere known is not said to be.
    """
    known = np.isfinite(sigma) & np.ones_like(error, bool)
    if known.size and not known.any():
        return False
    error, sigma = error[known], np.broadcast_to(sigma, known.shape)[known]
    if not np.isfinite(error).all():
        return False
    scores = np.where(error != 0, abs(error) / sigma, 0.0)
    return bool(scores.max(initial=0.0) <= Z and root_mean_square(error) <= R * root_mean_square(sigma))


def clear(before: Array, left: Array, sigma: Array) -> bool:
    """Return whether what is left of an error is rounding, and much smaller than it was."""
    scores = [root_mean_square(np.where(error != 0, error / sigma, 0.0)) for error in (before, left)]
    return within(left, sigma) and scores[0] > 0 and scores[0] >= CLEAR * scores[1]


def root_mean_square(values: Array) -> float:
    """Return the root mean square of what is finite."""
    return expectation.root_mean_square(values[np.isfinite(values)])
