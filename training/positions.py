"""Position tables as figures: columns, the table, and the product of two rows by their distance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec import positions
from concord.spec.config import CHOICES, EncoderConfig, variant
from concord.spec.parameters import Weights, initialize
from concord.spec.sources.table import POSITIONS
from concord.training import figures

Array = NDArray[np.floating]

FAR = (1, 2, 8, 32, 128)
"""Distances of which the product is said in numbers."""


@dataclass(frozen=True, eq=False)
class Form:
    """A table of positions.

    Attributes:
        name: what it is, in words.
        table: (P, D): the rows that tokens can have.
    """

    name: str
    table: Array

    def products(self) -> tuple[Array, Array, Array]:
        """Return mean, least and largest product of two rows by distance, relative to that at 0."""
        gram = self.table @ self.table.T
        rows = [np.diagonal(gram, distance) for distance in range(len(gram))]
        unit = rows[0].mean() or 1.0
        mean, least, most = (np.array([of(row) for row in rows]) / unit for of in (np.mean, np.min, np.max))
        return mean, least, most

    def half(self) -> int | None:
        """The first distance at which the mean product is below half of that at 0; None: there is none."""
        below = np.flatnonzero(self.products()[0] < 0.5)
        return int(below[0]) if below.size else None


def of_variant(name: str, seed: int = 0) -> list[Form]:
    """Return the table of a variant, then every other form of a sinusoid of its size (SPEC POS-2, POS-3).

    Args:
        seed: of a table that would be learned.

    Raises:
        SpecError: for an unknown variant.
    """
    config = variant(name)
    if config.positions == "sinusoidal":
        return _forms(config, name, positions.sinusoid(config))
    small = config.padded_by(0, vocab_size=2, num_layers=1, d_ff=1)
    return _forms(
        config, f"{name}: learned, as it is drawn before training", initialize(small, seed)[POSITIONS]
    )


def of_model(name: str, config: EncoderConfig, weights: Weights) -> list[Form]:
    """Return the table of a model, then every form that a sinusoid of its size may have.

    Args:
        name: of the model.
    """
    return _forms(
        config, f"{name}: learned" if config.positions == "learned" else name, _stored(weights, config)
    )


def _stored(weights: Weights, config: EncoderConfig) -> Array:
    return np.asarray(weights[POSITIONS], np.float64) if POSITIONS in weights else positions.sinusoid(config)


def _forms(config: EncoderConfig, name: str, table: Array) -> list[Form]:
    found = [Form(_named(config, name), table[config.position_start :])]
    for layout, exponent in itertools.product(CHOICES["position_layout"], CHOICES["position_exponent"]):
        if (layout, exponent) == (config.position_layout, config.position_exponent) or (
            layout == "halves" and config.d_model % 2
        ):
            continue
        other = config.replace(
            positions="sinusoidal",
            position_layout=layout,
            position_exponent=exponent,
            position_base=config.position_base or 10000.0,
        )
        found.append(Form(_named(other, "sinusoid"), positions.sinusoid(other)[config.position_start :]))
    return found


def _named(config: EncoderConfig, name: str) -> str:
    if config.positions == "learned":
        return name
    start = ", from 1" if config.position_start else ""
    return f"{name}: {config.position_layout}, exponent by {config.position_exponent}{start}"


def columns_of(table: Array) -> list[int]:
    """Return the columns that are drawn as curves: fast, middle and slow ones."""
    width = table.shape[1]
    places = {0, 1, width // 8, width // 8 + 1, width // 3, width // 2, width - 1}
    return sorted(place for place in places if place < width)


def figure(forms: Sequence[Form]) -> str:
    """Return a figure for a paper: curves, table and products side by side.

    Raises:
        SpecError: if matplotlib is not installed.
    """

    def paint(made: Any) -> None:
        curves, table, products = made.subplots(1, 3)
        _curves(curves, forms[0])
        _table(table, forms[0])
        _products(products, forms)

    return figures.draw(paint, 11.0, 3.2)


def _table(axes: Any, form: Form) -> None:
    most = float(abs(form.table).max()) or 1.0
    shown = axes.imshow(
        form.table, cmap="PuOr_r", aspect="auto", interpolation="nearest", vmin=-most, vmax=most
    )
    axes.set(title=form.name, xlabel="column", ylabel="position")
    axes.figure.colorbar(shown, ax=axes, shrink=0.8, pad=0.02)


def _curves(axes: Any, form: Form, most: int = 64) -> None:
    for place in columns_of(form.table):
        axes.plot(form.table[:most, place], label=f"column {place}")
    axes.set(title="some columns", xlabel="position", ylabel="value")
    axes.grid(True)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _products(axes: Any, forms: Sequence[Form]) -> None:
    drawn: dict[bytes, list[Form]] = {}
    for form in forms:  # the layout only moves columns, and no product changes with it
        drawn.setdefault(np.round(form.products()[0], 6).tobytes(), []).append(form)
    for alike in drawn.values():
        mean, least, most = alike[0].products()
        last = max(len(mean) * 3 // 4, 2)  # of the farthest there are but few pairs
        (line,) = axes.plot(mean[:last], label="\n".join(form.name for form in alike))
        axes.fill_between(range(last), least[:last], most[:last], color=line.get_color(), alpha=0.15)
    axes.set(title="product of two rows", xlabel="distance", ylabel="relative to distance 0")
    axes.grid(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))


def table_of(forms: Sequence[Form]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of what is said of each form in numbers."""
    far = [distance for distance in FAR if distance < min(len(form.table) for form in forms)]
    rows = []
    for form in forms:
        mean, least, most = form.products()
        half, span = form.half(), max((most - least)[: len(mean) // 2 + 1])
        at = [f"{mean[distance]:.3f}" for distance in far]
        rows.append([form.name, *at, "never" if half is None else str(half), f"{span:.2g}"])
    return ["form", *(f"at {distance}" for distance in far), "below half from", "range by place"], rows
