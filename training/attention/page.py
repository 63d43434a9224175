"""The page of attention maps: one file that needs nothing else, drawn by its script.

Numbers of a layer are one text: codes, deflated, in base64. A code is a half (float16) or, of large maps, one
byte. Of all backends but the first, the codes of weights stand as they differ from the first's bit by bit.
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
from concord.conformance.layout import render
from concord.conformance.verdict import number
from concord.conformance.views import tail
from concord.training.attention.maps import LEAK, Array, Maps

TEMPLATES = Path(__file__).parents[1] / "templates"

FINE = 1 << 22
"""Cells of all maps of a backend up to which each number has two bytes."""

NONE = 255
"""The byte of a number that there is not, or that is no weight."""

LOWEST = -6
"""The power of two, in tolerances, of the smallest error but 0 in one byte; each step is the root of 2."""

ZERO = 127
"""The byte of no error: smaller ones are below 0, larger ones above."""


def page(maps: Maps) -> str:
    """Return attention maps as HTML."""
    reading, report = maps.reading, maps.report
    heads, tokens = reading.config.num_heads, len(reading.tokens)
    coarse = len(reading.names) * heads * tokens**2 > FINE
    names = [side.backend for side in maps.sides]
    largest = _largest(maps)
    tap = reading.names[0].rpartition(".")[2] if reading.names else "weights"
    about = {
        "tokens": reading.tokens,
        "segments": reading.segments,
        "visible": [int(one) for one in reading.visible],
        "layers": len(reading.names),
        "heads": heads,
        "coarse": coarse,
        "tap": tap,
        "sides": names,
        "leak": LEAK,
        "none": NONE,
        "lowest": LOWEST,
        "zero": ZERO,
        "start": _start(largest),
    }
    headings, rows = maps.table()
    return render(
        "attention.html",
        record.made(report, "attention", reading.title),
        TEMPLATES,
        script=(TEMPLATES / "attention.js").read_text(encoding="utf-8") if names else "",
        headline=_headline(maps, largest),
        compared=[_compared(maps, tap, coarse)],
        sections={
            **({"maps-of": "Maps", "heads": "Heads in numbers"} if names else {}),
            "verdicts": "Verdicts",
        },
        letters=string.ascii_lowercase[: max(reading.segments, default=0) + 1],
        about=about,
        coded=_coded(maps, coarse),
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


def _compared(maps: Maps, tap: str, coarse: bool) -> str:
    versions = ", ".join(
        f"{tail(name)} {about.get('version') or ''}".strip()
        for name, about in maps.report.environments.items()
    )
    dtype = next((result.dtype for result in maps.report.results), "")
    size = " Of maps this large a number has one byte on this page: about two digits." if coarse else ""
    looked = f"Looked at: {tap.replace('_', ' ')} of attention in {dtype}, by {versions or 'no backend'}."
    return f"{looked}{size}"


def _coded(maps: Maps, coarse: bool) -> list[tuple[list[str], list[str]]]:
    """Return the codes of weights and of errors of each backend, layer by layer."""
    found = []
    for place, side in enumerate(maps.sides):
        weights = []
        for layer, first in zip(side.weights, maps.sides[0].weights, strict=True):
            codes = codes_of_weights(layer, coarse)
            weights.append(_packed(codes ^ codes_of_weights(first, coarse) if place else codes))
        found.append((weights, [_packed(codes_of_errors(layer, coarse)) for layer in side.errors]))
    return found


def codes_of_weights(weights: Array, coarse: bool) -> NDArray[Any]:
    """Return the codes of weights: halves, or 254 times their root in a byte."""
    if not coarse:
        return _halves(weights)
    proper = (weights >= 0) & (weights <= 1 + 2.0**-7)
    return np.where(proper, np.rint(254 * np.sqrt(np.clip(weights, 0, 1))), NONE).astype(np.uint8)


def codes_of_errors(errors: Array, coarse: bool) -> NDArray[Any]:
    """Return the codes of signed errors: halves, or in a byte the sign and the logarithm."""
    if not coarse:
        return _halves(errors)
    with np.errstate(all="ignore"):
        steps = np.clip(np.rint(2 * (np.log2(abs(errors)) - LOWEST)) + 1, 0, ZERO)
    return np.where(np.isnan(errors), NONE, ZERO + np.sign(errors) * steps).astype(np.uint8)


def _halves(values: Array) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype("<f2").view("<u2")


def _packed(codes: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(codes.tobytes())).decode()
