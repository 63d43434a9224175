"""What random cases, mutants and lockstep came to, as pages."""

from __future__ import annotations

from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.html import LIMITS, histogram, summed
from concord.conformance.layout import render
from concord.conformance.lockstep.page import page as of_lockstep
from concord.conformance.record import Record
from concord.conformance.report import FirstDivergence, ordered

UNKNOWN = dict.fromkeys(("operation", "clause", "text", "variant", "scenario"), "")
"""What is said of a mutant that the catalogue does not know."""


def page(made: Record) -> str:
    """Return the page of a record that is not one of a check."""
    return {"fuzz": _of_findings, "mutants": _of_matrix, "lockstep": of_lockstep}[made.kind](made)


def _of_findings(made: Record) -> str:
    tallies = []
    for backend, dtype, tally in made.outcome.each():
        counts = summed(one.histogram for one in tally.statistics.values())
        tallies.append((backend, dtype, tally, histogram(counts, [], f"{backend}, {dtype}")))
    names = {id(failure.result): failure.name for failure in made.outcome.failures}
    return render(
        "fuzz.html",
        made,
        tallies=tallies,
        limits=LIMITS,
        divergence=lambda result: FirstDivergence([result], []),
        anchor_of=lambda result: names[id(result)],
    )


def _of_matrix(made: Record) -> str:
    found, names = made.outcome, ordered(finding.backend for finding in made.outcome.findings)
    there = [finding for finding in found.findings if finding.status != "absent"]

    def said(name: str) -> str:
        looked = [finding.status for finding in there if finding.backend == name]
        right = looked.count("found")
        seen = right + looked.count("misplaced")
        return f"{name} {seen} of {len(looked)}" + (f" ({right} at the right tensor)" if right < seen else "")

    return render(
        "mutants.html",
        made,
        sayings=[*map(said, names)],
        names=names,
        mutants={name: KNOWN.get(name, UNKNOWN) for name in ordered(one.mutant for one in found.findings)},
        cells={(finding.mutant, finding.backend): finding for finding in found.findings},
        wrong=[finding for finding in there if finding.status != "found"],
        misnamed=[finding for finding in found.findings if finding.cause == "wrong"],
        seen=sorted(
            (finding for finding in found.findings if finding.row),
            key=lambda finding: finding.status == "found",
        ),
    )
