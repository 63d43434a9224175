"""Results as a page: one HTML file that needs nothing else, made from the data of a record alone (conformance/templates/)."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from concord.conformance import drawing
from concord.conformance.campaign import FAILED_WORKER, NOT_JUDGED
from concord.conformance.report import SHORT, WORST_FIRST, number
from concord.conformance.views import TONES, Case, Error, Run, Tensor, cases_of, clean, ordered, run_of, tail
from concord.spec.deviations import KINDS

OPEN = 6
"""Cases that are unfolded when the page is opened: the gravest, as far as there are any that do not agree."""

FINDINGS = 8
"""First divergences that are told in full at the top."""

ROWS = 12
"""Tensors of a diverging run that are listed."""

TABLES = 24
"""Diverging runs whose tensors are listed."""

WORDS = 30_000
"""Judged tensors, over all runs, up to which pointing at a tensor tells of every backend; beyond, only of the worst where all agree."""

LINES = 12
"""Last lines of what a failed worker wrote."""

TRUTH = {"check": "oracle", "golden": "published tensors"}
MEASURED = ("import_seconds", "start_seconds", "run_seconds", "peak_memory_bytes")


def page(data: Mapping[str, Any]) -> str:
    """Return a record as an HTML page.

    Args:
        data: what :func:`concord.conformance.record.record` or :func:`concord.conformance.record.read` returned.
    """
    data = clean(data)
    runs = [run_of(result, data) for result in data["results"]]
    cases = cases_of(runs)
    names, dtypes = (ordered(getattr(run, key) for run in runs) for key in ("backend", "dtype"))
    failing = [case for case in cases if case.order < 2]
    findings = _findings(runs, {run: case.anchor for case in cases for run in case.runs})
    text: str = _environment().get_template("report.html").render(
        data=data,
        headline=headline(runs, TRUTH[data["kind"]]),
        truth=TRUTH[data["kind"]],
        tone="bad" if any(run.status in ("diverges", "refused", "nondeterministic") for run in runs) else "broken" if data["exit_code"] == 3 else "good",
        counts=Counter(run.status for run in sorted(runs, key=lambda run: run.gravity)),
        names=names,
        dtypes=dtypes,
        matrix=_matrix(runs, names, dtypes),
        findings=findings[:FINDINGS],
        more_findings=len(findings[FINDINGS:]),
        failures=_failures(runs),
        failing=failing,
        agreeing=[case for case in cases if case.order == 2],
        opened={case.anchor for case in failing[:OPEN]},
        listed=_listed(cases),
        spreads=_spreads(runs, names, dtypes, data["limits"]),
        environments=[_about(name, runs, data) for name in names],
        figure=functools.partial(_figures, brief=sum(len(run.tensors) for run in runs) > WORDS),
        finding=_finding,
        most=ROWS,
    )
    return text


@functools.cache
def style() -> str:
    """Return the style sheet that Concord's pages share."""
    return (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number,
        nine=lambda value: f"{value:.9g}",
        three=lambda value: f"{value:.3g}",
        short=lambda dtype: SHORT.get(dtype, dtype),
        tone=lambda status: TONES.get(status, "broken"),
        verb=lambda status, count: {"agrees": "agree", "diverges": "diverge"}.get(status, status) if count != 1 else status,
        percent=_percent,
        soft=_soft,
    )
    return environment


def _soft(name: str) -> Markup:
    """Return a name that may be broken after a dot, colon or slash."""
    return Markup("<wbr>").join(re.findall(r"[^.:/]*[.:/]|[^.:/]+", name))


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}" if share in (0, 100) else f"{min(max(share, 0.1), 99.9):.1f}"


# Words.


