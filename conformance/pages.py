"""What random cases, mutants, usual criteria and lockstep came to, as pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from concord.conformance import codec
from concord.conformance.html import histogram, joined
from concord.conformance.layout import render
from concord.conformance.lockstep.page import page as of_lockstep
from concord.conformance.record import LIMITS, Document
from concord.conformance.verdict import number
from concord.conformance.views import ordered
from concord.spec.errors import refuse


def page(data: Mapping[str, Any], read: Document) -> str:
    """Return the page of a record that is not one of a check."""
    return {"fuzz": _of_findings, "mutants": _of_matrix, "criteria": _of_criteria, "lockstep": of_lockstep}[
        read.kind
    ](data, read)


def _tone(exit_code: int) -> str:
    return {0: "good", 1: "bad"}.get(exit_code, "broken")


def _versions(versions: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name} {version}" if version else name for name, version in versions.items())
        or "no backend"
    )


def _of_findings(data: Mapping[str, Any], read: Document) -> str:
    found = read.outcome
    names = ordered(backend for backend, _ in found.tallies)
    failing = ordered(failure.backend for failure in found.failures)
    total, wrong = (
        f"{found.cases:,} random case{'' if found.cases == 1 else 's'}".replace(",", " "),
        sum(failure.times for failure in found.failures),
    )
    headline = (
        f"{joined(failing)} failed in {wrong} run{'' if wrong == 1 else 's'} of {total}, in {len(found.failures)} way{'' if len(found.failures) == 1 else 's'}."
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
    for (backend, dtype), tally in sorted(found.tallies.items()):
        counts = {
            way: [
                sum(column)
                for column in zip(
                    *(tally.statistics[way, kind].histogram for kind in ("taps", "gradients")), strict=True
                )
            ]
            for way in ("local", "end_to_end")
        }
        peaks = [
            (way, kind, tally.statistics[way, kind])
            for way in ("local", "end_to_end")
            for kind in ("taps", "gradients")
            if tally.statistics[way, kind].tensors
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
        data,
        headline=headline,
        tone=_tone(read.exit_code),
        compared=[
            f"Compared: every tensor that {_versions(versions)} computed in {total}, with the float64 oracle{drawn}.{' Interrupted.' if found.interrupted else ''}"
        ],
        sections=sections,
        found=found,
        tallies=tallies,
        limits=LIMITS,
    )


@dataclass(frozen=True)
class Mutant:
    """What the page says of a mutant (:class:`concord.conformance.bugs.bug.Bug`)."""

    group: str
    clause: str
    what: str
    input: str


def _of_matrix(data: Mapping[str, Any], read: Document) -> str:
    found, names = read.outcome, ordered(finding.backend for finding in read.outcome.findings)
    cells = {(finding.mutant, finding.backend): finding for finding in found.findings}
    mutants = {name: codec.understood(Mutant, about) for name, about in data["mutants"].items()}
    refuse(
        [
            f"mutants lacks {finding.mutant!r}, which findings name"
            for finding in found.findings
            if finding.mutant not in mutants
        ][: codec.MOST_PROBLEMS]
    )
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
        data,
        headline=f"Injected bugs that were found: {'; '.join(sayings)}."
        if sayings
        else "Nothing was judged.",
        tone=_tone(read.exit_code),
        compared=[
            f"Compared: {_versions({name: found.versions.get(name) for name in names})}, each with {len(mutants)} porting bug{'' if len(mutants) == 1 else 's'} put in one after the other, with the float64 oracle of the unchanged model."
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


@dataclass(frozen=True)
class Flagged:
    """What a criterion flags of runs: of their outputs, and of any tensor; how many, and of how many."""

    outputs: tuple[int, int] | None = None
    all: tuple[int, int] | None = None


@dataclass(frozen=True)
class Criteria:
    """What a record of usual criteria holds besides what every record has."""

    versions: dict[str, str]
    runs: dict[str, Any]
    flagged: dict[str, dict[str, Flagged]]
    exceptions: dict[str, list[str]]


def _of_criteria(data: Mapping[str, Any], read: Document) -> str:
    found: Criteria = codec.understood(Criteria, data)
    groups = list(next(iter(found.flagged.values()), {}))
    refuse(
        [
            f"flagged.{name} must have the groups {', '.join(groups)}"
            for name, of in found.flagged.items()
            if not groups or list(of) != groups
        ]
        + [
            f"runs.{name} must be a number of runs"
            for name in ("seed", *groups)
            if type(found.runs.get(name)) is not int
        ]
        + [f"exceptions lacks {name!r}" for name in ("missed", "alarms") if name not in found.exceptions]
        + ["flagged has no criterion"] * (not found.flagged)
    )

    def share(pair: tuple[int, int] | None) -> str:
        return f"{100 * pair[0] / pair[1]:.1f} %" if pair and pair[1] else "–"

    rows = [
        (name, [f"{share(of[group].outputs)} / {share(of[group].all)}" for group in groups])
        for name, of in found.flagged.items()
    ]
    missed, alarms = (len(found.exceptions[key]) for key in ("missed", "alarms"))
    return render(
        "criteria.html",
        data,
        headline=f"The derived tolerances miss {missed} of {data['runs'][groups[0]]} faults, each in one case, and flag {alarms} of {sum(data['runs'][group] for group in groups[1:])} right runs.",
        tone=_tone(read.exit_code),
        compared=[
            f"Compared: usual criteria and the judge on the same runs of {_versions(data['versions'])}, seed {data['runs']['seed']}."
        ],
        sections={
            "table": "What each flags",
            **({"exceptions": "What the judge was wrong about"} if missed + alarms else {}),
        },
        groups=groups,
        rows=rows,
    )
