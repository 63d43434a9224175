"""A small record of every kind, as its command writes it: those that are kept here, cut down, and others of runs that never were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from concord.conformance import record
from concord.porting.certificate import sealed
from tests.toys import reports
from tests.toys.surroundings import ROOT

NAME = "record.json"

RESULTS = ROOT / "conformance" / "results"


def kept(name: str, **shorter: int) -> dict[str, Any]:
    """Return a record that is kept here, with so many entries of some of its lists."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return {key: entry[: shorter[key]] if key in shorter else entry for key, entry in data.items()}


def mutants() -> dict[str, Any]:
    data = kept("mutants-jax", findings=5)
    return {
        **data,
        "mutants": {finding["mutant"]: data["mutants"][finding["mutant"]] for finding in data["findings"]},
    }


def certificate() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "docs" / "certificates" / "minilm-flax.json").read_text())
    cut = {key: entry[:3] if isinstance(entry, list) else entry for key, entry in data.items()}
    errors = {
        backend: {dtype: dict(list(worst.items())[:3]) for dtype, worst in of.items()}
        for backend, of in data["errors"].items()
    }
    return sealed.seal({**cut, "items": data["items"], "errors": errors})


RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "check": lambda: record.record(reports.mixed(), "check", "a check"),
    "fuzz": lambda: kept("fuzz-bfloat16-jax"),
    "mutants": mutants,
    "lockstep": lambda: kept("lockstep-float32", tracks=1, rates=5),
    "criteria": lambda: kept("criteria"),
    "speed": lambda: kept("speed-ragged", entries=5),
    "certificate": certificate,
}


def write(kind: str, folder: Path) -> None:
    """Write a record of a kind into a folder."""
    record.write(folder / NAME, RECORDS[kind]())
