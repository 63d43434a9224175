"""Attention maps as a figure for a paper: one head with its tokens, or all heads small."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.errors import refuse
from concord.training import figures
from concord.training.attention.maps import LEAK, Array, Maps, Reading

MASKED = "#cfccc4"
WIDEST = 60
"""Tokens up to which each is named beside a map."""


def chosen(reading: Reading, layer: int | None, head: int | None) -> tuple[list[int], list[int]]:
    """Return the layers and heads of a figure.

    Raises:
        SpecError: if there is no such layer or head.
    """
    layers, heads = range(len(reading.names)), range(reading.config.num_heads)
    problems = [
        f"--{name} is {value} but must be from 0 to {len(there) - 1}"
        for name, value, there in (("layer", layer, layers), ("head", head, heads))
        if value is not None and value not in there
    ]
    refuse(problems)
    return list(layers if layer is None else [layer]), list(heads if head is None else [head])


def figure(maps: Maps, layer: int | None = None, head: int | None = None) -> str:
    """Return one head: the weights of each backend, and by how much two differ; of several heads, the weights.

    Args:
        layer, head: by number; None: all.

    Raises:
        SpecError: if there is no such layer or head, or matplotlib is not installed.
    """
    layers, heads = chosen(maps.reading, layer, head)
    if len(layers) == len(heads) == 1:
        panels = len(maps.sides) + (len(maps.sides) > 1)
        size = min(max(1.6 + 0.13 * len(maps.reading.tokens), 2.4), 6.5)
        width = panels * size + 0.7 * (panels > 1)
        return figures.draw(lambda made: _one(made, maps, layers[0], heads[0]), width, size)
    width, height = 0.75 * len(heads) + 0.6, 0.8 * len(layers) + 0.3
    return figures.draw(lambda made: _grid(made, maps, layers, heads), width, height)


def _one(made: Any, maps: Maps, layer: int, head: int) -> None:
    panels = len(maps.sides) + (len(maps.sides) > 1)
    axes = np.atleast_1d(made.subplots(1, panels))
    top = max(float(np.max(np.where(_shown(maps), side.weights[layer, head], 0.0))) for side in maps.sides)
    for place, side in enumerate(maps.sides):
        shown = _weights(axes[place], maps, side.weights[layer, head], top)
        _name(axes[place], maps, f"{side.backend}\nlayer {layer}, head {head}", first=place == 0)
    made.colorbar(shown, ax=axes[: len(maps.sides)], shrink=0.75, pad=0.02)
    if len(maps.sides) > 1:
        difference = maps.difference()[layer, head]
        most = max(
            float(np.max(np.abs(np.where(_shown(maps) & np.isfinite(difference), difference, 0.0)))), 1.0
        )
        drawn = axes[-1].imshow(
            np.where(_shown(maps), difference, np.nan),
            cmap=_colours("PuOr_r"),
            vmin=-most,
            vmax=most,
            interpolation="nearest",
        )
        _name(
            axes[-1],
            maps,
            f"{maps.sides[0].backend} − {maps.sides[1].backend}\nin tolerances",
            first=False,
        )
        made.colorbar(drawn, ax=axes[-1], shrink=0.75, pad=0.02)


def _grid(made: Any, maps: Maps, layers: list[int], heads: list[int]) -> None:
    axes = made.subplots(len(layers), len(heads), squeeze=False)
    for row, layer in zip(axes, layers, strict=True):
        for axis, head in zip(row, heads, strict=True):
            weights = maps.sides[0].weights[layer, head]
            _weights(axis, maps, weights, float(np.max(np.where(_shown(maps), weights, 0.0))))
            axis.set_xticks([])
            axis.set_yticks([])
            if layer == layers[0]:
                axis.set_title(f"head {head}", fontsize=7)
        row[0].set_ylabel(f"layer {layer}", fontsize=7)


def _shown(maps: Maps) -> NDArray[np.bool_]:
    """Return which cells have something to show: (T, T); keys that are visible, and queries whose weights have not been overwritten."""
    reading = maps.reading
    queries = (
        reading.real
        if reading.names and reading.names[0].endswith("masked_weights")
        else np.ones(len(reading.tokens), bool)
    )
    shown: NDArray[np.bool_] = queries[:, None] & reading.visible[None, :]
    return shown


def _colours(name: str) -> Any:
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(bad=MASKED)


def _weights(axis: Any, maps: Maps, weights: Array, top: float) -> Any:
    """Draw weights from white to dark; what is masked, and nothing goes to, has a colour of its own."""
    attended = _shown(maps) | ((weights > LEAK) & (weights <= 1))
    return axis.imshow(
        np.where(attended, weights, np.nan),
        cmap=_colours("Blues"),
        vmin=0,
        vmax=top or 1.0,
        interpolation="nearest",
    )


def _name(axis: Any, maps: Maps, title: str, first: bool) -> None:
    names = maps.reading.tokens
    axis.set_title(title)
    places = range(len(names)) if len(names) <= WIDEST else range(0, len(names), 32)
    words = names if len(names) <= WIDEST else [str(place) for place in places]
    size = 7 if len(names) <= 32 else 5
    axis.set_xticks(list(places), words, rotation=90, fontsize=size)
    axis.set_yticks(list(places), words if first else [""] * len(places), fontsize=size)
    axis.tick_params(length=0)
    axis.xaxis.tick_top()
    segments = np.array(maps.reading.segments)
    for border in np.flatnonzero(np.diff(segments)) + 0.5:
        axis.axvline(border, color=figures.INK, linewidth=0.7)
        axis.axhline(border, color=figures.INK, linewidth=0.7)
