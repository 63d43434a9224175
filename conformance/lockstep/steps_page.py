"""The page of lockstep training."""

from __future__ import annotations

from concord.conformance.lockstep.steps_report import explanation, unjudged
from concord.conformance.run import drawing
from concord.conformance.run.page import render
from concord.conformance.run.record import Record
from concord.conformance.wording import joined

# Maximum points per line; a point of several steps shows their largest error.
POINTS = 400


def steps_page(record: Record) -> str:
    """Page of a record."""
    outcome = record.outcome
    tracks = outcome.tracks
    wrong = [
        f"{track.backend} diverges first at step {track.first.step + 1}" for track in tracks if track.first
    ]
    missing = [
        f"{track.backend}: {', '.join(track.unjudged)} not judged" for track in tracks if track.unjudged
    ]
    right = [track for track in tracks if track.status == "agrees"]
    if wrong or missing or not right:
        headline = f"{'; '.join(wrong or missing) or 'Nothing was judged'}."
    else:
        agree = "agree" if len(right) > 1 else "agrees"
        steps = max(track.steps for track in right)
        names = joined([track.backend for track in right])
        headline = f"{names} {agree} with the reference at each of {steps} steps."
    figures = []
    for section in outcome.sections:
        curves = [(track.backend, curve) for track in tracks if (curve := track.curve(section))]
        lines = [_thinned(curve.ratio) for _, curve in curves]
        label = f"{section}: largest error of each step, in tolerances"
        figures.append((section, curves, max(map(len, lines)), drawing.growth(lines, label)))
    return render(
        "lockstep.html",
        record,
        headline=headline,
        figures=figures,
        explanation=explanation(outcome),
        why={track.backend: unjudged(track, outcome) for track in tracks},
    )


def _thinned(values: list[float]) -> list[float]:
    share = -(-len(values) // POINTS) or 1
    return [max(values[first : first + share]) for first in range(0, len(values), share)]
