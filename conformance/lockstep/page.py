"""Lockstep as a page: the errors of each section over the steps."""

from __future__ import annotations

from typing import Any

from concord.conformance import drawing
from concord.conformance.layout import render
from concord.conformance.lockstep.outcome import Lockstep
from concord.conformance.lockstep.report import explanation, unjudged
from concord.conformance.record import Record
from concord.conformance.wording import joined

DRAWN = 400
"""Points of a line at most: of several steps that share one the largest error is drawn."""


def page(made: Record) -> str:
    """Return the page of a record of lockstep."""
    found: Lockstep = made.outcome
    sections = {"lost": "Lost in this precision"} if found.lost else {}
    if any(track.first for track in found.tracks):
        sections["first"] = "First divergences"
    return render(
        "lockstep.html",
        made,
        headline=headline(found),
        compared=[compared(found)],
        sections={**sections, "errors": "Errors over the steps", "about": "Recipe and data"},
        found=found,
        figures=[figure(found, section) for section in found.sections],
        explanation=explanation(found),
        why={track.backend: unjudged(track, found) for track in found.tracks},
    )


def headline(found: Lockstep) -> str:
    """Return the verdict in a sentence."""
    tracks = found.tracks
    wrong = [f"{one.backend} diverges first at step {one.first.step + 1}" for one in tracks if one.first]
    missing = [f"{one.backend}: {', '.join(one.unjudged)} not judged" for one in tracks if one.unjudged]
    right = [track for track in tracks if track.status == "agrees"]
    if wrong or missing or not right:
        return f"{'; '.join(wrong or missing) or 'Nothing was judged'}."
    agree = "agree" if len(right) > 1 else "agrees"
    steps = max(track.steps for track in right)
    return f"{joined([track.backend for track in right])} {agree} with the oracle at each of {steps} steps."


def compared(found: Lockstep) -> str:
    """Return what was compared."""
    about, versions = found.about, found.environments
    names = [
        f"{track.backend} {versions.get(track.backend, {}).get('version', '')}".strip()
        for track in found.tracks
    ]
    return (
        f"Compared: every loss, gradient, norm, moment and weight of {about.steps} steps of "
        f"{', '.join(names)}, {about.config.num_layers} layers of {about.config.d_model}, {found.dtype}, "
        f"{found.mode}, with the oracle's, seed {about.seed}."
    )


def figure(found: Lockstep, section: str) -> dict[str, Any]:
    """Return the curves of a section: the largest error of each step, in tolerances."""
    curves = [(track.backend, curve) for track in found.tracks if (curve := track.curve(section))]
    ratios = [thinned(curve.ratio) for _, curve in curves]
    label = f"{section}: largest error of each step, in tolerances"
    return {
        "section": section,
        "columns": max(map(len, ratios)),
        "curves": curves,
        "picture": drawing.growth(ratios, label, []),
        "ticks": drawing.TICKS,
    }


def thinned(values: list[float]) -> list[float]:
    """Return no more values than are drawn: the largest of those that share a place."""
    share = -(-len(values) // DRAWN) or 1
    return [max(values[first : first + share]) for first in range(0, len(values), share)]
