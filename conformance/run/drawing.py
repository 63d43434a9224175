"""Geometry of the charts in ``templates/drawings.html``."""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from concord.conformance.judging.breakdown import Breakdown, HeatMap
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.verdict import BINS, Z_BINS, Row, number
from concord.spec.text import first_of

# Upper bounds of error levels, in tolerances; the last level is unbounded.
LEVELS = (0.03, 0.1, 0.3, 1.0, 10.0, 1e3, 1e6)

# Number of levels up to one tolerance.
WITHIN = 4

# Maximum number of ranges in a label.
MOST_RANGES = 6

# Heights of line charts and histograms.
CHART, BARS = 120, 60

# Range of a line chart in powers of ten of a tolerance; values beyond are drawn at the edge.
DECADES = (-3, 3)

# Position of each label in percent from the top, and its text.
TICKS = [(round(100 * (DECADES[1] - i) / (DECADES[1] - DECADES[0]), 1), f"{10.0**i:g}") for i in range(-3, 4)]


def level(row: Row, way: str) -> int | None:
    """A tensor's error level, or the last one if incomparable."""
    judgement = row.judged(way)
    if judgement is None:
        return len(LEVELS) if row.status == "diverges" and row.deciding is None else None
    reached = bisect_left(LEVELS, judgement.ratio)
    # The ratio is rounded, perhaps to 1, but a divergence is always drawn beyond one tolerance.
    return max(reached, WITHIN) if row.status == "diverges" and judgement is row.deciding else reached


def growth(lines: Sequence[Sequence[float | None]], label: str, bounds: Sequence[int] = ()) -> dict[str, Any]:
    """A logarithmic line chart of errors.

    Args:
        lines: errors in tolerances; None interrupts a line.
    """
    lowest, highest = (10.0**end for end in DECADES)

    def height(value: float) -> float:
        exponent = math.log10(min(max(value, lowest), highest))
        return round(CHART * (DECADES[1] - exponent) / (DECADES[1] - DECADES[0]), 1)

    return {
        "lines": [[None if y is None or math.isnan(y) else height(y) for y in line] for line in lines],
        "width": 2 * max(map(len, lines), default=1),
        "label": label,
        "bounds": bounds,
        "grid": [CHART * place / 100 for place, _ in TICKS],
        "limit": height(1.0),
    }


def summed(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Add histograms."""
    return [sum(column) for column in zip([0] * BINS, *histograms, strict=True)]


def histogram(filled: Sequence[int], outlined: Sequence[int], whose: str) -> dict[str, Any]:
    """A logarithmic histogram of errors in sigma, as bars and an outline."""
    below, over = Z_BINS.index(1.0) + 1, Z_BINS.index(Z) + 1
    elements, beyond = sum(filled), sum(filled[over:])
    largest = math.log10(1 + max([1, *filled, *outlined]))
    bars, around = (
        [round(BARS * (1 - 0.95 * math.log10(1 + count) / largest), 1) for count in counts]
        for counts in (filled, outlined if any(outlined) else ())
    )
    return {
        "elements": elements,
        "below": sum(filled[:below]),
        "beyond": beyond,
        "at": round(100 * over / len(filled), 1),
        "one": round(100 * below / len(filled), 1),
        "filled": bars,
        "outlined": around,
        "over": over,
        "label": f"{whose}: errors of {elements} elements in sigma; {beyond} beyond {Z:g}",
    }


def heat_maps(breakdown: Breakdown) -> dict[str, Any]:
    """A breakdown's maps and their scale."""
    powers = [
        power for by_level in breakdown.maps for row in by_level.levels for power in row if power is not None
    ]
    beyond = [power for power in powers if power >= 0]
    low, high = min(beyond, default=0), max(beyond, default=0)
    # About LEVELS up to one tolerance, and as many levels up to the maximum.
    steps = (low + math.ceil((high + 1 - low) * step / WITHIN) for step in range(1, WITHIN))
    levels = (-4, -3, -1, 0, *steps)
    starts = [number(2.0 ** (power or low)) for power in levels]
    return {
        "maps": [_heat_map(by_level, levels) for by_level in breakdown.maps],
        "scale": [
            (level, f"from {starts[level - 1]}" if level else f"below {starts[0]}")
            for level in sorted({bisect(levels, power) for power in powers})
        ],
    }


def _heat_map(heat: HeatMap, levels: Sequence[int]) -> dict[str, Any]:
    rows, columns = size = len(heat.levels), len(heat.levels[0])
    starts = [
        [place * length // cells for place in range(cells)]
        for length, cells in zip(heat.shape, size, strict=True)
    ]
    beyond = [
        (i, j)
        for i, row in enumerate(heat.levels)
        for j, power in enumerate(row)
        if power is not None and power >= 0
    ]
    words = [
        f"{name} {_ranges(sorted({starts[axis][place[axis]] for place in beyond}))}"
        for axis, name in enumerate(heat.axes)
        if name and beyond
    ]
    return {
        "axes": heat.axes,
        "shape": heat.shape,
        "rows": rows,
        "columns": columns,
        "labels": starts[0] if heat.axes[0] else [],
        "reduced": size != heat.shape,
        "words": "no single element exceeds its tolerance"
        if not beyond
        else "beyond tolerance everywhere"
        if len(beyond) == rows * columns
        else f"beyond tolerance at {'; '.join(words)}",
        "strokes": _strokes(heat.levels, levels),
        "label": f"Largest error over {' and '.join(filter(None, heat.axes))}, in tolerances",
    }


def _strokes(
    rows: Sequence[Sequence[int | None]], levels: Sequence[int]
) -> dict[int, list[tuple[int, int, int]]]:
    """Runs of equal cells, by level: left, top, length."""
    strokes: dict[int, list[tuple[int, int, int]]] = {}
    for top, row in enumerate(rows):
        left = 0
        for level_of_run, run in groupby(None if power is None else bisect(levels, power) for power in row):
            length = len(list(run))
            if level_of_run is not None:
                strokes.setdefault(level_of_run, []).append((left, top, length))
            left += length
    return dict(sorted(strokes.items()))


def _ranges(places: list[int]) -> str:
    runs = [
        [place for _, place in run]
        for _, run in groupby(enumerate(places), lambda numbered: numbered[1] - numbered[0])
    ]
    return first_of([f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], MOST_RANGES)
