"""The one page builder: what every page of Concord has, whatever it tells of.

One file, without network; the script that all have only sorts and searches.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from bisect import bisect
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from concord.backends.wire import legibly
from concord.conformance import drawing
from concord.conformance.explain.breakdown import Breakdown, HeatMap
from concord.conformance.record import Record
from concord.conformance.report import SHORT, word
from concord.conformance.verdict import number
from concord.conformance.wording import counted, joined, plain
from concord.spec.text import first_of, legible, shortened

SIGNS = {
    "agrees": "✓",
    "diverges": "✗",
    "undetermined": "?",
    "unsupported": "–",
    "absent": "–",
    "refused": "✗",
    "nondeterministic": "✗",
}
TONES = {
    "agrees": "good",
    "diverges": "bad",
    "nondeterministic": "bad",
    "unsupported": "quiet",
    "absent": "quiet",
    "undetermined": "quiet",
}


@cache
def _environment(*folders: Path) -> jinja2.Environment:
    """Return what compiles templates: half a second for each page, if it did not keep them."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, drawing.FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shortened(value) if type(value) is str else value,  # markup is ours
    )
    environment.policies["json.dumps_function"] = lambda value, **options: json.dumps(
        legibly(value), **options
    )
    environment.filters.update(
        number=lambda value: number(value) if value == value else "not judged",
        nine=lambda value: f"{value:.9g}",
        three=lambda value: f"{value:.3g}",
        grouped=lambda value: f"{value:,}",
        short=lambda dtype: SHORT.get(dtype, dtype),
        tone=lambda status: TONES.get(status, "broken"),
        sign=lambda status: SIGNS.get(status, "!"),
        verb=lambda status, count: (
            {"agrees": "agree", "diverges": "diverge"}.get(status, status) if count != 1 else status
        ),
        percent=_percent,
        soft=_soft,
        word=word,
        tail=tail,
        code=lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(shortened(text))))),
        many=counted,
        joined=joined,
        plain=plain,
    )
    return environment


def render(template: str, made: Record, *folders: Path, script: str = "", **parts: Any) -> str:
    """Return a page.

    Args:
        template: its name; it extends ``page.html``.
        made: the record that it is made of.
        folders: where templates are besides those that all pages share.
        script: what the page has besides the script that all pages share.
        parts: what the template needs; of ``page.html``, if the template does not set them: ``tone`` (good,
            bad or broken; by default that of the exit code), ``headline`` (the verdict in a sentence),
            ``compared`` (what was compared, and by what), ``sections`` (identity to title; those without a
            title are left out).
    """
    environment = _environment(*folders)
    style, shared = (
        Markup((drawing.FOLDER / name).read_text(encoding="utf-8")) for name in ("report.css", "page.js")
    )
    script = shared + Markup(script)
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    tone = {0: "good", 1: "bad"}.get(made.exit_code, "broken")
    # What a page must not hold, or what changes how the rest of it is shown, is written out, wherever it
    # comes from.
    return legible(
        environment.get_template(template).render(
            **{"made": made, "found": made.outcome, "tone": tone, "shown": _Shown(), **parts},
            style=style,
            script=script,
            seal=seal,
        )
    )


def tail(name: str) -> str:
    """Return the name of a backend without the module that it comes from."""
    return name.rpartition(":")[2] or name


class _Shown:
    """Draws where errors lie, as often as there is room for on a page."""

    MOST = 100

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, breakdown: Breakdown | None) -> dict[str, Any] | None:
        """Return the drawings of a breakdown; None where there is none, or no more room."""
        if breakdown is None or self.drawn >= self.MOST:
            return None
        self.drawn += 1
        powers = [power for one in breakdown.maps for row in one.levels for power in row if power is not None]
        levels = drawing.heat_levels(powers)
        # Each level that a map shows, and the error that it begins at: the least beyond at the tolerance.
        low = min((power for power in powers if power >= 0), default=0)
        starts = [number(2.0 ** (power or low)) for power in levels]
        return {
            "maps": [_heat_map(one, levels) for one in breakdown.maps],
            "scale": [
                (level, f"from {starts[level - 1]}" if level else f"below {starts[0]}")
                for level in sorted({bisect(levels, power) for power in powers})
            ],
        }


def _heat_map(found: HeatMap, levels: Sequence[int]) -> dict[str, Any]:
    rows, columns = size = len(found.levels), len(found.levels[0])
    starts = [
        [place * whole // shown for place in range(shown)]
        for whole, shown in zip(found.shape, size, strict=True)
    ]
    beyond = [
        (i, j)
        for i, row in enumerate(found.levels)
        for j, level in enumerate(row)
        if level is not None and level >= 0
    ]
    words = [
        f"{name} {_ranges(sorted({starts[axis][place[axis]] for place in beyond}))}"
        for axis, name in enumerate(found.axes)
        if name and beyond
    ]
    return {
        "axes": found.axes,
        "shape": found.shape,
        "rows": rows,
        "columns": columns,
        "labels": starts[0] if found.axes[0] else [],
        "reduced": size != found.shape,
        "words": "no element alone lies beyond"
        if not beyond
        else "beyond everywhere"
        if len(beyond) == rows * columns
        else f"beyond at {'; '.join(words)}",
        "picture": drawing.heat_map(
            found.levels,
            levels,
            f"Largest error over {' and '.join(filter(None, found.axes))}, in tolerances",
        ),
    }


def _ranges(places: list[int], most: int = 6) -> str:
    """Return places in few words: those that follow each other as a range."""
    runs = [
        [place for _, place in run]
        for _, run in groupby(enumerate(places), lambda numbered: numbered[1] - numbered[0])
    ]
    return first_of([f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs], most)


def _soft(name: str) -> Markup:
    """Return a name that may be broken after a dot, colon, slash or underscore."""
    return Markup("<wbr>").join(re.findall(r"[^.:/_]*[.:/_]|[^.:/_]+", shortened(name)))


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"