def headline(runs: Sequence[Run], truth: str = "oracle") -> str:
    """Return the whole in one sentence."""
    names = ordered(run.backend for run in runs)
    found = {name: Counter(run.status for run in runs if run.backend == name) for name in names}
    diverging = [name for name in names if found[name]["diverges"] + found[name]["refused"]]
    failing = [name for name in names if any(found[name][status] for status in FAILED_WORKER)]
    changing = [name for name in names if found[name]["nondeterministic"] and name not in diverging]
    unjudged = [name for name in names if found[name][NOT_JUDGED]]
    agreeing = [name for name in names if found[name]["agrees"] and name not in (*diverging, *failing, *changing, *unjudged)]

    def total(of_these: Sequence[str]) -> str:
        count = sum(found[name].total() for name in of_these)
        return f"{count} run{'' if count == 1 else 's'}"

    parts = []
    if diverging:
        wrong = sum(found[name]["diverges"] + found[name]["refused"] for name in diverging)
        parts.append(f"{_and(diverging)} {_verb(diverging, 'diverges', 'diverge')} from the {truth} in {wrong} of {total(diverging)}")
    if changing:
        differ = sum(found[name]["nondeterministic"] for name in changing)
        parts.append(f"{_and(changing)} {_verb(changing, 'differs', 'differ')} when run again in {differ} of {total(changing)}")
    if failing:
        owed = sum(found[name][status] for name in failing for status in FAILED_WORKER)
        parts.append(f"{_and(failing)} gave no result in {owed} of {total(failing)}")
    if unjudged:
        parts.append(f"Concord failed to judge {sum(found[name][NOT_JUDGED] for name in unjudged)} of {total(unjudged)} of {_and(unjudged)}")
    if agreeing:
        parts.append(f"{_and(agreeing)} {_verb(agreeing, 'agrees', 'agree')} with the {truth}" + ("" if parts else " to within rounding, in every tensor of every run that was judged"))
    return "; ".join(parts) + "." if parts else "Nothing was judged."


def _verb(names: Sequence[str], one: str, more: str) -> str:
    return one if len(names) == 1 else more


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _finding(run: Run) -> dict[str, Any]:
    """Return what is to be said of a run's first divergence."""
    assert run.first is not None
    row = run.rows[run.first]
    judged = row["local"] or row["end_to_end"]
    values = {key: float(row[key]) for key in ("actual", "expected", "tolerance", "ratio")}
    return {
        **row,
        **values,
        "clause": run.diagnosis["clauses"][0] if run.diagnosis else row["clause"],
        "run": run,
        "judged": judged,
        "difference": values["actual"] - values["expected"],
        "place": ", ".join(map(str, row["element"])),
        "z": float(judged["z"]) if judged else math.inf,
        "rms": float(judged["rms"]) if judged else math.inf,
        "arrives": _arrival(run, row["tensor"]),
        "arrives_here": float(row["end_to_end"]["ratio"]) if row["local"] and row["end_to_end"] and row["end_to_end"]["status"] != "undetermined" else None,
    }


def _arrival(run: Run, first: str) -> dict[str, Any] | None:
    """Return how far off the result of the model is; None where it began there."""
    end = next((tensor for name in ("logits", "loss") for tensor in run.tensors if tensor.name == name), None)
    if end is None or end.name == first:
        return None
    return {"tensor": end.name, "ratio": end.end_to_end.ratio if end.end_to_end else None}


def _findings(runs: Sequence[Run], anchors: Mapping[Run, str]) -> list[dict[str, Any]]:
    """Return the first divergences, one for all runs of a backend that diverge first at the same tensor."""
    gathered: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.first is not None and run.first in run.rows:
            gathered.setdefault((run.backend, run.first), []).append(run)
    told = []
    for found in gathered.values():
        speaker = min(found, key=lambda run: run.gravity)
        others = [(run, anchors[run]) for run in found if run is not speaker]
        told.append({**_finding(speaker), "anchor": anchors[speaker], "others": others})
    return sorted(told, key=lambda finding: -len(finding["others"]))


def _failures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what kept backends from giving results, one for all runs of a backend with the same."""
    gathered: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.detail or run.stderr:
            gathered.setdefault((run.backend, run.status, run.detail), []).append(run)
    told = [
        {"run": found[0], "runs": found, "lines": next((run.stderr for run in found if run.stderr), "").splitlines()[-LINES:]}
        for found in gathered.values()
    ]
    return sorted(told, key=lambda failure: WORST_FIRST.index(failure["run"].status))


# Tables.


def _matrix(runs: Sequence[Run], names: Sequence[str], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each group: for each backend, for each precision, the run that speaks for all."""
    gathered: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        gathered.setdefault((run.group, run.backend, run.dtype), []).append(run)

    def cell(group: str, name: str, dtype: str) -> dict[str, Any] | None:
        found = gathered.get((group, name, dtype))
        return {"run": min(found, key=lambda run: run.gravity), "count": Counter(run.status for run in found)} if found else None

    groups = ordered(run.group for run in runs)
    return [{"group": group, "cells": [[(dtype, cell(group, name, dtype)) for dtype in dtypes] for name in names]} for group in groups]


