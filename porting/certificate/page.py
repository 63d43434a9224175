"""A certificate as a page: one file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from concord.conformance.layout import render
from concord.conformance.record import Record, data
from concord.conformance.wording import gather
from concord.porting.certificate.certificate import (
    FAILED,
    HOW,
    NOT_APPLICABLE,
    OUTPUTS,
    PROVEN,
    UNVERIFIED,
    Certificate,
    seal,
)

TONES = {FAILED: "bad", UNVERIFIED: "broken", PROVEN: "good", NOT_APPLICABLE: "none"}
"""Of each status, the worst first."""

SIGNS = {PROVEN: "✓", FAILED: "✗", NOT_APPLICABLE: "–", UNVERIFIED: "?"}

SECTIONS = {
    "claims": "Claims",
    "sensitivity": "It could have failed",
    "ledger": "Every tensor",
    "errors": "Errors",
    "files": "Files",
    "about": "Made with",
}


def page(made: Record) -> str:
    """Return a record of a certificate as HTML."""
    found: Certificate = made.outcome
    counts: Counter[str] = Counter(claim.status for claim in found.claims)
    counted = ", ".join(f"{counts[status]} {status}" for status in TONES if counts[status])
    both = " and ".join(f"{side.path} ({side.format})" for side in (found.source, found.target))
    headline, _, rest = found.verdict.rstrip(".").partition("; ")
    compared = [f"Compared: {both}: {counted} of {len(found.claims)} claims."]
    compared += [f"{rest[:1].upper()}{rest[1:]}."] if rest else []
    judged = [run for run in found.report.results if run.group == "target" and run.verdict]
    apart = {pair.name: pair.said for pair in found.compared.pairs}
    mine, theirs = found.source.parameters, found.target.parameters
    by_kind = {
        kind: Counter((one.backend, one.status) for one in of_kind)
        for kind, of_kind in gather(found.mutants, lambda one: one.mutant).items()
    }
    return render(
        "certificate.html",
        made,
        Path(__file__).parent / "templates",
        headline=f"{headline}.",
        compared=compared,
        sections=SECTIONS,
        digest=seal(data(made))["digest"],
        claims=sorted(found.claims, key=lambda claim: [*TONES].index(claim.status)),
        tones=TONES,
        signs=SIGNS,
        mutants={**by_kind, "all": sum(by_kind.values(), Counter())},
        reasons=Counter(
            one.detail for one in found.mutants if (one.backend, one.status) == (OUTPUTS, "equivalent")
        ),
        unshown=[one for one in found.mutants if one.status in ("missed", "alarm")],
        parameters=[
            (name, mine.get(name), theirs.get(name), apart.get(name, "")) for name in {**mine, **theirs}
        ],
        judged=judged,
        about={**vars(found.asked), **{key: getattr(found.report.settings, key) for key in HOW}},
        tensors=dict.fromkeys(row.tensor for run in judged for row in run.table),
    )
