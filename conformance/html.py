"""What a check, golden files, random cases and mutants came to, each as a page.

One HTML file, made of the data of a record alone.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from concord.conformance import drawing
from concord.conformance.campaign import Report
from concord.conformance.diagnosis.replacement import role_of
from concord.conformance.estimate import R, Z
from concord.conformance.layout import render
from concord.conformance.record import Record
from concord.conformance.report import gravity, ordered, repeated, speaker_of, summary
from concord.conformance.verdict import (
    FAILED_WORKER,
    NOT_JUDGED,
    STATUSES,
    Z_BINS,
    Result,
    Row,
    number,
)
from concord.conformance.views import (
    CaseResults,
    cases_of,
    gather,
    judged,
    largest,
    level,
    rows_of,
    tail,
    word,
)
from concord.conformance.wording import counted, joined, plain
from concord.spec.deviations import KNOWN_DEVIATIONS

OPEN = 6
"""Cases that are unfolded when the page is opened: the gravest, as far as there are any that do not agree."""

FINDINGS = 8
"""First divergences that are told in full at the top."""

CELLS = 15_000
"""Tensors, over all runs, up to which every case tells of every run.

Beyond, those that are not unfolded tell of the worst alone.
"""

LINES = 12
"""Last lines of what a failed worker wrote."""

TRUTH = {"check": "oracle", "golden": "published tensors", "compare": "reference"}
MEASURED = ("import_seconds", "start_seconds", "run_seconds", "peak_memory_bytes")


LIMITS: dict[str, Any] = {"z": Z, "rms": R, "bins": Z_BINS}
"""What errors are measured by.