def _listed(cases: Sequence[Case]) -> set[Run]:
    """Return the diverging runs whose tensors are listed: on a page there is room for so many."""
    return set([run for case in cases for run in case.runs if run.status == "diverges"][:TABLES])


def _about(name: str, runs: Sequence[Run], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a backend: facts, what was measured, and where it declares to deviate."""
    facts = dict(data["backends"].get(name, {}))
    place = str(facts.get("device") or data["settings"]["device"])  # its own, where there are several
    device, alone = place.split(":")[0], name.removesuffix(f" {place}")
    declared = facts.pop("deviations", [])
    declared = declared.get(device, []) if isinstance(declared, dict) else declared
    dtypes = facts.get("dtypes")
    if isinstance(dtypes, dict) and device in dtypes:
        facts["dtypes"] = {device: dtypes[device]}
    measured = {key: facts.pop(key) for key in MEASURED if isinstance(facts.get(key), (int, float))}
    deviations = [entry for entry in declared if isinstance(entry, dict)] if isinstance(declared, list) else []
    return {
        "name": name,
        "facts": {key.replace("_", " "): plain(value) for key, value in facts.items()},
        "measured": {key.replace("_", " ").removesuffix(" bytes"): _quantity(key, value) for key, value in measured.items()},
        "deviations": [{"clause": _clause(entry), **{key: str(entry.get(key, "")) for key in ("name", "value", "reason")}} for entry in deviations],
        "statuses": Counter(run.status for run in runs if run.backend == name),
        "elsewhere": [f"{kind} {data['settings'][key][alone]}" for kind, key in (("interpreter", "python"), ("host", "ssh")) if alone in data["settings"][key]],
        "place": place,
        "repeated": _repeated([run for run in runs if run.backend == name and run.repeats]),
    }


def _repeated(runs: Sequence[Run]) -> str:
    """Return whether runs on the same inputs gave the same bits, in words; nothing if none were repeated."""
    if not runs:
        return ""
    differing = [(run, run.repeats["differing"]) for run in runs if run.repeats and not run.repeats["equal"]]
    head = f"{runs[0].repeats['times'] if runs[0].repeats else 1} runs each of {len(runs)} job{'' if len(runs) == 1 else 's'}"
    if not differing:
        return f"{head}: bit-equal"
    first, tensors = differing[0]
    return f"{head}: {sum(len(names) for _, names in differing)} tensors of {len(differing)} differ, first {tensors[0]} of {first.case}, {first.dtype}"


def _clause(deviation: Mapping[str, Any]) -> str:
    kind = KINDS.get(str(deviation.get("name")))
    return str(deviation.get("clause") or (kind.clause if kind else ""))


def _quantity(key: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB" if key.endswith("_bytes") else f"{value:.1f} s"


def plain(value: object) -> str:
    """Return a fact as a person writes it."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "on", False: "off"}[value]
    return str(value)


# Figures.


def _figures(runs: Sequence[Run], brief: bool) -> list[dict[str, Any]]:
    """Return strips and lines for runs of one case and precision: as many figures as there are different sets of tensors."""
    brief = brief and not any(run.beyond for run in runs)
    gathered: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        if any(tensor.level(kind) is not None for tensor in run.tensors for kind in ("local", "end_to_end")):
            gathered.setdefault(tuple(tensor.name for tensor in run.tensors), []).append(run)
    return [_drawn(found, brief) for found in gathered.values()]


def _drawn(runs: Sequence[Run], brief: bool) -> dict[str, Any]:
    tensors = runs[0].tensors
    kinds = [kind for kind in ("local", "end_to_end") if any(getattr(tensor, kind) for run in runs for tensor in run.tensors)] or ["end_to_end"]
    bands = _bands([tensor.name for tensor in tensors])
    bounds = [sum(size for _, size in bands[:place]) for place in range(1, len(bands))]
    names = [tensor.name for tensor in tensors]
    lines = [[tensor.end_to_end.ratio if tensor.end_to_end else None for tensor in run.tensors] for run in runs]
    about = "; ".join(f"{run.backend} {run.word}" + (f" at {run.largest.name}" if run.largest else "") for run in runs)
    return {
        "runs": runs,
        "kinds": kinds,
        "bands": bands,
        "columns": len(tensors),
        "strips": drawing.strips(
            [[[tensor.level(kind) for tensor in run.tensors] for run in runs] for kind in kinds],
            [_title([(run, run.tensors[place]) for run in runs], brief) for place in range(len(tensors))],
            f"{runs[0].case}, {runs[0].dtype}: largest error in tolerances: {about}",
            bounds,
            [names.index(run.first) if run.first in names else None for run in runs],
        ),
        "growth": drawing.growth(lines, f"Error end to end along the {len(tensors)} tensors, in tolerances", bounds),
        "ticks": drawing.ticks(*drawing.decades(lines)),
    }


def _title(column: Sequence[tuple[Run, Tensor]], brief: bool) -> str:
    """Return what is said of a tensor that is pointed at: of each run, or of the worst."""
    lines = [f"{column[0][1].name} ({column[0][1].clause})"]
    for run, tensor in [max(column, key=lambda entry: entry[1].ratio)] if brief else column:
        ways = [f"{word} z {e.z:.2g} rms {e.rms:.2g}" for word, e in (("local", tensor.local), ("end to end", tensor.end_to_end)) if e]
        status = "" if tensor.status == "agrees" else f" {tensor.status}"
        ratio = f" {number(tensor.ratio)}" if tensor.status in ("agrees", "diverges") else ""
        lines.append(f"{tail(run.backend)}{ratio}{status}: {', '.join(ways) or 'not compared'}")
    return "\n".join(lines)


def _bands(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return what neighbouring tensors belong to, and how many of them there are."""
    bands: list[tuple[str, int]] = []
    for name in names:
        layer = re.match(r"layers\.(\d+)\.", name)
        first = name.partition(".")[0]
        band = f"layer {layer[1]}" if layer else first if first in ("gradients", "embeddings", "attention") else "head"
        if bands and bands[-1][0] == band:
            bands[-1] = (band, bands[-1][1] + 1)
        else:
            bands.append((band, 1))
    return bands


def _spreads(runs: Sequence[Run], names: Sequence[str], dtypes: Sequence[str], limits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a histogram for each backend and precision."""
    found = ((name, dtype, [run for run in runs if (run.backend, run.dtype) == (name, dtype) and run.tensors]) for name in names for dtype in dtypes)
    return [_spread(name, dtype, of_these, limits) for name, dtype, of_these in found if of_these]


def _spread(name: str, dtype: str, runs: Sequence[Run], limits: Mapping[str, Any]) -> dict[str, Any]:
    edges = limits["bins"]
    counts = {kind: [0] * (len(edges) + 1) for kind in ("local", "end_to_end")}
    largest = {"local": 0.0, "end_to_end": 0.0}
    for run in runs:
        for tensor in run.tensors:
            for kind, count in counts.items():
                error: Error | None = getattr(tensor, kind)
                if error:
                    largest[kind] = max(largest[kind], error.z)
                    for place, elements in enumerate(error.spread[: len(count)]):
                        count[place] += elements
    kind = "local" if sum(counts["local"]) else "end_to_end"
    filled, outlined = counts[kind], counts["end_to_end"] if kind == "local" else []
    below = sum(count for count, edge in zip(filled, edges, strict=False) if edge <= 1)
    beyond = sum(count for count, edge in zip(filled, [0.0, *edges], strict=True) if edge >= limits["z"])
    return {
        "backend": name,
        "dtype": dtype,
        "kind": kind,
        "elements": sum(filled),
        "below": below,
        "beyond": beyond,
        "largest": largest[kind],
        "arrives": largest["end_to_end"],
        "at": round(100 * drawing.position(limits["z"], edges) / (len(edges) + 1), 1),
        "one": round(100 * drawing.position(1.0, edges) / (len(edges) + 1), 1),
        "svg": drawing.histogram(filled, outlined, edges, limits["z"], f"{name}, {dtype}: errors of {sum(filled)} elements in sigma; {beyond} beyond {limits['z']:g}"),
    }
