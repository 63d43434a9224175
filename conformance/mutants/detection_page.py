"""The page of mutants."""

from __future__ import annotations

from collections import Counter

from concord.conformance.bugs.catalogue import KNOWN
from concord.conformance.run.page import render
from concord.conformance.run.record import Record
from concord.conformance.run.report import ordered


def detection_page(record: Record) -> str:
    """Page of a record."""
    findings = record.outcome.findings
    names = ordered(finding.backend for finding in findings)
    judged = [finding for finding in findings if finding.status != "absent"]

    def share(name: str) -> str:
        statuses = Counter(finding.status for finding in judged if finding.backend == name)
        exact, detections = statuses["found"], statuses["found"] + statuses["misplaced"]
        return f"{name} {detections} of {statuses.total()}" + f" ({exact} at the correct tensor)" * (
            exact < detections
        )

    blank = dict.fromkeys(("operation", "clause", "text", "variant", "scenario"), "")
    return render(
        "mutants.html",
        record,
        shares=[*map(share, names)],
        names=names,
        mutants={name: KNOWN.get(name, blank) for name in ordered(finding.mutant for finding in findings)},
        cells={(finding.mutant, finding.backend): finding for finding in findings},
        wrong=[finding for finding in judged if finding.status != "found"],
        misnamed=[finding for finding in findings if finding.cause == "wrong"],
        seen=sorted(
            (finding for finding in findings if finding.row), key=lambda finding: finding.status == "found"
        ),
    )
