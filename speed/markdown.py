"""The table of a Markdown file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concord.speed.table import limits, percent, rate, seconds, spread, updated_by


def markdown(data: Mapping[str, Any]) -> str:
    """Return a record as Markdown: each workload's table, fastest first, and what it was measured on."""
    parts = []
    for name, work in data["workloads"].items():
        rows = sorted(
            (e for e in data["entries"] if e["workload"] == name and e["summary"]),
            key=lambda e: e["summary"]["median_seconds"],
        )
        if rows:
            parts.append(
                f"**{name}**: {work['source']}; {work['real_tokens']:,} real tokens of "
                f"{work['batch'] * work['tokens']:,}, {work['flops'] / 1e9:.3g} GFLOP{updated_by(work)}\n\n"
                + "\n".join(_lines(rows))
            )
    machine, versions = data["machine"], _versions(data)
    measured = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; best bare matrix "
        f"product {limits(data)}; {data['written'][:10]}; {versions}."
    )
    return "\n\n".join([*parts, measured]) + "\n"


def _lines(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| backend | mode | step | ± | tokens/s | FLOP/s | of the best product | MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in rows:
        s = entry["summary"]
        noise = spread(s)
        peak = "" if s["peak_memory_bytes"] is None else f"{s['peak_memory_bytes'] / 2**20:,.0f}"
        figures = [
            seconds(s["median_seconds"]),
            noise + (" unsteady" if s["steady"] is False else ""),
            f"{s['real_tokens_per_second']:,.0f}",
            rate(s["gflops"]),
            percent(s["share_of_best_product"]),
            peak,
        ]
        lines.append(f"| {entry['backend']} | {entry['mode']} | {' | '.join(figures)} |")
    return lines


def _versions(data: Mapping[str, Any]) -> str:
    found = {name: next(iter(profiles.values())) for name, profiles in data["backends"].items()}
    return ", ".join(f"{name} {about['version']}" for name, about in found.items() if about.get("version"))
