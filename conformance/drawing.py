"""Small drawings for the page, as inline SVG: ``templates/drawings.html`` draws what is measured here."""

from __future__ import annotations

import functools
import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from concord.spec.text import shortened

FOLDER = Path(__file__).parent / "templates"

LEVELS = (0.03, 0.1, 0.3, 1.0, 10.0, 1e3, 1e6)
"""Upper ends of the levels of an error, in tolerances; the last level has none."""

WITHIN = 4
"""Levels up to one tolerance."""

HEIGHTS = (3, 5, 7, 9, 14, 14, 14, 14)
"""Height of a mark of each level.

What lies beyond its tolerance fills the strip, so that colour alone says nothing.
"""

CHART, BARS = 120, 60
"""Height of a line chart, and of a histogram."""

DECADES = (-3, 3)
"""The powers of ten, in tolerances, between which lines are drawn: what lies beyond lies at the edge."""

TICKS = [(round(100 * (DECADES[1] - i) / (DECADES[1] - DECADES[0]), 1), f"{10.0**i:g}") for i in range(-3, 4)]
"""Places, in percent from the top, and words of the powers of ten that are named."""


@functools.cache
def _drawings() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("drawings.html").module


def strips(
    blocks: Sequence[Sequence[Sequence[int | None]]],
    titles: Sequence[str],
    label: str,
    bounds: Sequence[int],
    first: Sequence[int | None],
) -> Markup:
    """Draw blocks of strips.

    Args:
        blocks: for each block, for each run, for each tensor a level; None where nothing was judged.
        titles: what each tensor's column says when pointed at.
        bounds: tensors before which a vertical line stands.
        first: for each run, the tensor that is framed as the first divergence.
    """
    rows = [row for block in blocks for row in ((), *block)]
    framed = [place for _ in blocks for place in (None, *first)]
    shown = [shortened(title) for title in titles]
    return Markup(_drawings().strips(rows, shown, shortened(label), bounds, framed, HEIGHTS))


def heat_levels(powers: Iterable[int | None]) -> tuple[int, ...]:
    """Return the powers of two, in tolerances, at which the levels of a heat map begin, but for the first.

    Up to a tolerance they are about those of :data:`LEVELS`; beyond, there are as many between the least and
    the largest.
    """
    over = [power for power in powers if power is not None and power >= 0]
    low, high = min(over, default=0), max(over, default=0)
    return (-4, -3, -1, 0, *(low + math.ceil((high + 1 - low) * step / WITHIN) for step in range(1, WITHIN)))


def heat_map(rows: Sequence[Sequence[int | None]], levels: Sequence[int], label: str) -> Markup:
    """Draw a cell for each power of two of an error in tolerances; neighbours of one level are one stroke.

    None is left blank.
    """
    strokes: dict[int, list[tuple[int, int, int]]] = {}
    for top, row in enumerate(rows):
        left = 0
        for found, run in groupby(None if power is None else bisect(levels, power) for power in row):
            length = len(list(run))
            if found is not None:
                strokes.setdefault(found, []).append((left, top, length))
            left += length
    return Markup(_drawings().heat(dict(sorted(strokes.items())), len(rows[0]), len(rows), shortened(label)))


def growth(lines: Sequence[Sequence[float | None]], label: str, bounds: Sequence[int]) -> Markup:
    """Draw a line for each run over the tensors: the error end to end, on a logarithmic scale.

    Args:
        lines: for each run, for each tensor the error in tolerances; None interrupts the line.
    """
    lowest, highest = (10.0**end for end in DECADES)

    def height(value: float) -> float:
        exponent = math.log10(min(max(value, lowest), highest))
        return round(CHART * (DECADES[1] - exponent) / (DECADES[1] - DECADES[0]), 1)

    heights = [[None if y is None or math.isnan(y) else height(y) for y in line] for line in lines]
    width = 2 * max(map(len, lines), default=1)
    grid = [CHART * place / 100 for place, _ in TICKS]
    return Markup(_drawings().growth(heights, width, shortened(label), bounds, grid, height(1.0)))


def histogram(filled: Sequence[int], outlined: Sequence[int], over: int, label: str) -> Markup:
    """Draw how many elements have an error in each bin, both on logarithmic scales.

    Args:
        filled, outlined: two counts for each bin: as bars, and as a line around bars.
        over: the first bin of errors that are not allowed.
    """
    largest = math.log10(1 + max([1, *filled, *outlined]))
    bars, around = (
        [round(BARS * (1 - 0.95 * math.log10(1 + count) / largest), 1) for count in counts]
        for counts in (filled, outlined if any(outlined) else ())
    )
    return Markup(_drawings().histogram(bars, around, over, shortened(label)))
