"""The pictures of the page, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from concord.spec.text import shortened

WIDTH = 640

COLOURS = 8
"""Colours of series that the page has."""


def bars(rows: Sequence[tuple[str, float, float, float, str, int]], label: str) -> Markup:
    """Draw bars with the range of the middle half of the turns, as a list whose text keeps its size on a
    narrow page.

    Args:
        rows: label, value, lower and upper end of the range, the figure in words, and the number of the
            colour.
    """
    longest = max((max(row[1], row[3]) for row in rows), default=0.0) or 1.0
    parts = []
    for name, value, low, high, words, colour in rows:
        width, start, end = (100 * x / longest for x in (value, low, high))
        line = f'<b style="left:{start:.2f}%;width:{end - start:.2f}%"></b>' if high > low else ""
        bar = f'<i class="f{colour % COLOURS}" style="width:{width:.2f}%"></i>{line}'
        parts.append(
            f'<li><span>{escape(shortened(name))}</span><span class="bar">{bar}</span><span '
            f'class="figure">{escape(shortened(words))}</span></li>'
        )
    return Markup(f'<ul class="bars" aria-label="{escape(shortened(label))}">{"".join(parts)}</ul>')


def loglog(
    series: Mapping[str, tuple[int, Sequence[tuple[float, float]]]],
    label: str,
    across: str,
    up: str,
    ceilings: Sequence[tuple[float, float, float, float]] = (),
    joined: bool = True,
) -> Markup:
    """Draw series on logarithmic scales.

    Args:
        series: name to the number of its colour and its points.
        across, up: what the axes are.
        ceilings: lines, as x and y of both ends.
        joined: whether the points of a series belong on a line.
    """
    points = [point for _, line in series.values() for point in line] + [
        (x, y) for a, b, c, d in ceilings for x, y in ((a, b), (c, d))
    ]
    (left, right), (bottom, top) = (_bounds([point[axis] for point in points]) for axis in (0, 1))
    height, margin = 300, 52

    def place(x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - margin - 16, height - margin - 12
        return margin + wide * (math.log10(x) - left) / (right - left), 12 + high * (top - math.log10(y)) / (
            top - bottom
        )

    parts = []
    for exponent in range(math.ceil(left), math.floor(right) + 1):
        x, y = place(10**exponent, 10**bottom)
        parts.append(
            f'<path d="M{x:.1f} 12V{y:.1f}" class="grid"/><text x="{x:.1f}" y="{y + 16:.1f}" '
            f'text-anchor="middle">{_power(exponent)}</text>'
        )
    for exponent in range(math.ceil(bottom), math.floor(top) + 1):
        x, y = place(10**left, 10**exponent)
        parts.append(
            f'<path d="M{x:.1f} {y:.1f}H{WIDTH - 16}" class="grid"/><text x="{x - 6:.1f}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_power(exponent)}</text>'
        )
    for a, b, c, d in ceilings:
        (x1, y1), (x2, y2) = place(a, b), place(c, d)
        parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="ceiling"/>')
    for name, (colour, line) in series.items():
        places = [place(x, y) for x, y in line]
        if joined:
            parts.append(
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" '
                f'class="c{colour % COLOURS}"/>'
            )
        for (x, y), (size, value) in zip(places, line, strict=True):
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" '
                f'class="f{colour % COLOURS}"><title>{escape(shortened(name))}: {size:g}, '
                f"{value:.3g}</title></circle>"
            )
    parts.append(
        f'<text x="{(margin + WIDTH) / 2}" y="{height - 6}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(
        f'<text x="14" y="{height / 2}" text-anchor="middle" transform="rotate(-90 14 '
        f'{height / 2})">{escape(up)}</text>'
    )
    return _svg(WIDTH, height, label, parts)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms between which all values lie, with a little room."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.06 * (high - low), 0.1)
    low, high = low - room, high + room
    # An axis without a single power of ten on it could not be read.
    return (min(low, math.floor(high)), high) if math.ceil(low) > math.floor(high) else (low, high)


def _power(exponent: int) -> str:
    return f"{10**exponent:g}" if -3 <= exponent <= 4 else f"1e{exponent}"


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(shortened(label))}">{"".join(parts)}</svg>'
    )
