"""Small drawings for the page, as inline SVG without text.

Words stand beside them in HTML, where they keep their size.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from markupsafe import Markup, escape

from concord.spec.text import shortened

LEVELS = (0.03, 0.1, 0.3, 1.0, 10.0, 1e3, 1e6)
"""Upper ends of the levels of an error, in tolerances; the last level has none."""

WITHIN = 4
"""Levels up to one tolerance."""

ROW = 16
"""Height of a strip."""

HEIGHTS = (3, 5, 7, 9, 14, 14, 14, 14)
"""Height of a mark of each level.

What lies beyond its tolerance fills the strip, so that colour alone says nothing.
"""

CHART = 120
"""Height of a line chart."""

BARS = 60
"""Height of a histogram."""


def level(ratio: float, beyond: bool = False) -> int:
    """Return the level of an error.

    Args:
        beyond: whether it is known to lie beyond its tolerance, whatever was lost in rounding the ratio.
    """
    found = next((place for place, end in enumerate(LEVELS) if ratio <= end), len(LEVELS))
    return max(found, WITHIN) if beyond else found


def strips(
    blocks: Sequence[Sequence[Sequence[int | None]]],
    titles: Sequence[str],
    label: str,
    bounds: Sequence[int],
    first: Sequence[int | None],
) -> Markup:
    """Draw blocks of strips.

    A mark for each tensor, a strip for each run, and an empty strip over each block.

    Args:
        blocks: for each block, for each run, for each tensor a level; None where nothing was judged.
        titles: what each tensor's column says when pointed at.
        bounds: tensors before which a vertical line stands.
        first: for each run, the tensor that is framed as the first divergence.
    """
    width, height = 2 * len(titles), ROW * sum(len(block) + 1 for block in blocks)
    marks: dict[str, list[str]] = {}
    frames = []
    top = 0
    for block in blocks:
        top += ROW
        for row, framed in zip(block, first, strict=True):
            for place, found in enumerate(row):
                name, size = ("n", 2) if found is None else (f"l{found}", HEIGHTS[found])
                marks.setdefault(name, []).append(f"M{2 * place + 1} {top + ROW - 1}v-{size}")
            if framed is not None:
                frames.append(f"M{2 * framed} {top + 0.5}h2v{ROW - 1}h-2z")
            top += ROW
    paths = [f'<path class="{name}" d="{"".join(places)}"/>' for name, places in sorted(marks.items())]
    paths.append(_bounds(bounds, height))
    paths += [f'<path class="first" d="{"".join(frames)}"/>'] if frames else []
    columns = (
        f'<rect x="{2 * place}" width="2" height="{height}"><title>{escape(shortened(title))}</title></rect>'
        for place, title in enumerate(titles)
    )
    return _svg("strips", width, height, label, [*paths, '<g class="over">', *columns, "</g>"])


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
    marks: dict[str, list[str]] = {}
    for top, row in enumerate(rows):
        left = 0
        for name, run in groupby(None if found is None else bisect(levels, found) for found in row):
            size = len(list(run))
            if name is not None:
                marks.setdefault(f"l{name}", []).append(f"M{left} {top}.5h{size}")
            left += size
    return _svg(
        "heat",
        len(rows[0]),
        len(rows),
        label,
        [f'<path class="{name}" d="{"".join(places)}"/>' for name, places in sorted(marks.items())],
    )


def _bounds(bounds: Sequence[int], height: int) -> str:
    return f'<path class="bound" d="{"".join(f"M{2 * place} 0v{height}" for place in bounds)}"/>'


def _svg(name: str, width: int, height: int, label: str, content: Sequence[str]) -> Markup:
    """Return an image that is stretched to the room that it is given."""
    opening = (
        f'<svg class="{name}" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(shortened(label))}">'
    )
    return Markup(opening + "".join(content) + "</svg>")  # everything foreign was escaped


def decades(lines: Sequence[Sequence[float | None]]) -> tuple[int, int]:
    """Return the powers of ten between which lines are drawn; the largest float is above all."""
    exponents = [
        math.log10(value) for line in lines for value in line if value is not None and 0 < value < math.inf
    ]
    endless = any(value == math.inf for line in lines for value in line)
    lowest = max(-4, math.floor(min(exponents, default=-2)))
    highest = min(20, math.ceil(max(exponents, default=0)))
    return min(lowest, -2), max(highest + endless, 1)


def growth(lines: Sequence[Sequence[float | None]], label: str, bounds: Sequence[int]) -> Markup:
    """Draw a line for each run over the tensors: the error end to end, on a logarithmic scale.

    Args:
        lines: for each run, for each tensor the error in tolerances; None interrupts the line.
    """
    lowest, highest = decades(lines)
    width = 2 * max((len(line) for line in lines), default=1)
    limit = _height(1.0, lowest, highest)
    content = [
        f'<path class="grid" '
        f'd="{"".join(f"M0 {CHART * place / 100:g}h{width}" for place, _ in ticks(lowest, highest))}"/>'
    ]
    content += [_bounds(bounds, CHART), f'<path class="limit" d="M0 {limit:g}h{width}"/>']
    for place, line in enumerate(lines):
        data = "".join(_segments(line, lowest, highest))
        content += [f'<path class="line s{place % 8}" d="{data}"/>'] if data else []
    return _svg("growth", width, CHART, label, content)


def _segments(line: Sequence[float | None], lowest: int, highest: int) -> Iterator[str]:
    """Yield the steps of a path; one that is interrupted begins anew, with a dot if it is a point alone."""
    drawing = False
    for place, value in enumerate(line):
        if value is None or math.isnan(value):
            drawing = False
            continue
        yield (
            f"{'L' if drawing else 'M'}{2 * place + 1} "
            f"{_height(value, lowest, highest):g}{'' if drawing else 'h0'}"
        )
        drawing = True


def _height(value: float, lowest: int, highest: int) -> float:
    exponent = math.log10(value) if 0 < value < math.inf else lowest if value <= 0 else highest
    return round(CHART * (1 - (min(max(exponent, lowest), highest) - lowest) / (highest - lowest)), 1)


def ticks(lowest: int, highest: int, most: int = 5) -> list[tuple[float, str]]:
    """Return the places, in percent from the top, and words of the powers of ten to be named.

    1 is always among them.
    """
    step = max(1, math.ceil((highest - lowest) / most))
    named = [i for i in range(lowest, highest + 1) if i % step == 0]
    return [(round(100 * (highest - i) / (highest - lowest), 1), _power(i)) for i in named]


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"1e{exponent}"


def histogram(
    filled: Sequence[int], outlined: Sequence[int], edges: Sequence[float], limit: float, label: str
) -> Markup:
    """Draw how many elements have an error in each bin, both on logarithmic scales.

    Args:
        filled, outlined: two counts for each bin: as bars, and as a line around bars.
        edges: between the bins; the first bin lies below the first edge and the last above the last.
        limit: where the error ends that is allowed.
    """
    largest = math.log10(1 + max([1, *filled, *outlined]))

    def top(count: int) -> float:
        return round(BARS * (1 - 0.95 * math.log10(1 + count) / largest), 1)

    lower = [0.0, *edges]
    bars: dict[str, list[str]] = {"bar": [], "bar over": []}
    for place, count in enumerate(filled):
        if count:
            bars["bar over" if lower[place] >= limit else "bar"].append(
                f"M{10 * place + 1} {BARS}V{top(count):g}h8V{BARS}z"
            )
    outline = (
        f"M0 {BARS}" + "".join(f"V{top(count):g}h10" for count in outlined) + f"V{BARS}"
        if any(outlined)
        else ""
    )
    at = 10 * position(limit, edges)
    content = [f'<path class="{name}" d="{"".join(data)}"/>' for name, data in bars.items() if data]
    content += [f'<path class="outline" d="{outline}"/>'] if outline else []
    content += [
        f'<path class="limit" d="M{at:g} 0V{BARS}"/>',
        f'<path class="axis" d="M0 {BARS}h{10 * (len(edges) + 1)}"/>',
    ]
    return _svg("histogram", 10 * (len(edges) + 1), BARS, label, content)


def position(value: float, edges: Sequence[float]) -> float:
    """Return where a value lies on the axis of a histogram, in bins from its left end."""
    for place, (low, high) in enumerate(pairwise(edges)):
        if low <= value <= high:
            return place + 1 + math.log(value / low) / math.log(high / low)
    return 0.5 if not edges or value < edges[0] else len(edges) + 0.5
