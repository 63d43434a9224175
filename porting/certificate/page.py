"""A certificate as a page: one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from concord.conformance.layout import render
from concord.conformance.record import Record, data
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    PROVEN,
    UNVERIFIED,
    Certificate,
    seal,
)

TONES = {PROVEN: "good", FAILED: "bad", NOT_APPLICABLE: "none", UNVERIFIED: "broken"}
SIGNS = {PROVEN: "✓", FAILED: "✗", NOT_APPLICABLE: "–", UNVERIFIED: "?"}

SECTIONS = {
    "items": "Claims",
    "sensitivity": "It could have failed",
    "ledger": "Every tensor",
    "errors": "Errors",
    "files": "Files",
    "about": "Made with",
}

WORST_FIRST = (FAILED, UNVERIFIED, PROVEN, NOT_APPLICABLE)


def page(made: Record) -> str:
    """Return a record of a certificate as HTML."""
    found: Certificate = made.outcome
    counts = {status: sum(item.status == status for item in found.items) for status in WORST_FIRST}
    errors = [
        (f"{backend} {dtype}", worst)
        for backend, by_dtype in found.errors.items()
        for dtype, worst in by_dtype.items()
    ]
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    both = " and ".join(f"{side.path} ({side.format})" for side in (found.source, found.target))
    rest = found.verdict.partition(";")[2].strip()
    compared = [
        f"Compared: {both}: {counted} of {len(found.items)} claims.",
        *([rest[:1].upper() + rest[1:]] if rest else []),
    ]
    return render(
        "certificate.html",
        made,
        Path(__file__).parent / "templates",
        headline=f"{found.verdict.partition(';')[0].rstrip('.')}.",
        compared=compared,
        sections=SECTIONS,
        digest=seal(data(made))["digest"],
        items=sorted(found.items, key=lambda item: WORST_FIRST.index(item.status)),
        tones=TONES,
        signs=SIGNS,
        errors=errors,
        asked=data(made)["asked"],
        tensors=dict.fromkeys(name for _, worst in errors for name in worst),
    )
