"""What many timings say: the median, its spread, and whether it can be relied on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STEADY = 0.10
"""The largest spread, as a share of the median, of a measurement that is called steady."""

LEAST = 5
"""Steps that have to count before a spread says anything.

Two that lie close together may both have been disturbed.
"""

WARM = 3
"""A turn with at least so many steps begins with one that is not counted: another process had the caches."""


def _counted(turns: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    return [turn[1:] if len(turn) >= WARM else turn for turn in turns]


def _medians(turns: Sequence[Sequence[float]]) -> list[float]:
    return sorted(statistics.median(turn) for turn in _counted(turns) if turn)


def median(turns: Sequence[Sequence[float]]) -> float:
    """Return the median of the turns' medians, in seconds; NaN of nothing."""
    medians = _medians(turns)
    return statistics.median(medians) if medians else math.nan


def least(turns: Sequence[Sequence[float]]) -> float:
    """Return the shortest step that counts, in seconds: what the machine can do while nothing disturbs it.

    NaN of nothing.
    """
    return min((step for turn in _counted(turns) for step in turn), default=math.nan)


def interval(turns: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the range in which the middle half of the turns' medians lie, in seconds."""
    medians = _medians(turns)
    if len(medians) < 4:
        return min(medians, default=math.nan), max(medians, default=math.nan)
    lower, _, upper = statistics.quantiles(medians, n=4, method="inclusive")
    return lower, upper


def spread(turns: Sequence[Sequence[float]]) -> float | None:
    """Return the width of that range as a share of the median.

    None if but one turn counts, or fewer than :data:`LEAST` steps.
    """
    if len(turns) < 2 or sum(map(len, _counted(turns))) < LEAST:
        return None
    low, high = interval(turns)
    return (high - low) / median(turns)


def settled(turns: Sequence[Sequence[float]]) -> bool:
    """Whether a measurement is steady."""
    width = spread(turns)
    return width is not None and width <= STEADY
