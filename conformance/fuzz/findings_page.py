"""The page of a hunt."""

from __future__ import annotations

from concord.conformance.run import drawing
from concord.conformance.run.page import render
from concord.conformance.run.record import Record
from concord.conformance.run.report import FirstDivergence


def findings_page(record: Record) -> str:
    """Page of a record."""
    outcome = record.outcome
    names = {id(failure.result): failure.name for failure in outcome.failures}
    tallies = []
    for backend, dtype, tally in outcome.each():
        counts = drawing.summed(statistics.histogram for statistics in tally.statistics.values())
        tallies.append((backend, dtype, tally, drawing.histogram(counts, [], f"{backend}, {dtype}")))
    return render(
        "fuzz.html",
        record,
        tallies=tallies,
        divergence=lambda result: FirstDivergence([result], []),
        anchor_of=lambda result: names[id(result)],
    )
