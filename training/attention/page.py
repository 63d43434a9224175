"""The page of attention maps: one file that needs nothing else, drawn by its script as far as it is looked at."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.conformance.layout import render
from concord.conformance.verdict import number
from concord.conformance.views import tail
from concord.training.attention.maps import LEAK
from concord.training.attention.record import LOWEST, NONE, ZERO, check

TEMPLATES = Path(__file__).parents[1] / "templates"


def page(data: Mapping[str, Any]) -> str:
    """Return a record of attention maps (:mod:`concord.training.attention.record`) as HTML."""
    check(data)
    sections = {"maps-of": "Maps", "heads": "Heads in numbers"} if data["sides"] else {}
    letters = string.ascii_lowercase[: max(data["segments"], default=0) + 1]
    keys = ("tokens", "segments", "visible", "layers", "heads", "coarse", "tap")
    about = {
        **{key: data[key] for key in keys},
        "sides": [side["backend"] for side in data["sides"]],
        "leak": LEAK,
        "none": NONE,
        "lowest": LOWEST,
        "zero": ZERO,
        "start": start(data),
    }
    return render(
        "attention.html",
        data,
        TEMPLATES,
        script=(TEMPLATES / "attention.js").read_text(encoding="utf-8") if data["sides"] else "",
        headline=headline(data),
        tone={0: "good", 1: "bad"}.get(data["exit_code"], "broken"),
        compared=[_compared(data)],
        sections={**sections, "verdicts": "Verdicts"},
        letters=letters,
        about=about,
    )


def start(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return layer and head to begin with: where most lies beyond its tolerance in the first layer where something does, else the first."""
    beyond = [
        (measure["layer"], -_error(measure), measure["head"])
        for measure in data["measures"]
        if _error(measure) > 1
    ]
    layer, _, head = min(beyond, default=(0, 0.0, 0))
    return layer, head


def _error(measure: Mapping[str, Any]) -> float:
    return max(
        (
            error
            for error in map(float, [measure["difference"]] if "difference" in measure else measure["errors"])
            if not math.isnan(error)
        ),
        default=0.0,
    )


def headline(data: Mapping[str, Any]) -> str:
    """Say what is to be seen, in a sentence."""
    names = [side["backend"] for side in data["sides"]]
    size = f"{data['layers']} layer{'' if data['layers'] == 1 else 's'} of {data['heads']} head{'' if data['heads'] == 1 else 's'} over {len(data['tokens'])} tokens"
    if not names:
        return "No attention weights were delivered."
    wrong = [tail(result["backend"]) for result in data["results"] if result["status"] == "diverges"]
    if len(names) == 1:
        return f"Attention of {names[0]}: {size}" + (f"; {wrong[0]} diverges." if wrong else ".")
    judged = [measure for measure in data["measures"] if not math.isnan(float(measure["difference"]))]
    if not judged:
        return f"Attention of {names[0]} and {names[1]}: {size}; what they differ by was not judged."
    worst = max(judged, key=lambda measure: float(measure["difference"]))
    where = f"{number(float(worst['difference']))} tolerances at most, in layer {worst['layer']}, head {worst['head']}"
    return f"Attention of {names[0]} and {names[1]}: {size}; they differ by {where}." + (
        f" {', '.join(wrong)} diverge{'s' if len(wrong) == 1 else ''}." if wrong else ""
    )


def _compared(data: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{tail(name)} {version}" if version else tail(name) for name, version in data["versions"].items()
    )
    size = (
        " Of maps this large a number has one byte on this page: about two digits." if data["coarse"] else ""
    )
    return f"Looked at: {data['tap'].replace('_', ' ')} of attention in {data['dtype']}, by {versions or 'no backend'}.{size}"
