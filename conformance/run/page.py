"""Pages: one HTML file of a record, without network; its script only searches and sorts tables."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from concord.backends.wire import legibly
from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.explain.breakdown import Breakdown
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.verdict import Z_BINS, number
from concord.conformance.lockstep.outcome import Lockstep
from concord.conformance.lockstep.steps_report import explanation, unjudged
from concord.conformance.run import drawing, results_page
from concord.conformance.run.record import Record
from concord.conformance.run.report import SHORT, FirstDivergence, ordered, tail, word
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

LIMITS: dict[str, Any] = {"z": Z, "rms": R, "bins": Z_BINS}
"""The largest error of an element and of a tensor, and the edges of histograms, in sigma."""

MAPS = 100
"""Breakdowns that are drawn: more would make a page of tens of MiB."""

POINTS = 400
"""Points of a line at most: of several steps that share one the largest error is drawn."""


def page(record: Record) -> str:
    """Return the page of a record of this package."""
    make = {"fuzz": _of_fuzz, "mutants": _of_mutants, "lockstep": _of_lockstep}.get(record.kind)
    template, parts = (f"{record.kind}.html", make(record.outcome)) if make else results_page.view(record)
    return render(template, record, **parts)


def render(template: str, record: Record, *folders: Path, script: str = "", **parts: Any) -> str:
    """Return a page.

    Args:
        template: its name; it extends ``page.html``, which lists its sections in the order they come in.
        folders: where templates are besides those that all pages share.
        script: what the page has besides the script that all pages share.
        parts: what the template needs; of ``page.html``, if the template does not set them: ``tone`` (good,
            bad or broken; by default that of the exit code), ``headline`` (the verdict in a sentence),
            ``compared`` (what was compared, and by what).
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
        "truth": "oracle",
        "limits": LIMITS,
        "ticks": drawing.TICKS,
        "shown": shown,
        "nav": [],
        "style": Markup(style),
        "script": Markup(script),
        "seal": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # What a page must not hold, or what changes how the rest of it is shown, is written out, wherever it
    # comes from.
    return legible(_environment(*folders).get_template(template).render(values | parts))


@cache  # compiling templates takes half a second
def _environment(*folders: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
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


def _soft(name: str) -> Markup:
    """Return a name that may be broken after a dot, colon, slash or underscore."""
    return Markup("<wbr>").join(re.findall(r"[^.:/_]*[.:/_]|[^.:/_]+", shortened(name)))


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"


# What the pages of random cases, mutants and lockstep need besides the record.


def _of_fuzz(outcome: Any) -> dict[str, Any]:
    names = {id(failure.result): failure.name for failure in outcome.failures}
    tallies = []
    for backend, dtype, tally in outcome.each():
        counts = drawing.summed(one.histogram for one in tally.statistics.values())
        tallies.append((backend, dtype, tally, drawing.histogram(counts, [], f"{backend}, {dtype}")))
    return {
        "tallies": tallies,
        "divergence": lambda result: FirstDivergence([result], []),
        "anchor_of": lambda result: names[id(result)],
    }


def _of_mutants(outcome: Any) -> dict[str, Any]:
    findings, names = outcome.findings, ordered(finding.backend for finding in outcome.findings)
    judged = [finding for finding in findings if finding.status != "absent"]

    def share(name: str) -> str:
        statuses = Counter(finding.status for finding in judged if finding.backend == name)
        right, seen = statuses["found"], statuses["found"] + statuses["misplaced"]
        return f"{name} {seen} of {statuses.total()}" + f" ({right} at the right tensor)" * (right < seen)

    unknown = dict.fromkeys(("operation", "clause", "text", "variant", "scenario"), "")
    return {
        "shares": [*map(share, names)],
        "names": names,
        "mutants": {name: KNOWN.get(name, unknown) for name in ordered(one.mutant for one in findings)},
        "cells": {(finding.mutant, finding.backend): finding for finding in findings},
        "wrong": [finding for finding in judged if finding.status != "found"],
        "misnamed": [finding for finding in findings if finding.cause == "wrong"],
        "seen": sorted((one for one in findings if one.row), key=lambda one: one.status == "found"),
    }


def _of_lockstep(outcome: Lockstep) -> dict[str, Any]:
    tracks = outcome.tracks
    wrong = [f"{one.backend} diverges first at step {one.first.step + 1}" for one in tracks if one.first]
    missing = [f"{one.backend}: {', '.join(one.unjudged)} not judged" for one in tracks if one.unjudged]
    right = [track for track in tracks if track.status == "agrees"]
    if wrong or missing or not right:
        headline = f"{'; '.join(wrong or missing) or 'Nothing was judged'}."
    else:
        agree = "agree" if len(right) > 1 else "agrees"
        steps = max(track.steps for track in right)
        names = joined([track.backend for track in right])
        headline = f"{names} {agree} with the oracle at each of {steps} steps."
    figures = []
    for section in outcome.sections:
        curves = [(track.backend, curve) for track in tracks if (curve := track.curve(section))]
        lines = [_thinned(curve.ratio) for _, curve in curves]
        label = f"{section}: largest error of each step, in tolerances"
        figures.append((section, curves, max(map(len, lines)), drawing.growth(lines, label)))
    return {
        "headline": headline,
        "figures": figures,
        "explanation": explanation(outcome),
        "why": {track.backend: unjudged(track, outcome) for track in tracks},
    }


def _thinned(values: list[float]) -> list[float]:
    share = -(-len(values) // POINTS) or 1
    return [max(values[first : first + share]) for first in range(0, len(values), share)]
