"""A small record of every kind, as its command writes it.

Those that are kept here, cut down, and others of runs that never were.
"""

import json
from dataclasses import replace

from concord.conformance import record
from concord.porting import certificate as certificates
from concord.spec.files import write_text
from concord.writing import KINDS
from tests.toys import reports
from tests.toys.surroundings import ROOT

NAME = "record.json"

RESULTS = ROOT / "conformance" / "results"


def kept(name, **shorter):
    """Return a record that is kept here, with so many entries of some of its lists."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    cut = {key: entry[: shorter[key]] if key in shorter else entry for key, entry in data.items()}
    return record.parsed(json.dumps(cut).encode(), KINDS)


def certificate():
    made, found = certificates.read(ROOT / "docs" / "certificates" / "minilm-flax.json")
    errors = {
        backend: {dtype: dict(list(worst.items())[:3]) for dtype, worst in of.items()}
        for backend, of in found.errors.items()
    }
    few = {name: getattr(found, name)[:3] for name in ("parameters", "others", "runs")}
    return replace(made, outcome=replace(found, errors=errors, **few))


RECORDS = {
    "check": lambda: record.made(reports.mixed(), "check", "a check"),
    "fuzz": lambda: kept("fuzz-bfloat16-jax"),
    "mutants": lambda: kept("mutants-jax", findings=5),
    "lockstep": lambda: kept("lockstep-float32", tracks=1),
    "speed": lambda: kept("speed-training", entries=4),
    "certificate": certificate,
}


def write(kind, folder):
    """Write a record of a kind into a folder."""
    made = RECORDS[kind]()
    write_text(folder / NAME, certificates.text(made) if kind == "certificate" else record.text(made))
