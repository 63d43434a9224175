"""The page of attention maps: one file that needs nothing else, drawn by its script.

Numbers of a layer are one text: halves (float16), deflated, in base64. Of all backends but the first, weights
stand as their bits differ from those of the first.
"""

from __future__ import annotations

import base64
import string
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance import record
from concord.conformance.layout import render, tail
from concord.conformance.verdict import number
from concord.spec.arrays import Array
from concord.training.attention.maps import LEAK, Maps

TEMPLATES = Path(__file__).parents[1] / "templates"


def page(maps: Maps) -> str:
    """Return attention maps as HTML."""
    reading, report = maps.reading, maps.report
    names = [side.backend for side in maps.sides]
    largest = _largest(maps)
    tap = reading.names[0].rpartition(".")[2] if reading.names else "weights"
    about = {
        "tokens": reading.tokens,
        "segments": reading.segments,
        "visible": [int(one) for one in reading.visible],
        "layers": len(reading.names),
        "heads": reading.config.num_heads,
        "tap": tap,
        "sides": names,
        "leak": LEAK,
        "start": _start(largest),
    }
    headings, rows = maps.table()
    return render(
        "attention.html",
        record.made(report, "attention", reading.title),
        TEMPLATES,
        script=(TEMPLATES / "attention.js").read_text(encoding="utf-8") if names else "",
        headline=_headline(maps, largest),
        compared=[_compared(maps, tap)],
        sections={
            **({"maps-of": "Maps", "heads": "Heads in numbers"} if names else {}),
            "verdicts": "Verdicts",
        },
        letters=string.ascii_lowercase[: max(reading.segments, default=0) + 1],
        about=about,
        coded=_coded(maps),
        headings=headings[2:],
        rows=rows,
        maps=maps,
    )


def _largest(maps: Maps) -> Array:
    """Return the largest difference of the first two backends, or the error of one alone: (L, H)."""
    if not maps.sides:
        return np.zeros((0, 0))
    of = maps.difference() if len(maps.sides) > 1 else maps.sides[0].errors
    found: Array = np.fmax.reduce(abs(of), axis=(-2, -1))
    return found


def _start(largest: Array) -> tuple[int, int]:
    """Return layer and head to begin with: the worst of the first layer beyond a tolerance, else 0, 0."""
    beyond: list[int] = np.flatnonzero((largest > 1).any(-1)).tolist() if largest.size else []
    return (beyond[0], int(np.nanargmax(largest[beyond[0]]))) if len(beyond) else (0, 0)


def _headline(maps: Maps, largest: Array) -> str:
    """Say what is to be seen, in a sentence."""
    names = [side.backend for side in maps.sides]
    if not names:
        return "No attention weights were delivered."
    layers, heads = largest.shape
    size = (
        f"{layers} layer{'' if layers == 1 else 's'} of {heads} head{'' if heads == 1 else 's'} "
        f"over {len(maps.reading.tokens)} tokens"
    )
    wrong = [tail(result.backend) for result in maps.report.results if result.status == "diverges"]
    said = f" {', '.join(wrong)} diverge{'s' if len(wrong) == 1 else ''}." if wrong else ""
    if len(names) == 1:
        return f"Attention of {names[0]}: {size}.{said}"
    both = f"Attention of {names[0]} and {names[1]}: {size}"
    if np.isnan(largest).all():
        return f"{both}; what they differ by was not judged.{said}"
    layer, head = divmod(int(np.nanargmax(largest)), heads)
    most = f"{number(float(largest[layer, head]))} tolerances at most, in layer {layer}, head {head}"
    return f"{both}; they differ by {most}.{said}"


def _compared(maps: Maps, tap: str) -> str:
    versions = ", ".join(
        f"{tail(name)} {about.get('version') or ''}".strip()
        for name, about in maps.report.environments.items()
    )
    dtype = next((result.dtype for result in maps.report.results), "")
    return f"Looked at: {tap.replace('_', ' ')} of attention in {dtype}, by {versions or 'no backend'}."


def _coded(maps: Maps) -> list[tuple[list[str], list[str]]]:
    """Return the codes of weights and of errors of each backend, layer by layer."""
    found = []
    first = [halves(layer) for layer in maps.sides[0].weights] if maps.sides else []
    for place, side in enumerate(maps.sides):
        weights = [halves(layer) for layer in side.weights]
        if place:
            weights = [one ^ other for one, other in zip(weights, first, strict=True)]
        found.append(([_packed(one) for one in weights], [_packed(halves(one)) for one in side.errors]))
    return found


def halves(values: Array) -> NDArray[Any]:
    """Return the bits of numbers as float16."""
    with np.errstate(over="ignore"):
        return values.astype("<f2").view("<u2")


def _packed(codes: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(codes.tobytes())).decode()
