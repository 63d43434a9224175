"""The page of a check, golden files, or a comparison."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from concord.conformance.judging.verdict import FAILED_WORKER, NOT_JUDGED, Result, Row, number
from concord.conformance.run import drawing
from concord.conformance.run.campaign import Report
from concord.conformance.run.page import render
from concord.conformance.run.record import Record
from concord.conformance.run.report import (
    SHORT,
    findings_of,
    gravity,
    matrix,
    ordered,
    repeated,
    select,
    summary,
    tail,
    word,
)
from concord.conformance.wording import counted, gather, joined
from concord.spec.deviations import KNOWN_DEVIATIONS

# Maximum number of failed cases that are initially unfolded.
OPEN = 6

# Maximum number of first divergences shown in full.
FINDINGS = 8

# With more tensors in all runs, folded cases show only the worst run: a cell for each tensor would make the
# page too large.
CELLS = 15_000

WAYS = ("local", "end_to_end")

# If a name contains several layer lists, match the outermost; gradients match none.
LAYER = re.compile(r"(?!gradients\.)(?:\w+\.)*?([A-Za-z_]\w*?)s?\.(\d+)\b")

GROUPS = {"check": "variant", "golden": "source", "compare": "candidate"}


@dataclass(frozen=True, eq=False)
class CaseResults:
    """All results of one case."""

    anchor: str
    results: list[Result]

    @property
    def worst(self) -> Result:
        """The worst result."""
        return min(self.results, key=gravity)

    @property
    def order(self) -> int:
        """0 for a divergence, 1 for a failed run, else 2."""
        statuses = {result.status for result in self.results}
        failed = statuses & {*FAILED_WORKER, NOT_JUDGED, "refused", "nondeterministic"}
        return 0 if "diverges" in statuses else 1 if failed else 2

    @property
    def by_dtype(self) -> dict[str, list[Result]]:
        """Results by dtype."""
        return gather(self.results, lambda result: result.dtype)

    @property
    def chips(self) -> list[Result]:
        """Each backend's worst result; for a failed case, only bad results."""
        fine = ("absent", "unsupported", *(["agrees"] if self.order < 2 else []))
        shown = [result for result in self.results if result.status not in fine]
        return [
            min(results, key=gravity) for results in gather(shown, lambda result: result.backend).values()
        ]

    @property
    def silent(self) -> list[tuple[Result, str]]:
        """Results without a chart, grouped by reason."""
        mute = [result for result in self.results if not result.verdict or result.status == "undetermined"]
        gathered = gather(mute, lambda result: (result.backend, result.status, result.detail))
        return [(results[0], ", ".join(result.dtype for result in results)) for results in gathered.values()]


def cases_of(results: Sequence[Result]) -> list[CaseResults]:
    """Cases, divergent ones first."""
    gathered = gather(results, lambda result: (result.group, result.case, result.part)).values()
    cases = [
        CaseResults(f"case-{place}", results_of_case) for place, results_of_case in enumerate(gathered, 1)
    ]
    return sorted(cases, key=lambda case: case.order)


