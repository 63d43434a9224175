"""Figures for papers, by matplotlib: SVG whose text stays text, and PNG. The same drawings stand on pages, in the page's colours.

matplotlib is in the extra ``training``.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from concord.spec.errors import optional
from concord.spec.files import write_bytes
from concord.spec.text import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = ("#1b66a5", "#b8500f", "#22784a", "#7846ad", "#8a6a00", "#b3306c", "#3c6a74", "#5a5f66")
"""Colours of series, as pages have them in the light; on a page they are the page's."""

DASHES = ("-", (0, (7, 3)), (0, (2, 2)), (0, (7, 2, 2, 2)))
"""Lines of series that share a colour, or are printed without any."""

INK, MUTED, LINE = "#1c2126", "#566069", "#d8dbd9"
DPI = 200
FAMILY = "DejaVu Sans"

Draw = Callable[["Figure"], None]
"""Draws into an empty figure."""


def draw(what: Draw, width: float, height: float, texts: Iterable[str] = ()) -> Figure:
    """Return a figure.

    Args:
        width, height: in inches.
        texts: that it has to be able to show, in whatever script.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    with optional("a figure", "training"):
        import matplotlib
        from matplotlib.figure import Figure
    style: dict[Any, Any] = {
        "font.family": [FAMILY, *fonts_for("".join(texts))],
        "font.size": 8.0,
        "svg.fonttype": "none",
        "svg.hashsalt": "concord",
        "axes.unicode_minus": True,
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
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(style):
        found = Figure(figsize=(width, height), layout="constrained")
        what(found)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # told by :func:`lacking`
            found.draw_without_rendering()
    return found


def svg(figure: Figure) -> str:
    """Return a figure as SVG. Text stays text: where a letter is not in the font that it names, a viewer's own serves."""
    return _saved(figure, "svg", metadata={"Date": None, "Creator": "Concord"}).decode()


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, on white."""
    return _saved(figure, "png", dpi=DPI, facecolor="white")


def saved(figure: Figure, form: str) -> bytes:
    """Return a figure in a form: svg, png or pdf."""
    forms: dict[str, Callable[[], bytes]] = {
        "svg": lambda: svg(figure).encode(),
        "png": lambda: png(figure),
        "pdf": lambda: _saved(figure, "pdf", metadata={"CreationDate": None, "Creator": "Concord"}),
    }
    return forms[form]()


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    import matplotlib

    kept = io.BytesIO()
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "concord"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(kept, format=form, **options)
    return kept.getvalue()


def inline(figure: Figure, label: str) -> Markup:
    """Return a figure as part of a page: it takes the page's colours, light or dark."""
    text = svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Identities are unique on a page, and links between parts of the drawing go with them.
    mark = f"f{zlib.crc32(label.encode()):08x}-"
    text = re.sub(r'(\bid=")([^"]+)"', rf'\1{mark}\2"', text)
    text = re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{mark}\2", text)
    for place, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--s{place})")
    for name, colour in (("ink", INK), ("muted", MUTED), ("line", LINE)):
        text = text.replace(colour, f"var(--{name})")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(shortened(label))}" ', 1))


def write(
    console: Any,
    figure: Callable[[Callable[[str], str]], Figure],
    svg_file: Path | None,
    png_file: Path | None,
    texts: Iterable[str] = (),
) -> None:
    """Write a figure to the files that were asked for, and say where and what it cannot show.

    Args:
        figure: makes it, given how a text is written: in SVG as it is, in PNG with what no font has by its number.
        texts: that it shows.

    Raises:
        SpecError: if matplotlib is not installed, or a file cannot be written.
    """
    if svg_file is not None:
        write_bytes(svg_file, svg(figure(str)).encode())
    if png_file is not None:
        write_bytes(png_file, png(figure(legible)))
    for path in filter(None, (svg_file, png_file)):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    if any((svg_file, png_file)) and (missing := lacking("".join(texts))):
        console.print(told(missing, png_file is not None), style="yellow", highlight=False, soft_wrap=True)


def told(missing: str, painted: bool) -> str:
    """Say in one line which letters no installed font has."""
    shown = missing[:12] + ("…" if len(missing) > 12 else "")
    what = "the PNG says their numbers instead" if painted else "a viewer that has one shows them"
    return f"no installed font has {shown}: {what}; install one that has, for Chinese for example fonts-noto-cjk or fonts-wqy-zenhei"


# Fonts.


def fonts_for(text: str) -> list[str]:
    """Return the names of as few installed fonts as have the letters that the usual one has not."""
    return _fonts(text)[0]


def lacking(text: str) -> str:
    """Return the letters that no installed font has, in order."""
    return "".join(sorted(map(chr, _fonts(text)[1])))


def _fonts(text: str) -> tuple[list[str], set[int]]:
    """Return the fonts that a text takes besides the usual one, and the letters that none has."""
    wanted, chosen = _beyond_usual(text), list[str]()
    if not wanted:
        return chosen, wanted
    from matplotlib import font_manager

    def order(name: str) -> tuple[bool, bool, bool, str]:
        # Those made for Chinese, Japanese and Korean first: most else that is not in the usual font is in them.
        return (
            not re.search(r"CJK|WenQuanYi|Hei|Ming|Song|Han", name),
            "Mono" in name,
            "Serif" in name,
            name,
        )

    def take() -> None:
        # The font of last resort has a box for each letter there is.
        fonts = {
            entry.name: entry.fname
            for entry in font_manager.fontManager.ttflist
            if entry.style == "normal" and "LastResort" not in entry.fname
        }
        for name in sorted(fonts, key=order):
            has = wanted & _letters_of(fonts[name])
            chosen.extend([name] if has else [])
            wanted.difference_update(has)
            if not wanted:
                return

    take()
    if wanted:  # what was installed since matplotlib looked for fonts
        known = {entry.fname for entry in font_manager.fontManager.ttflist}
        for file in set(font_manager.findSystemFonts()) - known:
            if wanted & _letters_of(file):
                font_manager.fontManager.addfont(file)
        take()
    return chosen, wanted


def legible(text: str) -> str:
    """Return text in which what no installed font has stands by its number."""
    missing = lacking(text)
    return "".join(f"U+{ord(sign):04X}" if sign in missing else sign for sign in text)


def _beyond_usual(text: str) -> set[int]:
    signs = {ord(sign) for sign in text if not sign.isspace()}
    if not any(sign > 127 for sign in signs):
        return set()
    with optional("a figure", "training"):
        from matplotlib import font_manager
    return signs - _letters_of(font_manager.findfont(FAMILY))


def _letters_of(file: str) -> frozenset[int]:
    from matplotlib import font_manager

    try:
        return frozenset(font_manager.get_font(file).get_charmap())
    except (OSError, RuntimeError):  # a file that matplotlib lists and cannot read
        return frozenset()


def check_matplotlib(*files: Path | None) -> None:
    """Refuse files of figures if they cannot be made.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    if any(files):
        with optional("a figure", "training"):
            import matplotlib.figure  # noqa: F401


def sequence(series: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return colour and line of each series."""
    return {
        name: (SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)])
        for place, name in enumerate(series)
    }


__all__ = [
    "DPI",
    "SERIES",
    "check_matplotlib",
    "draw",
    "inline",
    "lacking",
    "legible",
    "png",
    "saved",
    "sequence",
    "svg",
    "write",
]