The largest of an element and of a tensor, and the edges of histograms, in sigma.
"""


def page(made: Record) -> str:
    """Return a record as an HTML page."""
    if isinstance(made.outcome, Report):
        return _of_report(made, made.outcome)
    from concord.conformance import pages  # of which some need more than a check

    return pages.page(made)


def _of_report(made: Record, report: Report) -> str:
    results, truth = report.results, TRUTH[made.kind]
    cases = cases_of(results)
    names, dtypes = (ordered(getattr(result, key) for result in results) for key in ("backend", "dtype"))
    failing = [case for case in cases if case.order < 2]
    findings = _findings(report, {id(result): case.anchor for case in cases for result in case.results})
    histograms = _histograms(results, names, dtypes)
    group = {"check": "variant", "golden": "source", "compare": "reference"}[made.kind]
    failures, opened = _failures(results), {case.anchor for case in failing[:OPEN]}
    large = sum(len(rows_of(result)) for result in results) > CELLS
    places = {
        id(result): place
        for place, finding in enumerate(findings[:FINDINGS], 1)
        for result in finding["results"]
    }
    sections = {
        **({"findings": "What diverges"} if findings else {}),
        **({"failures": "What was not judged"} if failures else {}),
        "matrix": f"{group.capitalize()}s",
        "cases": "Cases",
        **({"errors": "Errors"} if histograms else {}),
        "environments": "Backends",
        **({"notes": "Notes"} if report.notes else {}),
        "reading": "How to read this",
    }
    return render(
        "report.html",
        made,
        headline=headline(results, truth),
        tone="bad"
        if any(result.status in ("diverges", "refused", "nondeterministic") for result in results)
        else "broken"
        if made.exit_code == 3
        else "good",
        compared=_compared(report, cases, truth),
        sections=sections,
        truth=truth,
        group=group,
        names=names,
        dtypes=dtypes,
        matrix=_matrix(results, names, dtypes),
        findings=findings[:FINDINGS],
        more_findings=len(findings[FINDINGS:]),
        told=lambda result: places.get(id(result)),
        failures=failures,
        failing=failing,
        agreeing=[case for case in cases if case.order == 2],
        opened=opened,
        histograms=histograms,
        environments=[_about(name, report) for name in names],
        settings=report.settings,
        notes=report.notes,
        figure=functools.partial(_figures, brief=large),
        table=lambda case: _table(case, large and case.anchor not in opened),
        finding=_finding,
        limits=LIMITS,
    )


# Words.


def headline(results: Sequence[Result], truth: str = "oracle") -> str:
    """Return the whole in one sentence."""
    names = ordered(result.backend for result in results)
    found = {name: Counter(result.status for result in results if result.backend == name) for name in names}
    told: set[str] = set()

    def of(*statuses: str) -> tuple[list[str], str, str]:
        """Return the backends that have runs of some statuses and were not told of, and their numbers."""
        having = [name for name in names if any(found[name][one] for one in statuses) and name not in told]
        count = sum(found[name][status] for name in having for status in statuses)
        total = counted(sum(found[name].total() for name in having), "run")
        return having, joined(having) if having else "", f"{count} of {total}"

    parts = []
    diverging, who, share = of("diverges", "refused")
    if diverging:
        parts.append(f"{who} {_verb(diverging, 'diverges', 'diverge')} from the {truth} in {share}")
    told.update(diverging)
    changing, who, share = of("nondeterministic")
    if changing:
        parts.append(f"{who} {_verb(changing, 'differs', 'differ')} when run again in {share}")
    told.clear()
    failing, who, share = of(*FAILED_WORKER)
    if failing:
        parts.append(f"{who} gave no result in {share}")
    unjudged, who, share = of(NOT_JUDGED)
    if unjudged:
        parts.append(f"Concord failed to judge {share} of {who}")
    told.update(diverging, changing, failing, unjudged)
    agreeing, who, _ = of("agrees")
    if agreeing:
        how = "" if parts else " to within rounding, in every tensor of every run that was judged"
        parts.append(f"{who} {_verb(agreeing, 'agrees', 'agree')} with the {truth}{how}")
    told.clear()
    unsure, who, share = of("undetermined")
    if parts and unsure:
        were = "was" if share.endswith(" of 1 run") else "were"
        parts.append(f"{share} of {who} {were} not judged, or not in every section")
    return "; ".join(parts) + "." if parts else "Nothing was judged."


def _verb(names: Sequence[str], one: str, more: str) -> str:
    return one if len(names) == 1 else more


def _compared(report: Report, cases: Sequence[CaseResults], truth: str) -> list[str]:
    """Say what was compared, with what, and what became of it."""
    results, settings = report.results, report.settings
    names = [
        f"{name} {version}" if (version := report.environments.get(name, {}).get("version")) else name
        for name in ordered(result.backend for result in results)
    ]
    groups = ordered(result.group for result in results)
    of_groups = (
        f" of {', '.join(groups) if len(groups) <= 3 else f'{len(groups)} variants or sources'}"
        if groups
        else ""
    )
    how = ", ".join([settings.implementation, settings.execution, *(settings.devices or [settings.device])])
    dtypes = ", ".join(ordered(result.dtype for result in results))
    compared = (
        f"Compared: every tensor that {', '.join(names)} computed in {counted(len(cases), 'case')}"
        f"{of_groups}, in {dtypes} ({how}), with the {truth}."
    )
    return [*([compared] if results else []), f"{summary(report)}."]


def _finding(result: Result) -> dict[str, Any]:
    """Return what is to be said of a run's first divergence."""
    assert result.verdict is not None
    row, diagnosis, end = result.verdict.first_divergence, result.verdict.diagnosis, result.verdict.arrival
    assert row is not None
    there, arrived = judged(row, "end_to_end"), end and judged(end, "end_to_end")
    return {
        "result": result,
        "row": row,
        "judged": row.deciding,
        "clause": result.verdict.clause,
        "diagnosis": diagnosis,
        "seen": diagnosis.beside if diagnosis else (),
        "refuted": diagnosis.refuted if diagnosis else (),
        "at_the_end": end and {"tensor": end.tensor, "ratio": arrived.ratio if arrived else None},
        "end_to_end": there.ratio if row.local and there else None,
    }


