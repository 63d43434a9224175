"""A small record of every kind, as its command writes it: those that are kept here, cut down, and others of runs that never were."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from concord import spec
from concord.conformance import record
from concord.conformance.campaign import Report, Settings
from concord.porting.certificate import sealed
from concord.spec.batch import batch_of_lengths
from concord.training.attention import Maps, Reading
from concord.training.attention import record as attention
from concord.training.attention.maps import Side
from tests.conftest import small_config
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


def of_attention(errors: float = 0.0) -> dict[str, Any]:
    """Return maps of two backends.

    Args:
        errors: what is added to their errors.
    """
    config = small_config("bert", d_model=15, num_heads=3)
    batch = replace(batch_of_lengths(config, [5], 7), segment_ids=np.array([[0, 0, 0, 1, 1, 1, 1]]))
    reading = Reading(
        "a text",
        config,
        spec.initialize(config),
        batch,
        tuple(f"word{i}" for i in range(7)),
        (0, 0, 0, 1, 1, 1, 1),
    )
    drawn = np.random.default_rng(0).random((len(reading.names), 3, 7, 7))
    sides = tuple(Side(name, drawn / 7, drawn - 0.5 + errors) for name in ("torch", "jax"))
    report = Report(
        [reports.result("torch"), reports.result("jax", None, reports.verdict(wrong=2))],
        {"torch": {"version": "2.0"}, "jax": {}},
        Settings(),
    )
    return attention.as_data(Maps(reading, report, sides, ("a note",)))


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
    "attention": of_attention,
    "certificate": certificate,
}


def write(kind: str, folder: Path) -> None:
    """Write a record of a kind into a folder."""
    record.write(folder / NAME, RECORDS[kind]())
