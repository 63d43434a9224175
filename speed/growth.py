"""How cost grows with one size: the exponent that fits best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

POINT = re.compile(r"(?P<preset>\S+) (?P<axis>\w+)=(?P<size>[1-9]\d{0,15})")
"""What a preset of a sweep is called."""


def curves(data: Mapping[str, Any]) -> dict[tuple[str, str, str, str], list[tuple[int, float]]]:
    """Return the points (size, seconds) of each sweep in a record, by preset with kind and lengths, axis,
    backend and mode.
    """
    found: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    for entry in data["entries"]:
        work = data["workloads"][entry["workload"]]
        point = POINT.fullmatch(work["preset"])
        if point and entry["summary"]:
            name = f"{point['preset']} {work['kind']} {work['padding']}"
            found.setdefault((name, point["axis"], entry["backend"], entry["mode"]), []).append(
                (int(point["size"]), entry["summary"]["median_seconds"])
            )
    return {key: sorted(points) for key, points in found.items() if len({size for size, _ in points}) > 1}


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the line that fits the logarithms best: 1 is linear growth, 2 quadratic."""
    xs, ys = [math.log(size) for size, _ in points], [math.log(seconds) for _, seconds in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