def results_page(record: Record) -> str:
    """A report's page."""
    report: Report = record.outcome
    results, truth = report.results, "published tensors" if record.kind == "golden" else "reference"
    cases = cases_of(results)
    names, dtypes = (ordered(getattr(result, key) for result in results) for key in ("backend", "dtype"))
    findings = sorted(findings_of(report), key=lambda finding: -len(finding.results))
    anchors = {id(result): case.anchor for case in cases for result in case.results}
    opened = [case.anchor for case in cases if case.order < 2][:OPEN]
    large = sum(len(result.table) for result in results) > CELLS
    wrong = {result.status for result in results} & {"diverges", "refused", "nondeterministic"}
    places = {
        id(result): place
        for place, finding in enumerate(findings[:FINDINGS], 1)
        for result in finding.results
    }
    ended = f" It was stopped with {counted(report.unfinished, 'run')} left."
    return render(
        "report.html",
        record,
        headline=headline(results, truth) + ended * bool(report.unfinished),
        tone="bad" if wrong else "broken" if record.exit_code else "good",
        summary=summary(report),
        truth=truth,
        group=GROUPS[record.kind],
        groups=ordered(result.group for result in results),
        names=names,
        dtypes=dtypes,
        matrix=matrix(report),
        findings=findings[:FINDINGS],
        more_findings=len(findings[FINDINGS:]),
        anchor_of=lambda result: anchors[id(result)],
        place_of=lambda result: places.get(id(result)),
        failures=_failures(results),
        cases=cases,
        opened=opened,
        histograms=[
            (name, dtype, _errors(judged_results, f"{name}, {dtype}"))
            for name in names
            for dtype in dtypes
            if (judged_results := [run for run in select(report, backend=name, dtype=dtype) if run.verdict])
        ],
        environments=[_about(name, report) for name in names],
        known=KNOWN_DEVIATIONS,
        figure=partial(_figures, brief=large),
        tensors_of=lambda case: _table(case, large and case.anchor not in opened),
    )


def headline(results: Sequence[Result], truth: str) -> str:
    """Summarize results in a sentence."""
    counts_of = {
        name: Counter(result.status for result in of_one)
        for name, of_one in gather(results, lambda result: result.backend).items()
    }

    def share(names: Sequence[str], statuses: Sequence[str]) -> str:
        count = sum(counts_of[name][status] for name in names for status in statuses)
        total = sum(counts_of[name].total() for name in names)
        return f" in {count} of {total} runs" * (total > len(names))

    agreeing = [name for name, counts in counts_of.items() if counts["agrees"]]
    parts = []
    for statuses, words in (
        (("diverges", "refused"), f"diverged from the {truth}"),
        (("nondeterministic",), "differed when run again"),
        (FAILED_WORKER, "gave no result"),
        ((NOT_JUDGED,), "gave a result that a bug in Concord left unjudged"),
    ):
        names = [name for name, counts in counts_of.items() if counts.keys() & {*statuses}]
        agreeing = [name for name in agreeing if name not in names]
        if names:
            parts.append(f"{joined(names)} {words}{share(names, statuses)}")
    if agreeing:
        how = "" if parts else " to within rounding, in every tensor of every run that was judged"
        parts.append(f"{joined(agreeing)} agreed with the {truth}{how}")
    unsure = [name for name, counts in counts_of.items() if counts["undetermined"]]
    if parts and unsure:
        parts.append(f"not every section of {joined(unsure)} was judged{share(unsure, ('undetermined',))}")
    return "; ".join(parts) + "." if parts else "Nothing was judged."


def _failures(results: Sequence[Result]) -> list[list[Result]]:
    gathered = gather(
        (result for result in results if result.detail or result.stderr),
        lambda result: (result.backend, result.status, result.detail),
    )
    return sorted(gathered.values(), key=lambda alike: gravity(alike[0]))


# Tables.


def _table(case: CaseResults, brief: bool) -> dict[str, Any]:
    results = [result for result in case.results if result.verdict]
    rows_of: dict[str, dict[int, Row]] = {}
    for place, result in enumerate(results):
        for row in result.table:
            rows_of.setdefault(row.tensor, {})[place] = row
    rows = []
    for name, of_runs in rows_of.items():
        place, worst = max(of_runs.items(), key=lambda entry: entry[1].ratio)
        cells = [worst] if brief else [of_runs.get(place) for place in range(len(results))]
        rows.append({"tensor": name, "row": worst, "cells": cells, "whose": results[place]})
    each = [f"{tail(result.backend)} {SHORT.get(result.dtype, result.dtype)}" for result in results]
    return {"heads": ["largest error", "of"] if brief else each, "rows": rows, "brief": brief}


