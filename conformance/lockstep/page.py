"""Lockstep as a page: the errors of each section over the steps."""

from __future__ import annotations

from typing import Any

from concord.conformance import drawing
from concord.conformance.layout import render
from concord.conformance.lockstep.outcome import Curve, Lockstep
from concord.conformance.lockstep.report import explanation, unjudged
from concord.conformance.record import Record
from concord.conformance.verdict import NOT_JUDGED, STEP_SECTIONS
from concord.conformance.wording import joined

DRAWN = 400
"""Points of a line at most: of several steps that share one the largest error is drawn."""


def page(made: Record) -> str:
    """Return the page of a record of lockstep."""
    found: Lockstep = made.outcome
    sections = {
        **({"lost": "Lost in this precision"} if found.lost else {}),
        **({"first": "First divergences"} if any(track.first for track in found.tracks) else {}),
    }
    return render(
        "lockstep.html",
        made,
        headline=headline(found),
        compared=[compared(found)],
        sections={**sections, "errors": "Errors over the steps", "about": "Recipe and data"},
        found=found,
        figures=[
            figure(found, section)
            for section in STEP_SECTIONS
            if any(curve.section == section for track in found.tracks for curve in track.curves)
        ],
        explanation=explanation(found),
        why={track.backend: unjudged(track, found) for track in found.tracks},
    )


def headline(found: Lockstep) -> str:
    """Return the verdict in a sentence."""
    wrong = [track for track in found.tracks if track.first]
    if wrong:
        return (
            "; ".join(
                f"{track.backend} diverges first at step {track.first.step + 1}"
                for track in wrong
                if track.first
            )
            + "."
        )
    unjudged = [track for track in found.tracks if track.unjudged]
    if unjudged:
        return (
            "; ".join(f"{track.backend}: {', '.join(track.unjudged)} not judged" for track in unjudged) + "."
        )
    right = [track for track in found.tracks if track.status == "agrees"]
    steps = max((track.steps for track in right), default=0)
    return (
        f"{joined([track.backend for track in right])} agree{'s' if len(right) == 1 else ''} with the "
        f"oracle at each of {steps} steps."
        if right
        else "Nothing was judged."
    )


def compared(found: Lockstep) -> str:
    """Return what was compared."""
    config, names = (
        found.about.config,
        [
            f"{track.backend} {found.environments.get(track.backend, {}).get('version', '')}".strip()
            for track in found.tracks
        ],
    )
    size = f"{config.num_layers} layers of {config.d_model}"
    return (
        f"Compared: every loss, gradient, norm, moment and weight of {found.about.steps} steps of "
        f"{', '.join(names)}, {size}, {found.dtype}, {found.mode}, with the oracle's, seed "
        f"{found.about.seed}."
    )


def figure(found: Lockstep, section: str) -> dict[str, Any]:
    """Return the curves of a section: the largest error of each step, in tolerances."""
    curves = [(track, curve) for track in found.tracks for curve in track.curves if curve.section == section]
    ratios = [thinned(curve.ratio) for _, curve in curves]
    return {
        "section": section,
        "columns": max((len(line) for line in ratios), default=1),
        "curves": [
            {
                "backend": track.backend,
                "worst": max(curve.ratio, default=0.0),
                "tensor": curve.worst,
                "step": curve.at + 1,
                "judged": curve.judged,
            }
            for track, curve in curves
        ],
        "picture": drawing.growth(
            ratios, f"{section}: largest error of each step, in tolerances: {said(curves)}", []
        ),
        "ticks": drawing.ticks(*drawing.decades(ratios)),
    }


def said(curves: list[tuple[Any, Curve]]) -> str:
    """Return the largest errors in words."""
    return "; ".join(
        f"{track.backend} {f'{max(curve.ratio):.2g}' if curve.judged else NOT_JUDGED}"
        for track, curve in curves
    )


def thinned(values: list[float]) -> list[float]:
    """Return no more values than are drawn: the largest of those that share a place."""
    share = -(-len(values) // DRAWN) or 1
    return [max(values[first : first + share]) for first in range(0, len(values), share)]
