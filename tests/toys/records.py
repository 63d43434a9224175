"""A small record of every kind, cut down from files, so that its bytes are the same everywhere."""

import json
from dataclasses import replace
from pathlib import Path

from concord.conformance.judging.verdict import section_of
from concord.conformance.run import record
from concord.output_files import KINDS
from tests.toys import reports
from tests.toys.surroundings import ROOT

NAME = "record.json"

RESULTS = ROOT / "conformance" / "results"

# A record of check. When its form changes, `python -m tests.toys.records` rewrites it.
CHECK = Path(__file__).with_name("check.json")


def cut(result):
    # One tensor of each kind.
    if not result.verdict:
        return result
    kinds = {(section_of(row.tensor), row.status, bool(row.note)): row for row in result.table[::-1]}
    few = [row for row in result.table if any(row is other for other in kinds.values())]
    return replace(result, verdict=replace(result.verdict, table=few))


def check():
    report = reports.mixed()
    document = record.make_record(replace(report, results=[*map(cut, report.results)]), "check", "a check")
    return replace(document, written="2026-01-01T00:00:00+00:00", machine={"system": "Linux", "cores": 2})


def kept(name, **shorter):
    # With shorter lists.
    data = json.loads((RESULTS / name).with_suffix(".json").read_text())
    cut = {key: entry[: shorter[key]] if key in shorter else entry for key, entry in data.items()}
    return record.parsed(json.dumps(cut).encode(), KINDS)


def certificate():
    document = record.read(ROOT / "docs" / "certificates" / "minilm-flax.json", KINDS)
    report = document.outcome.report
    few = replace(report, results=[*map(cut, report.results[:2])])
    return replace(document, outcome=replace(document.outcome, report=few, bugs=document.outcome.bugs[:3]))


RECORDS = {
    "check": lambda: kept(CHECK),
    "fuzz": lambda: kept("fuzz-bfloat16-jax"),
    "mutants": lambda: kept("mutants", findings=5),
    "lockstep": lambda: kept("lockstep-float32", tracks=1),
    "speed": lambda: kept("speed/amd-epyc-26-2/training", entries=4),
    "certificate": certificate,
}


def write(kind, folder):
    record.write(folder / NAME, RECORDS[kind]())


if __name__ == "__main__":
    record.write(CHECK, check())
