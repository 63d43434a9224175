"""Figures by matplotlib, as SVG whose text stays text; on a page they take the page's colours.

matplotlib is in the extra ``training``.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from concord.spec.errors import optional
from concord.spec.files import write_text
from concord.spec.text import shortened

SERIES = ("#1b66a5", "#b8500f", "#22784a", "#7846ad", "#8a6a00", "#b3306c", "#3c6a74", "#5a5f66")
"""Colours of series on paper; a page has its own."""

DASHES = ("-", (0, (7, 3)), (0, (2, 2)), (0, (7, 2, 2, 2)))
"""Lines of series that share a colour, or are printed without any."""

INK, MUTED, LINE = "#1c2126", "#566069", "#d8dbd9"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "concord",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 8.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
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


def inline(svg: str, label: str) -> Markup:
    """Return a figure as part of a page, in the page's colours, light or dark."""
    text = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Identities are unique on a page, and links between parts of the drawing go with them.
    mark = f"f{zlib.crc32(label.encode()):08x}-"
    text = re.sub(r'(\bid=")([^"]+)"', rf'\1{mark}\2"', text)
    text = re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{mark}\2", text)
    colours = {f"s{place}": colour for place, colour in enumerate(SERIES)}
    for name, colour in {**colours, "ink": INK, "muted": MUTED, "line": LINE}.items():
        text = text.replace(colour, f"var(--{name})")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(shortened(label))}" ', 1))


def write(console: Any, file: Path | None, svg: Callable[[], str]) -> None:
    """Write a figure to a file, if it was asked for, and say so.

    Raises:
        SpecError: if matplotlib is not installed, or the file cannot be written.
    """
    if file is not None:
        write_text(file, svg())
        console.print(f"written: {file}", highlight=False, soft_wrap=True)


def check_matplotlib(*files: Path | None) -> None:
    """Refuse files of figures if they cannot be made.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    if any(files):
        with optional("a figure", "training"):
            import matplotlib  # noqa: F401


def sequence(series: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return colour and line of each series."""
    return {
        name: (SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)])
        for place, name in enumerate(series)
    }