def _findings(report: Report, anchors: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the first divergences, one for all runs of a backend that diverge first at the same tensor,
    of whatever layer.
    """
    wrong = [(result, role_of(row.tensor)) for result in report.results if (row := result.first_divergence)]
    told = []
    for entries in gather(wrong, lambda entry: (entry[0].backend, entry[1])):
        found, tensor = [result for result, _ in entries], entries[0][1]
        speaker = speaker_of(found)
        others = [(result, anchors[id(result)]) for result in found if result is not speaker]
        together = [
            one
            for one in report.conclusions
            if others and (one.backend, one.tensor) == (speaker.backend, tensor)
        ]
        finding = _finding(speaker)
        refuted = dict.fromkeys([*finding["refuted"], *(text for one in together for text in one.refuted)])
        told.append(
            {
                **finding,
                "refuted": tuple(refuted),
                "anchor": anchors[id(speaker)],
                "results": found,
                "others": others,
                "together": [one.text for one in together],
            }
        )
    return sorted(told, key=lambda finding: -len(finding["others"]))


def _failures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return what kept backends from giving results, one for all runs of a backend with the same."""
    gathered = gather(
        (result for result in results if result.detail or result.stderr),
        lambda result: (result.backend, result.status, result.detail),
    )
    told = [
        {
            "result": found[0],
            "results": found,
            "lines": next((result.stderr for result in found if result.stderr), "").splitlines()[-LINES:],
        }
        for found in gathered
    ]
    return sorted(told, key=lambda failure: STATUSES.index(failure["result"].status))


# Tables.


def _matrix(results: Sequence[Result], names: Sequence[str], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each group: for each backend, for each precision, the run that speaks for all."""
    gathered: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        gathered.setdefault((result.group, result.backend, result.dtype), []).append(result)

    def cell(group: str, name: str, dtype: str) -> dict[str, Any] | None:
        found = gathered.get((group, name, dtype))
        return (
            {"result": min(found, key=gravity), "count": Counter(result.status for result in found)}
            if found
            else None
        )

    groups = ordered(result.group for result in results)
    return [
        {"group": group, "cells": [[(dtype, cell(group, name, dtype)) for dtype in dtypes] for name in names]}
        for group in groups
    ]


def _table(case: CaseResults, brief: bool) -> dict[str, Any]:
    """Return the tensors of a case.

    For each the errors of all runs in tolerances, or the largest and whose it is.
    """
    results = [result for result in case.results if result.verdict]
    found: dict[str, dict[int, Row]] = {}
    for place, result in enumerate(results):
        for row in rows_of(result):
            found.setdefault(row.tensor, {})[place] = row
    rows = []
    for name, of_runs in found.items():
        place, worst = max(of_runs.items(), key=lambda entry: entry[1].ratio)
        cells = [worst] if brief else [of_runs.get(place) for place in range(len(results))]
        rows.append(
            {"tensor": name, "row": worst, "cells": [_cell(row) for row in cells], "whose": results[place]}
        )
    return {"results": results, "rows": rows, "brief": brief}


def _cell(row: Row | None) -> tuple[str, bool]:
    if row is None:
        return "–", False
    return (
        (number(row.ratio), row.status == "diverges")
        if row.status in ("agrees", "diverges")
        else (row.status, False)
    )


def _about(name: str, report: Report) -> dict[str, Any]:
    """Return what is known of a backend: facts, what was measured, and where it declares to deviate."""
    facts, settings = dict(report.environments.get(name, {})), report.settings
    place = str(facts.get("device") or settings.device)  # its own, where there are several
    device, alone = place.split(":")[0], name.removesuffix(f" {place}")
    declared = facts.pop("deviations", [])
    declared = declared.get(device, []) if isinstance(declared, dict) else declared
    dtypes = facts.get("dtypes")
    if isinstance(dtypes, dict) and device in dtypes:
        facts["dtypes"] = {device: dtypes[device]}
    measured = {key: facts.pop(key) for key in MEASURED if isinstance(facts.get(key), (int, float))}
    deviations = (
        [entry for entry in declared if isinstance(entry, dict)] if isinstance(declared, list) else []
    )
    return {
        "name": name,
        "facts": {key.replace("_", " "): plain(value) for key, value in facts.items()},
        "measured": {
            key.replace("_", " ").removesuffix(" bytes"): _quantity(key, value)
            for key, value in measured.items()
        },
        "deviations": [
            {
                "clause": _clause(entry),
                **{key: str(entry.get(key, "")) for key in ("name", "value", "reason")},
            }
            for entry in deviations
        ],
        "statuses": Counter(result.status for result in report.results if result.backend == name),
        "elsewhere": [
            f"{kind} {places[alone]}"
            for kind, places in (("interpreter", settings.python), ("host", settings.ssh))
            if alone in places
        ],
        "place": place,
        "repeated": repeated([result for result in report.results if result.backend == name]),
    }


def _clause(deviation: Mapping[str, Any]) -> str:
    kind = KNOWN_DEVIATIONS.get(str(deviation.get("name")))
    return str(deviation.get("clause") or (kind.clause if kind else ""))


def _quantity(key: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB" if key.endswith("_bytes") else f"{value:.1f} s"


# Figures.


def _figures(results: Sequence[Result], brief: bool) -> list[dict[str, Any]]:
    """Return strips and lines for runs of one case and precision.

    As many figures as there are different sets of tensors.
    """
    shown = [
        result
        for result in results
        if any(level(row, way) is not None for row in rows_of(result) for way in ("local", "end_to_end"))
    ]
    return [
        _drawn(found, brief)
        for found in gather(shown, lambda result: tuple(row.tensor for row in rows_of(result)))
    ]


def _drawn(results: Sequence[Result], brief: bool) -> dict[str, Any]:
    tables = [rows_of(result) for result in results]
    names = [row.tensor for row in tables[0]]
    kinds = [
        kind
        for kind in ("local", "end_to_end")
        if any(judged(row, kind) for table in tables for row in table)
    ] or ["end_to_end"]
    bands = _bands(names)
    bounds = [sum(size for _, size in bands[:place]) for place in range(1, len(bands))]
    lines = [
        [there.ratio if (there := judged(row, "end_to_end")) else None for row in table] for table in tables
    ]
    about = "; ".join(
        f"{result.backend} {word(result)}" + (f" at {worst.tensor}" if (worst := largest(result)) else "")
        for result in results
    )
    firsts = [result.first_divergence for result in results]
    titles = [_title(list(zip(results, rows, strict=True)), brief) for rows in zip(*tables, strict=True)]
    return {
        "results": results,
        "kinds": kinds,
        "bands": bands,
        "columns": len(names),
        "strips": drawing.strips(
            [[[level(row, kind) for row in table] for table in tables] for kind in kinds],
            titles,
            f"{results[0].case}, {results[0].dtype}: largest error in tolerances: {about}",
            bounds,
            [names.index(first.tensor) if first else None for first in firsts],
        ),
        "growth": drawing.growth(
            lines, f"Error end to end along the {len(names)} tensors, in tolerances", bounds
        ),
        "ticks": drawing.ticks(*drawing.decades(lines)),
    }


def _title(column: Sequence[tuple[Result, Row]], brief: bool) -> str:
    """Return what is said of a tensor that is pointed at.

    Its name, and unless there is little room the errors of each run.
    """
    tensor, clause = column[0][1].tensor, column[0][1].clause
    lines = [f"{tensor} ({clause})" if clause else tensor]
    for result, row in () if brief else column:
        ways = [
            f"{words} z {error.z:.2g} rms {error.rms:.2g}"
            for words, way in (("local", "local"), ("end to end", "end_to_end"))
            if (error := judged(row, way))
        ]
        status = "" if row.status == "agrees" else f" {row.status}"
        ratio = f" {number(row.ratio)}" if row.status in ("agrees", "diverges") else ""
        lines.append(f"{tail(result.backend)}{ratio}{status}: {', '.join(ways) or 'not compared'}")
    return "\n".join(lines)


def _bands(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return what neighbouring tensors belong to, and how many of them there are."""
    bands: list[tuple[str, int]] = []
    for name in names:
        layer = re.match(r"layers\.(\d+)\.", name)
        first = name.partition(".")[0]
        band = (
            f"layer {layer[1]}"
            if layer
            else first
            if first in ("gradients", "embeddings", "attention")
            else "head"
        )
        if bands and bands[-1][0] == band:
            bands[-1] = (band, bands[-1][1] + 1)
        else:
            bands.append((band, 1))
    return bands


def _histograms(
    results: Sequence[Result], names: Sequence[str], dtypes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a histogram for each backend and precision."""
    found = (
        (
            name,
            dtype,
            [
                result
                for result in results
                if (result.backend, result.dtype) == (name, dtype) and result.verdict
            ],
        )
        for name in names
        for dtype in dtypes
    )
    return [_histogram(name, dtype, of_these) for name, dtype, of_these in found if of_these]


def _histogram(name: str, dtype: str, results: Sequence[Result]) -> dict[str, Any]:
    counts = {kind: [0] * (len(LIMITS["bins"]) + 1) for kind in ("local", "end_to_end")}
    most = {"local": 0.0, "end_to_end": 0.0}
    for row in (row for result in results for row in rows_of(result)):
        for kind, count in counts.items():
            error = judged(row, kind)
            if error:
                most[kind] = max(most[kind], error.z)
                for place, elements in enumerate(error.histogram):
                    count[place] += elements
    kind = "local" if sum(counts["local"]) else "end_to_end"
    return {
        "backend": name,
        "dtype": dtype,
        "kind": kind,
        "largest": most[kind],
        "end_to_end": most["end_to_end"],
        **histogram(counts[kind], counts["end_to_end"] if kind == "local" else [], f"{name}, {dtype}"),
    }


def histogram(filled: Sequence[int], outlined: Sequence[int], whose: str) -> dict[str, Any]:
    """Return the drawing of how many elements have which error in sigma, and what is said below it."""
    edges, z = LIMITS["bins"], LIMITS["z"]
    over = sum(count for count, edge in zip(filled, [0.0, *edges], strict=True) if edge >= z)
    return {
        "elements": sum(filled),
        "below": sum(count for count, edge in zip(filled, edges, strict=False) if edge <= 1),
        "beyond": over,
        "at": round(100 * drawing.position(z, edges) / (len(edges) + 1), 1),
        "one": round(100 * drawing.position(1.0, edges) / (len(edges) + 1), 1),
        "svg": drawing.histogram(
            filled,
            outlined,
            edges,
            z,
            f"{whose}: errors of {sum(filled)} elements in sigma; {over} beyond {z:g}",
        ),
    }
