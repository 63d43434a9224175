"""Statistics of timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# The largest spread, as a share of the median, of a steady measurement.
STEADY = 0.10

# Fewer steps do not show the spread: two similar steps may both have been disturbed.
LEAST = 5

# In a turn of at least this many steps, the first does not count, because other processes had filled the
# caches.
WARM = 3


def _counted(turns: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    return [turn[1:] if len(turn) >= WARM else turn for turn in turns]


def _medians(turns: Sequence[Sequence[float]]) -> list[float]:
    return sorted(statistics.median(turn) for turn in _counted(turns))


def median(turns: Sequence[Sequence[float]]) -> float:
    """Median of the turns' medians in seconds."""
    return statistics.median(_medians(turns))


def least(turns: Sequence[Sequence[float]]) -> float:
    """The shortest counted step in seconds."""
    return min(step for turn in _counted(turns) for step in turn)


def interval(turns: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Interquartile range of the turns' medians, in seconds."""
    medians = _medians(turns)
    if len(medians) < 4:
        return medians[0], medians[-1]
    lower, _, upper = statistics.quantiles(medians, n=4, method="inclusive")
    return lower, upper


def spread(turns: Sequence[Sequence[float]]) -> float | None:
    """Width of :func:`interval` relative to the median, or None for too few data."""
    if len(turns) < 2 or sum(map(len, _counted(turns))) < LEAST:
        return None
    low, high = interval(turns)
    return (high - low) / median(turns)


def settled(turns: Sequence[Sequence[float]]) -> bool:
    """Whether a measurement is steady."""
    width = spread(turns)
    return width is not None and width <= STEADY
