"""Position tables as pictures: curves of some columns, the table itself, and how the product of two rows falls with their distance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance import drawing, record
from concord.conformance.layout import render
from concord.spec import positions
from concord.spec.config import CHOICES, EncoderConfig, variant
from concord.spec.parameters import Weights, initialize
from concord.spec.sources.table import POSITIONS
from concord.training import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.floating]

GRID = (64, 256)
"""Rows and columns of the table on the page."""

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
        """Return the products of two rows by their distance, from 0: mean, least and largest over all pairs, as shares of the mean at distance 0."""
        gram = self.table @ self.table.T
        rows = [np.diagonal(gram, distance) for distance in range(len(gram))]
        unit = rows[0].mean() or 1.0
        mean, least, most = (np.array([of(row) for row in rows]) / unit for of in (np.mean, np.min, np.max))
        return mean, least, most

    def half(self) -> int | None:
        """The first distance from which on the mean product is below half of that at 0; None: there is none."""
        below = np.flatnonzero(self.products()[0] < 0.5)
        return int(below[0]) if below.size else None


def of_variant(name: str, seed: int = 0) -> list[Form]:
    """Return the table of a variant, then every other form that a sinusoid of its size may have (SPEC POS-2, POS-3).

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


# Pictures.


def columns_of(table: Array) -> list[int]:
    """Return the columns that are drawn as curves: fast, middle and slow ones."""
    width = table.shape[1]
    return sorted(
        {
            place
            for place in (0, 1, width // 8, width // 8 + 1, width // 3, width // 2, width - 1)
            if place < width
        }
    )


def figure(forms: Sequence[Form]) -> Figure:
    """Return a figure for a paper: curves, table and products side by side.

    Raises:
        SpecError: if matplotlib is not installed.
    """

    def paint(made: Any) -> None:
        axes = made.subplots(1, 3)
        _curves(axes[0], forms[0])
        shown = axes[1].imshow(
            forms[0].table, cmap="PuOr_r", aspect="auto", interpolation="nearest", **_ends(forms[0].table)
        )
        axes[1].set(title=forms[0].name, xlabel="column", ylabel="position")
        made.colorbar(shown, ax=axes[1], shrink=0.8, pad=0.02)
        _products(axes[2], forms)

    return figures.draw(paint, 11.0, 3.2, [form.name for form in forms])


def _ends(table: Array) -> dict[str, float]:
    most = float(abs(table).max()) or 1.0
    return {"vmin": -most, "vmax": most}


def _curves(axes: Axes, form: Form, most: int = 64) -> None:
    names = [f"column {place}" for place in columns_of(form.table)]
    for (name, (colour, line)), place in zip(
        figures.sequence(names).items(), columns_of(form.table), strict=True
    ):
        axes.plot(form.table[:most, place], color=colour, linestyle=line, linewidth=1.2, label=name)
    axes.set(title="some columns", xlabel="position", ylabel="value")
    axes.grid(True)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _products(axes: Axes, forms: Sequence[Form]) -> None:
    drawn: dict[bytes, list[Form]] = {}
    for form in forms:  # the layout only moves columns, and no product changes with it
        drawn.setdefault(np.round(form.products()[0], 6).tobytes(), []).append(form)
    names = ["\n".join(form.name for form in alike) for alike in drawn.values()]
    for (name, (colour, line)), (form, *_) in zip(
        figures.sequence(names).items(), drawn.values(), strict=True
    ):
        mean, least, most = form.products()
        last = max(len(mean) * 3 // 4, 2)  # of the farthest there are but few pairs
        axes.fill_between(range(last), least[:last], most[:last], color=colour, alpha=0.15, linewidth=0)
        axes.plot(mean[:last], color=colour, linestyle=line, linewidth=1.3, label=name)
    axes.axhline(0.0, color=figures.MUTED, linewidth=0.6)
    axes.set(title="product of two rows", xlabel="distance", ylabel="share of that at distance 0")
    axes.grid(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))


def table_of(forms: Sequence[Form]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of what is said of each form in numbers."""
    far = [distance for distance in FAR if distance < min(len(form.table) for form in forms)]
    rows = []
    for form in forms:
        mean, least, most = form.products()
        half = form.half()
        rows.append(
            [
                form.name,
                *(f"{mean[distance]:.3f}" for distance in far),
                "never" if half is None else str(half),
                f"{max((most - least)[: len(mean) // 2 + 1]):.2g}",
            ]
        )
    return ["form", *(f"at {distance}" for distance in far), "below half from", "range by place"], rows


def shown_columns(width: int) -> NDArray[np.int64]:
    """Return the columns of the table on the page: all, or pairs of neighbours from all over it, since every second one is a sine."""
    if width <= GRID[1]:
        return np.arange(width)
    pairs = np.linspace(0, (width - 2) // 2, GRID[1] // 2).astype(np.int64)
    return np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1)


def page(forms: Sequence[Form], title: str) -> str:
    """Return the page of position tables.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    first = forms[0].table
    rows, columns = np.arange(min(len(first), GRID[0])), shown_columns(first.shape[1])
    most = _ends(first)["vmax"]
    levels = np.clip(np.floor((first[np.ix_(rows, columns)] / most + 1) * 4), 0, 7).astype(int)
    headings, numbers = table_of(forms)
    half = forms[0].half()
    data: Mapping[str, Any] = record.record({"exit_code": 0}, "positions", title)
    return render(
        "positions.html",
        data,
        Path(__file__).parent / "templates",
        headline=f"{forms[0].name}: the product of two positions falls below half from a distance of {half} on."
        if half
        else f"{forms[0].name}: the product of two positions never falls below half.",
        tone="good",
        compared=[f"{first.shape[0]} positions of {first.shape[1]} columns, in float64."],
        sections={"curves": "Curves and products", "table": "The table", "numbers": "In numbers"},
        curves=figures.inline(
            figures.draw(lambda made: _curves(made.subplots(), forms[0]), 3.9, 3.3),
            "Some columns of the table over positions",
        ),
        products=figures.inline(
            figures.draw(lambda made: _products(made.subplots(), forms), 3.9, 3.7),
            "Products of two rows by their distance",
        ),
        heat=drawing.heat_map(levels.tolist(), range(1, 8), "Values of the table over position and column"),
        shape=(len(rows), len(columns)),
        first=f"positions 0 to {rows[-1]}",
        columns=f"{len(columns)} of {first.shape[1]} columns, in pairs of neighbours"
        if len(columns) < first.shape[1]
        else f"all {len(columns)} columns",
        ends=[f"{-most + 2 * most * place / 8:.2f}" for place in range(9)],
        headings=headings,
        rows=numbers,
    )
