"""Location of a tensor's error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from concord.conformance.judging.estimate import Z
from concord.conformance.judging.expectation import JudgedProblem
from concord.conformance.record_fields import Count, Number, Power
from concord.spec.arrays import Array, Ids
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.parameters import parameters
from concord.spec.tensors import inputs, taps

# Powers of two, in tolerances, between which error sizes are distinguished.
SMALLEST, LARGEST = -12, 60

# Maximum rows and columns of a heat map.
GRID = (24, 48)

# Number of worst elements to keep.
MOST_ELEMENTS = 8


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a tensor, with its expected value and tolerance."""

    index: tuple[Count, ...]
    actual: Number
    expected: Number
    # Infinite if the value should not be finite.
    tolerance: Number

    @property
    def ratio(self) -> float:
        """Error in tolerances; infinite if incomparable."""
        ratio = abs(self.actual - self.expected) / self.tolerance if self.tolerance else math.inf
        return ratio if math.isfinite(ratio) and math.isfinite(self.tolerance) else math.inf


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Largest error over two axes of a tensor, in blocks."""

    axes: tuple[str, str]  # names of rows and columns; the first is empty for a single axis
    shape: tuple[Count, Count]
    # Power of two that the error reaches, in tolerances; from 0 on, it exceeds the tolerance. None: not
    # judged.
    levels: tuple[tuple[Power | None, ...], ...]

    def __post_init__(self) -> None:
        if len({len(row) for row in self.levels}) != 1 or not self.levels[0]:
            raise SpecError(
                f"the rows of a heat map of {' and '.join(filter(None, self.axes))} have "
                f"{sorted({len(row) for row in self.levels})} levels, but all must have the same number, at "
                "least 1"
            )


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Error along the axes of a tensor and at its worst elements."""

    maps: tuple[HeatMap, ...]  # over pairs of adjacent axes
    worst: tuple[Element, ...]  # in descending order


def break_down(
    actual: Array,
    value: Array,
    sigma: Array,
    scores: Array,
    axes: tuple[str, ...],
    rows: Ids | None = None,
) -> Breakdown:
    """Locate the error of a tensor.

    Args:
        scores: errors in sigma; NaN where not judged.
        rows: the given table rows, if not all.
    """
    levels = np.floor(np.log2(np.clip(scores / Z, 2.0**SMALLEST, 2.0**LARGEST)))
    return Breakdown(_maps(levels, axes), _worst(actual, value, sigma, scores, rows))


def _maps(levels: Array, axes: tuple[str, ...]) -> tuple[HeatMap, ...]:
    places = [place for place, size in enumerate(levels.shape) if size > 1]
    if len(places) == 1:
        return (_map(levels.reshape(1, -1), ("", axes[places[0]])),)
    return tuple(
        _map(
            np.fmax.reduce(levels, axis=tuple(set(range(levels.ndim)) - {*pair})),
            (axes[pair[0]], axes[pair[1]]),
        )
        for pair in pairwise(places)
    )


def _map(levels: Array, axes: tuple[str, str]) -> HeatMap:
    height, width = levels.shape
    for axis, limit in enumerate(GRID):
        size = levels.shape[axis]
        if size > limit:
            levels = np.fmax.reduceat(levels, np.arange(limit) * size // limit, axis=axis)
    return HeatMap(
        axes,
        (height, width),
        tuple(tuple(None if np.isnan(level) else int(level) for level in row) for row in levels),
    )


def _worst(actual: Array, value: Array, sigma: Array, scores: Array, rows: Ids | None) -> tuple[Element, ...]:
    flat = np.nan_to_num(scores.reshape(-1), nan=-1.0, posinf=np.inf)
    places = np.argpartition(-flat, min(MOST_ELEMENTS, flat.size) - 1)[:MOST_ELEMENTS]
    elements = []
    for place in sorted(places.tolist(), key=lambda place: (-flat[place], place)):
        index = tuple(int(i) for i in np.unravel_index(place, value.shape))
        element = (int(rows[index[0]]), *index[1:]) if rows is not None else index
        if flat[place] > 0:
            elements.append(
                Element(element, float(actual[index]), float(value[index]), Z * float(sigma[index]))
            )
    return tuple(elements)


@functools.lru_cache(maxsize=256)
def _axes(config: EncoderConfig, part: str) -> dict[str, str]:
    axes = {name: tap.shape for name, tap in taps(config, part).items()}
    axes |= {f"gradients.taps.{name}": shape for name, shape in axes.items()}
    axes |= {f"gradients.inputs.{name}": tensor.shape for name, tensor in inputs(config, part).items()}
    return axes | {
        f"gradients.{name}": parameter.shape for name, parameter in parameters(config, part).items()
    }


def axes_of(case: JudgedProblem, name: str, rank: int) -> tuple[str, ...]:
    """A tensor's axis names, or numbers for an unknown tensor."""
    axes = _axes(case.config, case.part).get(name, "").split()
    if len(axes) != rank:
        return tuple(f"axis {place}" for place in range(rank))
    if len(set(axes)) < rank:  # query and key, or input and output of a layer
        axes[-2:] = ["query", "key"] if axes[-1] == "tokens" else [f"{axes[-2]} in", f"{axes[-1]} out"]
    return tuple(axes)
