"""What a tensor shows of its cause by itself."""

from __future__ import annotations

import numpy as np

from concord.conformance import expectation
from concord.conformance.estimate import R, Z
from concord.conformance.expectation import Array

CLEAR = 5.0
"""How many times smaller an error must be under an explanation than without.

Chance makes smaller differences.
"""


LEAST = 0.1
"""How large an error must at least be, in sigma of the arithmetic that is to explain it.

A wide sigma would explain any smaller one.
"""


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
