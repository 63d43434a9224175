"""The frame of every page: self-contained HTML, whose script only searches and sorts tables."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from concord.backends.wire import legibly
from concord.conformance.judging.breakdown import Breakdown
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.verdict import Z_BINS, number
from concord.conformance.run import drawing
from concord.conformance.run.record import Record
from concord.conformance.run.report import SHORT, reason, tail, verb, word
from concord.conformance.wording import counted, joined, plain
from concord.spec.text import legible, shortened

FOLDER = Path(__file__).parent / "templates"

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

# Limits per element and per tensor, and histogram bins, in sigma.
LIMITS: dict[str, Any] = {"z": Z, "rms": R, "bins": Z_BINS}

# Maximum number of drawn breakdowns: more would result in a page of tens of MiB.
MAPS = 100


def render(template: str, record: Record, *folders: Path, script: str = "", **parts: Any) -> str:
    """Return a page.

    Args:
        template: the name of a template that extends ``page.html``.
        parts: values for the template. ``page.html`` needs ``tone`` (good, bad or broken; by default from the
            exit code), ``headline`` and ``compared``.
    """
    style, shared = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    script = shared + script
    drawn = count()

    def shown(breakdown: Breakdown | None) -> dict[str, Any] | None:
        return drawing.heat_maps(breakdown) if breakdown and next(drawn) < MAPS else None

    values = {
        "made": record,
        "found": record.outcome,
        "tone": {0: "good", 1: "bad"}.get(record.exit_code, "broken"),
        "truth": "reference",
        "limits": LIMITS,
        "ticks": drawing.TICKS,
        "shown": shown,
        "nav": [],
        "style": Markup(style),
        "script": Markup(script),
        "seal": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # Control characters and bidirectional marks are escaped, whatever their source.
    return legible(_environment(*folders).get_template(template).render(values | parts))


@cache  # since compiling templates takes half a second
def _environment(*folders: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shortened(value) if type(value) is str else value,  # markup comes from Concord
    )
    environment.policies["json.dumps_function"] = lambda value, **options: json.dumps(
        legibly(value), **options
    )
    environment.filters.update(
        number=lambda value: number(value) if value == value else "not judged",
        nine=lambda value: f"{value:.9g}",
        three=lambda value: f"{value:.3g}",
        short=lambda dtype: SHORT.get(dtype, dtype),
        tone=lambda status: TONES.get(status, "broken"),
        sign=lambda status: SIGNS.get(status, "!"),
        verb=verb,
        percent=_percent,
        soft=_soft,
        word=word,
        reason=reason,
        tail=tail,
        code=lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(shortened(text))))),
        many=counted,
        joined=joined,
        plain=plain,
    )
    return environment


def _soft(name: str) -> Markup:
    # Long names may break after a dot, colon, slash or underscore, which keeps tables narrow.
    return Markup("<wbr>").join(re.findall(r"[^.:/_]*[.:/_]|[^.:/_]+", shortened(name)))


def _percent(part: float, total: float) -> str:
    share = 100 * part / total if total else 0.0
    return f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"
