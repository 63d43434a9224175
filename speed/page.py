"""The page: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from concord.conformance import record
from concord.conformance.layout import render
from concord.conformance.record import Record
from concord.speed import drawing
from concord.speed.growth import curves, exponent
from concord.speed.record import check
from concord.speed.table import (
    HARMLESS,
    limits,
    memory,
    percent,
    rate,
    seconds,
    spread,
    unmeasured,
    updated_by,
)

UPDATED = 7
"""Numbers that AdamW moves for each weight.

Reads it, its gradient and two moments, and writes it and them.
"""


def page(made: Record) -> str:
    """Return a record (:mod:`concord.speed.record`) as HTML."""
    data = record.data(made)
    check(data)
    backends = list(dict.fromkeys(entry["backend"] for entry in data["entries"]))
    works = [_work(name, work, data["entries"], backends) for name, work in data["workloads"].items()]
    failures = _failures(data)
    absent = [failure for failure in failures if failure["status"] in HARMLESS]
    failed = [failure for failure in failures if failure["status"] not in HARMLESS]
    growth, roofline = _growth(data, backends), _roofline(data, backends)
    shown = {
        "failures": ("What failed", failed),
        "time": ("Time", True),
        "growth": ("Growth", growth),
        "roofline": ("Roofline", roofline),
        "absent": ("What was not measured", absent),
        "backends": ("Backends", True),
    }
    return render(
        "speed.html",
        made,
        Path(__file__).parent / "templates",
        headline=_headline(data),
        compared=[
            _compared(data, backends),
            _fastest(works),
            f"Best bare matrix product: {limits(data)}.{'' if data['complete'] else ' Not complete.'}",
        ],
        sections={name: title for name, (title, there) in shown.items() if there},
        works=[work for work in works if work["rows"]],
        failures=failed,
        absent=absent,
        growth=growth,
        roofline=roofline,
        legend=[(name, i % drawing.COLOURS) for i, name in enumerate(backends)],
        seconds=seconds,
        memory=memory,
        rate=rate,
        share=percent,
        spread=spread,
        updated_by=updated_by,
    )


def _fastest(works: Sequence[Mapping[str, Any]]) -> str:
    """Say which measurement of each workload is the fastest."""
    first = [(work["name"], work["rows"][0]) for work in works if work["rows"]]
    said = [
        f"{name}: {row['backend']} {row['mode']}, {seconds(row['summary']['median_seconds'])}"
        for name, row in first
    ]
    return f"Fastest: {'; '.join(said)}." if said else "Nothing was measured."


def _compared(data: Mapping[str, Any], backends: Sequence[str]) -> str:
    """Say what was compared, and by what."""
    versions = [
        f"{name} {version}"
        if (
            version := next((about.get("version") for about in data["backends"].get(name, {}).values()), None)
        )
        else name
        for name in backends
    ]
    settings = data["settings"]
    return (
        f"Compared: the time of {', '.join(versions)} for {', '.join(data['workloads'])}, in turns, on "
        f"{settings['device']} with {settings['threads']} threads, {settings['precision']} precision."
    )


def _headline(data: Mapping[str, Any]) -> str:
    measured = [entry for entry in data["entries"] if entry["summary"]]
    wrong = [entry for entry in data["entries"] if entry["status"] == "withheld"]
    text = f"{len(measured)} measurement{'' if len(measured) == 1 else 's'}, all of programs that conformed"
    return text + (f"; {len(wrong)} withheld, because what they computed is wrong" if wrong else "")


def _work(
    name: str, work: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], backends: Sequence[str]
) -> dict[str, Any]:
    rows = sorted(
        (e for e in entries if e["workload"] == name and e["summary"]),
        key=lambda e: e["summary"]["median_seconds"],
    )
    times = [
        (
            f"{e['backend']} {e['mode']}",
            s["median_seconds"],
            s["low_seconds"],
            s["high_seconds"],
            seconds(s["median_seconds"]) + (" ~" if s["steady"] is False else ""),
            backends.index(e["backend"]),
        )
        for e in rows
        for s in [e["summary"]]
    ]
    held = [
        (f"{e['backend']} {e['mode']}", peak, peak, peak, f"{memory(peak)} MiB", backends.index(e["backend"]))
        for e in rows
        for peak in [e["summary"]["peak_memory_bytes"]]
        if peak
    ]
    return {
        "name": name,
        **work,
        "rows": rows,
        "bars": drawing.bars(times, f"seconds a step, {name}"),
        "held": drawing.bars(held, f"largest resident memory, {name}") if held else None,
    }


def _failures(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was not measured and why, with the modes and workloads that it holds for."""
    return [
        {
            "backend": backend,
            "status": status,
            "detail": detail,
            "modes": list(dict.fromkeys(entry["mode"] for entry in found)),
            "works": list(dict.fromkeys(entry["workload"] for entry in found)),
        }
        for (backend, status, detail), found in unmeasured(data).items()
    ]


def _growth(data: Mapping[str, Any], backends: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[tuple[str, str], list[tuple[int, float]]]] = {}
    for (name, axis, backend, mode), points in curves(data).items():
        found.setdefault((name, axis), {})[backend, mode] = points
    pictures = []
    for (name, axis), lines in found.items():
        series = {" ".join(line): (backends.index(line[0]), points) for line, points in lines.items()}
        fits = [(" ".join(line), exponent(points), points) for line, points in lines.items()]
        pictures.append(
            {
                "name": name,
                "axis": axis,
                "picture": drawing.loglog(series, f"{name}: seconds by {axis}", axis, "seconds"),
                "fits": fits,
            }
        )
    return pictures


def _roofline(data: Mapping[str, Any], backends: Sequence[str]) -> Markup | None:
    """Draw what was reached against what the machine's memory and its best matrix product allow."""
    best, bandwidth = data["best_product_gflops"].get("float32"), data["settings"].get("copy_gbytes")
    series: dict[str, tuple[int, list[tuple[float, float]]]] = {}
    for entry in data["entries"]:
        work = data["workloads"][entry["workload"]]
        if entry["summary"] and work["dtype"] == "float32":
            point = (intensity(work), entry["summary"]["gflops"])
            series[f"{entry['backend']} {entry['mode']}, {entry['workload']}"] = (
                backends.index(entry["backend"]),
                [point],
            )
    if not series or not best or not bandwidth:
        return None
    reached = [points[0][0] for _, points in series.values()]
    ridge = best / bandwidth
    first, last = min(*reached, ridge) / 2, max(*reached, ridge) * 2
    ceilings = [(first, first * bandwidth, ridge, best), (ridge, best, last, best)]
    return drawing.loglog(
        series,
        "roofline",
        "operations for each byte of weights and activations",
        "GFLOP/s",
        ceilings,
        joined=False,
    )


def intensity(work: Mapping[str, Any]) -> float:
    """Return how many operations there are for each byte of weights and layer results, each moved once,
    and in training of what an update moves.
    """
    config, itemsize = work["config"], {"float64": 8, "float32": 4}.get(work["dtype"], 2)
    width, inner, layers = config["d_model"], config["d_ff"], config["num_layers"]
    rows = work["batch"] * work["tokens"]
    weights = layers * (4 * width * width + 2 * width * inner)
    results = layers * (
        rows * (8 * width + 2 * inner) + 2 * work["batch"] * config["num_heads"] * work["tokens"] ** 2
    )
    numbers = (
        weights + results
        if work["kind"] == "inference"
        else 3 * (weights + results) + (UPDATED if work.get("recipe") else 0) * weights
    )
    return float(work["flops"] / (itemsize * numbers))