def _about(name: str, report: Report) -> dict[str, Any]:
    facts, results = dict(report.environments.get(name, {})), select(report, backend=name)
    return {
        "name": name,
        "facts": facts,
        "deviations": facts.pop("deviations", None),
        "statuses": Counter(result.status for result in results),
        "repeated": repeated(results),
    }


# Figures.


def _figures(results: Sequence[Result], brief: bool) -> list[dict[str, Any]]:
    shown = [
        result
        for result in results
        if any(drawing.level(row, way) is not None for row in result.table for way in WAYS)
    ]
    gathered = gather(shown, lambda result: tuple(row.tensor for row in result.table))
    return [_drawn(alike, names, brief) for names, alike in gathered.items()]


def _drawn(results: Sequence[Result], names: Sequence[str], brief: bool) -> dict[str, Any]:
    tables = [result.table for result in results]
    kinds = [way for way in WAYS if any(row.judged(way) for table in tables for row in table)] or WAYS[1:]
    bands = _bands(tables[0])
    bounds = [sum(size for _, size in bands[:place]) for place in range(1, len(bands))]
    lines = [
        [judgement.ratio if (judgement := row.judged("end_to_end")) else None for row in table]
        for table in tables
    ]
    about = "; ".join(f"{result.backend} {word(result)}" for result in results)
    firsts = [result.first_divergence for result in results]
    titles = [_title(list(zip(results, rows, strict=True)), brief) for rows in zip(*tables, strict=True)]
    return {
        "results": results,
        "kinds": kinds,
        "bands": bands,
        "columns": len(names),
        "strips": {
            "blocks": [[[drawing.level(row, kind) for row in table] for table in tables] for kind in kinds],
            "titles": titles,
            "label": f"{results[0].case}, {results[0].dtype}: largest error in tolerances: {about}",
            "bounds": bounds,
            "first": [names.index(first.tensor) if first else None for first in firsts],
        },
        "growth": drawing.growth(
            lines, f"End-to-end error over the {len(names)} tensors, in tolerances", bounds
        ),
    }


def _title(column: Sequence[tuple[Result, Row]], brief: bool) -> str:
    tensor, clause = column[0][1].tensor, column[0][1].clause
    lines = [f"{tensor} ({clause})" if clause else tensor]
    for result, row in () if brief else column:
        ways = [
            f"{way.replace('_', ' ')} z {error.z:.2g} rms {error.rms:.2g}"
            for way in WAYS
            if (error := row.judged(way))
        ]
        status = "" if row.status == "agrees" else f" {row.status}"
        ratio = f" {number(row.ratio)}" if row.status in ("agrees", "diverges") else ""
        lines.append(f"{tail(result.backend)}{ratio}{status}: {', '.join(ways) or 'not compared'}")
    return "\n".join(lines)


def _bands(rows: Sequence[Row]) -> list[tuple[str, int]]:
    def band(row: Row) -> str:
        first, layer = row.tensor.partition(".")[0], LAYER.match(row.tensor)
        kind = first if first in ("gradients", "embeddings", "attention") else "head" * bool(row.clause)
        return f"{layer[1]} {layer[2]}" if layer else kind

    return [(label, len(list(members))) for label, members in groupby(map(band, rows))]


def _errors(results: Sequence[Result], whose: str) -> dict[str, Any]:
    judged = {
        way: [judgement for result in results for row in result.table if (judgement := row.judged(way))]
        for way in WAYS
    }
    local, end_to_end = (
        drawing.summed(judgement.histogram for judgement in judgements) for judgements in judged.values()
    )
    kind = "local" if any(local) else "end_to_end"
    largest = {
        way: max((judgement.z for judgement in judgements), default=0.0) for way, judgements in judged.items()
    }
    counts = (local, end_to_end) if any(local) else (end_to_end, [])
    return {
        **drawing.histogram(*counts, whose),
        "kind": kind,
        "largest": largest[kind],
        "end_to_end": largest["end_to_end"],
    }
