"""Attention maps as data: what ``--json`` writes and what the page is made from.

Numbers of a layer are one text: codes, deflated, in base64. A code is a half (float16) or, of large maps, one byte. Of all sides but the first
the codes of weights stand as they differ from the first's bit by bit: nearly nothing where backends agree.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance import codec, record
from concord.conformance.campaign import exit_code_of
from concord.conformance.verdict import Result
from concord.spec.errors import refuse
from concord.training.attention.maps import LEAK, Array, Maps

KIND = "attention"

FINE = 1 << 22
"""Cells of all maps of a side up to which each number has two bytes."""

NONE = 255
"""The byte of a number that there is not, or that is no weight."""

LOWEST = -6
"""The power of two, in tolerances, that the smallest error but 0 stands for, where it has one byte; each further one is larger by the root of 2."""

Segment = Annotated[int, codec.Between(-1, 25)]
"""Of a token; of padding -1."""

ZERO = 127
"""The byte of no error: smaller ones are below 0, larger ones above."""


@dataclass(frozen=True)
class Verdict:
    """What became of a run: of which backend, its status, the largest error in tolerances, and what the judge said."""

    backend: str
    status: str
    worst: float
    said: str


@dataclass(frozen=True)
class Coded:
    """The maps of a backend: a text for each layer."""

    backend: str
    weights: list[str]
    errors: list[str]


@dataclass(frozen=True)
class Measure:
    """What is said of a head in numbers (:func:`measures`)."""

    layer: int
    head: int
    entropy: float
    masked: float
    shares: list[list[float]]
    errors: list[float]
    difference: float | None = None


@dataclass(frozen=True)
class Stored:
    """What a record of maps holds besides what every record has (docs/guides/looking.md)."""

    exit_code: int
    seconds: float
    dtype: str
    tap: str
    tokens: list[str]
    segments: list[Segment]
    visible: list[int]
    layers: int
    heads: int
    coarse: bool
    sides: list[Coded]
    results: list[Verdict]
    versions: dict[str, str | None]
    measures: list[Measure]
    notes: list[str]


def check(data: Mapping[str, Any]) -> None:
    """Refuse data that no page can be made of.

    Raises:
        SpecError: listing where it departs from :class:`Stored`, or contradicts itself.
    """
    found: Stored = codec.understood(Stored, data)
    cells = [
        (layer, head)
        for layer in range(found.layers if found.sides else 0)
        for head in range(min(found.heads, len(found.measures) + 1))
    ]
    wrong = [
        f"{name} has {len(column)} entries but must have one for each of {len(found.tokens)} tokens"
        for name, column in (("segments", found.segments), ("visible", found.visible))
        if len(column) != len(found.tokens)
    ]
    wrong += [
        f"sides[{i}] must have a text for each of {found.layers} layers"
        for i, side in enumerate(found.sides)
        if {len(side.weights), len(side.errors)} != {found.layers}
    ]
    wrong += (
        ["measures must have one entry for each head of each layer"]
        if [(one.layer, one.head) for one in found.measures] != cells
        else []
    )
    number = max(found.segments, default=0) + 1
    for i, one in enumerate(found.measures):
        fits = (
            len(one.errors) == len(found.sides)
            and [len(row) for row in one.shares] == [number] * number
            and (one.difference is None) == (len(found.sides) < 2)
        )
        wrong += (
            [] if fits else [f"measures[{i}] does not fit {len(found.sides)} sides and {number} segments"]
        )
    record.confirm(data, exit_code_of((one.backend, one.status) for one in found.results))
    refuse(wrong[: codec.MOST_PROBLEMS])


def as_data(maps: Maps) -> dict[str, Any]:
    """Return maps as JSON data."""
    reading, report = maps.reading, maps.report
    layers, heads, tokens = len(reading.names), reading.config.num_heads, len(reading.tokens)
    coarse = layers * heads * tokens**2 > FINE
    body = {
        "exit_code": report.exit_code,
        "seconds": report.seconds,
        "dtype": next((result.dtype for result in report.results), ""),
        "tap": reading.names[0].rpartition(".")[2] if layers else "weights",
        "tokens": list(reading.tokens),
        "segments": reading.segments,
        "visible": [int(one) for one in reading.visible],
        "layers": layers,
        "heads": heads,
        "coarse": coarse,
        "sides": _sides(maps, coarse),
        "results": [
            {"backend": result.backend, "status": result.status, "worst": result.worst, "said": _said(result)}
            for result in report.results
        ],
        "versions": {name: about.get("version") for name, about in report.environments.items()},
        "measures": measures(maps),
        "notes": list(maps.notes),
    }
    return record.record(body, KIND, reading.title)


def _said(result: Result) -> str:
    return str(result.verdict) if result.verdict else result.detail


def _sides(maps: Maps, coarse: bool) -> list[dict[str, Any]]:
    """Return the codes of every side, layer by layer."""
    found = []
    for number, side in enumerate(maps.sides):
        weights = []
        for layer, first in zip(side.weights, maps.sides[0].weights, strict=True):
            codes = codes_of_weights(layer, coarse)
            weights.append(_packed(codes ^ codes_of_weights(first, coarse) if number else codes))
        found.append(
            {
                "backend": side.backend,
                "weights": weights,
                "errors": [_packed(codes_of_errors(layer, coarse)) for layer in side.errors],
            }
        )
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


def measures(maps: Maps) -> list[dict[str, Any]]:
    """Return what is said of each head in numbers.

    Of the first side, over queries that are no padding: ``entropy``, the mean in bits; ``masked``, the share of masked keys; ``shares``, of the
    keys of each segment, for the queries of each; ``errors``, the largest of each side, in tolerances; ``difference``, the largest of the first two.
    """
    if not maps.sides:
        return []
    reading, weights = maps.reading, maps.sides[0].weights.astype(np.float64)
    real, segments, visible = reading.real, np.array(reading.segments), reading.visible
    with np.errstate(all="ignore"):
        entropy = -np.sum(np.where(weights > 0, weights * np.log2(weights), 0.0), axis=-1)[..., real].mean(-1)
    masked = weights[..., real, :][..., ~visible].sum(-1).mean(-1)
    number = segments.max() + 1
    shares = [
        [weights[:, :, segments == i][..., segments == j].sum(-1).mean(-1) for j in range(number)]
        for i in range(number)
    ]
    errors = [_largest(side.errors) for side in maps.sides]
    difference = _largest(maps.difference()) if len(maps.sides) > 1 else None
    return [
        {
            "layer": layer,
            "head": head,
            "entropy": float(entropy[layer, head]),
            "masked": float(masked[layer, head]) if masked[layer, head] > LEAK else 0.0,
            "shares": [[float(share[layer, head]) for share in row] for row in shares],
            "errors": [float(one[layer, head]) for one in errors],
            **({"difference": float(difference[layer, head])} if difference is not None else {}),
        }
        for layer in range(weights.shape[0])
        for head in range(weights.shape[1])
    ]


def _largest(errors: Array) -> Array:
    """Return the largest error of each head: (L, H); NaN where nothing is determined."""
    found: Array = np.fmax.reduce(abs(errors), axis=(-2, -1))
    return found
