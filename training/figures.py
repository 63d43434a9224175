"""Figures by matplotlib, as SVG whose text stays text. matplotlib is in the extra ``training``."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

from concord.spec.errors import optional

STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.edgecolor": "#566069",
    "grid.color": "#d8dbd9",
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "concord",
}


def draw(paint: Callable[[Any], None], width: float, height: float) -> str:
    """Return a figure as SVG.

    Args:
        paint: draws into an empty figure of matplotlib.
        width, height: in inches.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    with optional("a figure", "training"):
        import matplotlib
        from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The text stays text: a letter that the font lacks is drawn by the viewer.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        made, kept = Figure(figsize=(width, height), layout="constrained"), io.StringIO()
        paint(made)
        made.savefig(kept, format="svg", metadata={"Date": None, "Creator": "Concord"})
    return kept.getvalue()
