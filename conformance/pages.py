"""What random cases, mutants and lockstep came to, as pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.html import LIMITS, histogram
from concord.conformance.layout import render
from concord.conformance.lockstep.page import page as of_lockstep
from concord.conformance.record import Record
from concord.conformance.report import ordered
from concord.conformance.verdict import number
from concord.conformance.wording import counted, joined

UNKNOWN = dict.fromkeys(("group", "clause", "what", "input"), "")
"""What is said of a mutant that the catalogue does not know."""


def page(made: Record) -> str:
    """Return the page of a record that is not one of a check."""
    return {"fuzz": _of_findings, "mutants": _of_matrix, "lockstep": of_lockstep}[made.kind](made)


def _versions(versions: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name} {version}" if version else name for name, version in versions.items())
        or "no backend"
    )


def _of_findings(made: Record) -> str:
    found = made.outcome
    names = list(found.tallies)
    failing = ordered(failure.backend for failure in found.failures)
    total, wrong = (
        counted(found.cases, "random case")
        if found.cases < 1000
        else f"{found.cases:,} random cases".replace(",", " "),
        sum(failure.times for failure in found.failures),
    )
    headline = (
        f"{joined(failing)} failed in {counted(wrong, 'run')} of {total}, in "
        f"{counted(len(found.failures), 'way')}."
        if failing
        else f"{joined(found.judged)}: nothing was found in {total}."
        if found.judged
        else "Nothing was judged."
    )
    versions = {name: found.environments.get(name, {}).get("version") for name in names}
    plan = found.plan
    drawn = (
        f"; drawn from seed {plan.seed}: {', '.join(plan.parts)} in {', '.join(plan.dtypes)}" if plan else ""
    )
    tallies = []
    for backend, dtype, tally in sorted(found.each(), key=lambda one: one[:2]):
        counts = {
            way: [
                sum(column)
                for column in zip(
                    *(tally.statistics[way][kind].histogram for kind in ("taps", "gradients")), strict=True
                )
            ]
            for way in ("local", "end_to_end")
        }
        peaks = [
            (way, kind, tally.statistics[way][kind])
            for way in ("local", "end_to_end")
            for kind in ("taps", "gradients")
            if tally.statistics[way][kind].tensors
        ]
        tallies.append(
            {
                "backend": backend,
                "dtype": dtype,
                "tally": tally,
                "peaks": peaks,
                "histogram": histogram(counts["local"], counts["end_to_end"], f"{backend}, {dtype}"),
            }
        )
    sections = {
        **({"findings": "What was found"} if found.failures else {}),
        "tallies": "Cases and errors",
        **({"notes": "Notes"} if found.notes else {}),
    }
    return render(
        "fuzz.html",
        made,
        headline=headline,
        compared=[
            f"Compared: every tensor that {_versions(versions)} computed in {total}, with the float64 "
            f"oracle{drawn}.{' Interrupted.' if found.interrupted else ''}"
        ],
        sections=sections,
        found=found,
        tallies=tallies,
        limits=LIMITS,
    )


def _of_matrix(made: Record) -> str:
    found, names = made.outcome, ordered(finding.backend for finding in made.outcome.findings)
    cells = {(finding.mutant, finding.backend): finding for finding in found.findings}
    mutants = {name: KNOWN.get(name, UNKNOWN) for name in ordered(one.mutant for one in found.findings)}
    sayings = []
    for name in names:
        looked = [
            finding for finding in found.of(backend=name) if finding.status not in ("equivalent", "absent")
        ]
        seen = [finding for finding in looked if finding.status in ("found", "misplaced")]
        right = sum(finding.status == "found" for finding in seen)
        sayings.append(
            f"{name} {len(seen)} of {len(looked)}"
            + (f" ({right} at the right tensor)" if right < len(seen) else "")
        )
    wrong = [finding for finding in found.findings if finding.status not in ("found", "equivalent", "absent")]
    misnamed = [finding for finding in found.findings if finding.cause == "wrong"]
    sections = {
        **({"wrong": "What is not as it should be"} if wrong else {}),
        "matrix": "Mutants",
        "shown": "Where each shows",
    }
    return render(
        "mutants.html",
        made,
        headline=f"Injected bugs that were found: {'; '.join(sayings)}."
        if sayings
        else "Nothing was judged.",
        compared=[
            f"Compared: {_versions({name: found.versions.get(name) for name in names})}, each with "
            f"{counted(len(mutants), 'porting bug')} put in one after the other, "
            f"with the float64 oracle of the unchanged model."
        ],
        sections=sections,
        names=names,
        mutants=mutants,
        cells=cells,
        wrong=wrong,
        misnamed=misnamed,
        seen=sorted(
            (finding for finding in found.findings if finding.row),
            key=lambda finding: finding.status == "found",
        ),
        margin=lambda finding: (
            f"{number(finding.margin)} ✓"
            if finding.status == "found"
            else "none can"
            if finding.status == "equivalent"
            else finding.status
        ),
    )
