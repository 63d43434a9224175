"""Attention maps as a figure for a paper: one head with its tokens, or all heads small."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.errors import refuse
from concord.training import figures
from concord.training.attention.maps import LEAK, Array, Maps, ReadText

MASKED = "#cfccc4"
SQUARE = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]")
"""Signs of Chinese, Japanese and Korean, which stand upright below each other."""

WIDEST = 60
"""Tokens up to which each is named beside a map."""


def chosen(reading: ReadText, layer: int | None, head: int | None) -> tuple[list[int], list[int]]:
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
    """Return one head of each backend, and by how much two differ; of several heads, the weights.

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
    sides, shown = maps.sides, _shown(maps)
    axes = made.subplots(1, len(sides) + (len(sides) > 1), squeeze=False)[0]
    top = max(_top(maps, side.weights[layer, head]) for side in sides)
    for place, side in enumerate(sides):
        drawn = _weights(axes[place], maps, side.weights[layer, head], top)
        _name(axes[place], maps, f"{side.backend}\nlayer {layer}, head {head}", first=place == 0)
    made.colorbar(drawn, ax=axes[: len(sides)], shrink=0.75, pad=0.02)
    if len(sides) > 1:
        difference = np.where(shown, maps.difference()[layer, head], np.nan)
        most = float(np.max(abs(difference), where=np.isfinite(difference), initial=1.0))
        drawn = _image(axes[-1], difference, "PuOr_r", -most, most)
        _name(axes[-1], maps, f"{sides[0].backend} − {sides[1].backend}\nin tolerances", first=False)
        made.colorbar(drawn, ax=axes[-1], shrink=0.75, pad=0.02)


def _grid(made: Any, maps: Maps, layers: list[int], heads: list[int]) -> None:
    axes = made.subplots(len(layers), len(heads), squeeze=False)
    for (row, column), axis in np.ndenumerate(axes):
        weights = maps.sides[0].weights[layers[row], heads[column]]
        _weights(axis, maps, weights, _top(maps, weights))
        axis.set(xticks=[], yticks=[])
        if row == 0:
            axis.set_title(f"head {heads[column]}", fontsize=7)
        if column == 0:
            axis.set_ylabel(f"layer {layers[row]}", fontsize=7)


def _top(maps: Maps, weights: Array) -> float:
    return float(np.max(weights, where=_shown(maps), initial=0.0))


def _shown(maps: Maps) -> NDArray[np.bool_]:
    """Return which cells are shown, (T, T): of visible keys, and of queries that are not overwritten."""
    reading = maps.reading
    overwritten = any(name.endswith("masked_weights") for name in reading.names)
    return (reading.real | (not overwritten))[:, None] & reading.visible[None, :]


def _image(axis: Any, values: Array, colours: str, low: float, high: float) -> Any:
    axis.set_facecolor(MASKED)  # where there is no number
    return axis.imshow(values, cmap=colours, vmin=low, vmax=high, interpolation="nearest")


def _weights(axis: Any, maps: Maps, weights: Array, top: float) -> Any:
    """Draw weights from white to dark; what is masked, and nothing goes to, has a colour of its own."""
    attended = _shown(maps) | ((weights > LEAK) & (weights <= 1))
    return _image(axis, np.where(attended, weights, np.nan), "Blues", 0.0, top or 1.0)


def _name(axis: Any, maps: Maps, title: str, first: bool) -> None:
    names = maps.reading.tokens
    axis.set_title(title)
    places = range(0, len(names), 1 if len(names) <= WIDEST else 32)
    words = [names[place] if len(names) <= WIDEST else str(place) for place in places]
    size = 7 if len(names) <= 32 else 5
    stacked = ["\n".join(word) if SQUARE.search(word) else word for word in words]
    axis.set_xticks(list(places), stacked, fontsize=size)
    axis.set_yticks(list(places), words if first else [""] * len(places), fontsize=size)
    axis.tick_params(length=0)
    axis.xaxis.tick_top()
    for word, text in zip(words, axis.get_xticklabels(), strict=True):
        text.set_rotation(0 if SQUARE.search(word) else 90)
    for border in np.flatnonzero(np.diff(maps.reading.segments)) + 0.5:
        axis.axvline(border, color="black", linewidth=0.7)
        axis.axhline(border, color="black", linewidth=0.7)
