"""Position tables as figures: the table, and the product of two rows by their distance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from concord.spec import positions
from concord.spec.arrays import Array
from concord.spec.config import CHOICES, EncoderConfig
from concord.spec.errors import SpecError
from concord.training import figures

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


def forms(name: str, config: EncoderConfig, table: Array | None = None) -> list[Form]:
    """Return the table of a model, then every other form of a sinusoid of its size (SPEC POS-2, POS-3).

    Args:
        name: of the model.
        table: that of a checkpoint; None: the sinusoid of the configuration.

    Raises:
        SpecError: if the model learns its positions, and there are none.
    """
    learned, start = config.positions == "learned", config.position_start
    if learned and table is None:
        raise SpecError(f"{name} learns its positions: a CHECKPOINT has them")
    own = positions.sinusoid(config) if table is None else np.asarray(table, np.float64)
    found = [Form(f"{name}: learned" if learned else _named(name, config), own[start:])]
    for layout, exponent in itertools.product(CHOICES["position_layout"], CHOICES["position_exponent"]):
        if layout == "halves" and config.d_model % 2:
            continue
        other = config.replace(
            positions="sinusoidal",
            position_layout=layout,
            position_exponent=exponent,
            position_base=config.position_base or 10000.0,
        )
        if other != config:
            found.append(Form(_named("sinusoid", other), positions.sinusoid(other)[start:]))
    return found


def _named(name: str, config: EncoderConfig) -> str:
    start = ", from 1" if config.position_start else ""
    return f"{name}: {config.position_layout}, exponent by {config.position_exponent}{start}"


def figure(forms: Sequence[Form]) -> str:
    """Return a figure for a paper: table and products side by side.

    Raises:
        SpecError: if matplotlib is not installed.
    """

    def paint(made: Any) -> None:
        image, products = made.subplots(1, 2)
        first = forms[0]
        most = float(abs(first.table).max()) or 1.0
        look: dict[str, Any] = {"cmap": "PuOr_r", "aspect": "auto", "interpolation": "nearest"}
        shown = image.imshow(first.table, **look, vmin=-most, vmax=most)
        image.set(title=first.name, xlabel="column", ylabel="position")
        made.colorbar(shown, ax=image, shrink=0.8, pad=0.02)
        drawn: dict[bytes, list[Form]] = {}
        for form in forms:  # the layout only moves columns, and no product changes with it
            drawn.setdefault(np.round(form.products()[0], 6).tobytes(), []).append(form)
        for alike in drawn.values():
            last = max(len(alike[0].table) * 3 // 4, 2)  # of the farthest there are but few pairs
            mean, low, high = (of[:last] for of in alike[0].products())
            (line,) = products.plot(mean, label="\n".join(form.name for form in alike))
            products.fill_between(range(len(mean)), low, high, color=line.get_color(), alpha=0.15)
        products.set(title="product of two rows", xlabel="distance", ylabel="relative to distance 0")
        products.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        products.grid(True)

    return figures.draw(paint, 7.4, 3.2)


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
