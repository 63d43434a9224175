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
    made = certificates.read(ROOT / "docs" / "certificates" / "minilm-flax.json")
    found = made.outcome
    source, target = (
        replace(side, parameters=dict([*side.parameters.items()][:3]), others=side.others[:3])
        for side in (found.source, found.target)
    )
    few = replace(found.report, results=found.report.results[:2])
    return replace(
        made, outcome=replace(found, source=source, target=target, report=few, mutants=found.mutants[:3])
    )


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
