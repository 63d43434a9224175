"""What a person sees in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord.speed.compare import TimeChange, drift
from concord.speed.growth import curves, exponent

HARMLESS = ("unsupported", "absent", "as tuned")
"""Statuses that are nobody's fault."""

TOLERATED = 0.25
"""Cores beyond the number of threads that a process may keep busy with what it does besides."""

WIDE = 140
"""Columns from which on every figure has room."""


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return ""
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value * 1e3:.3g} ms"
        if value >= 1e-3
        else f"{value * 1e6:.3g} µs"
    )


def rate(value: float | None) -> str:
    """Return GFLOP/s in the unit that suits them."""
    return "" if value is None else f"{value:.0f} G" if value < 1e4 else f"{value / 1e3:.0f} T"


def limits(data: Mapping[str, Any]) -> str:
    """Return the best rates of bare products."""
    return (
        ", ".join(f"{rate(found)}FLOP/s ({dtype})" for dtype, found in data["best_product_gflops"].items())
        or "none"
    )


def memory(value: float | None) -> str:
    """Return bytes as MiB."""
    return "" if value is None else f"{value / 2**20:,.0f}"


def percent(value: float | None) -> str:
    """Return a share."""
    return "" if value is None else f"{100 * value:.0f} %"


def spread(summary: Mapping[str, Any]) -> str:
    """Return half the spread of a measurement, or of how many steps it is where that is too few for one."""
    found, steps = summary["spread"], summary["steps"]
    return percent(found / 2) if found is not None else f"{steps} step{'' if steps == 1 else 's'}"


def updated_by(work: Mapping[str, Any]) -> str:
    """Return by what a step of a workload updates weights, to be added to what is said of it.

    Nothing, if it updates none.
    """
    recipe = work.get("recipe")
    return f"; updated by AdamW, rate {recipe['learning_rate']:g}" if recipe else ""


def show(data: Mapping[str, Any], console: Console) -> None:
    """Print a record: a table for each workload, fastest first, then what could not be measured."""
    for name, work in data["workloads"].items():
        entries = [entry for entry in data["entries"] if entry["workload"] == name]
        if any(entry["summary"] for entry in entries):
            console.print(_table(name, work, entries, console.width >= WIDE))
    _fits(data, console)
    _notes(data, console)


def _fits(data: Mapping[str, Any], console: Console) -> None:
    """Print how fast cost grows along each sweep."""
    found = curves(data)
    if found:
        table = Table(
            title="Growth: the exponent of the size that fits best; 1 is linear",
            title_justify="left",
            title_style="bold",
        )
        for column in ("sweep", "backend", "mode"):
            table.add_column(column, overflow="fold")
        table.add_column("exponent", justify="right")
        for (name, axis, backend, mode), points in found.items():
            table.add_row(
                f"{name}, {axis} {points[0][0]} to {points[-1][0]}", backend, mode, f"{exponent(points):.2f}"
            )
        console.print(table)


def _table(name: str, work: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], wide: bool) -> Table:
    size = (
        f"{work['batch']} x {work['tokens']} tokens, {work['real_tokens']:,} real, "
        f"{work['flops'] / 1e9:.3g} GFLOP a step{updated_by(work)}"
    )
    table = Table(title=f"{name}: {size}", title_justify="left", title_style="bold")
    table.add_column("backend", overflow="fold")
    table.add_column("mode", overflow="fold", min_width=14 if wide else None)
    columns = ["step", "±", *(["min"] if wide else []), "tokens/s", "FLOP/s", "of best"] + (
        ["of own", "import", "build", "compile", "first", "MiB", "cores"] if wide else ["MiB"]
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for entry in sorted((e for e in entries if e["summary"]), key=lambda e: e["summary"]["median_seconds"]):
        s = entry["summary"]
        unsteady = Text(spread(s), style="" if s["steady"] else "bold yellow")
        cells: list[str | Text] = [
            seconds(s["median_seconds"]),
            unsteady,
            *([seconds(s["min_seconds"])] if wide else []),
            f"{s['real_tokens_per_second']:,.0f}",
            rate(s["gflops"]),
            percent(s["share_of_best_product"]),
        ]
        if wide:
            cells += [
                percent(s["share_of_own_product"]),
                seconds(entry["import_seconds"]),
                seconds(entry["build_seconds"]),
                seconds(s["compile_seconds"]),
                seconds(entry["first_seconds"]),
            ]
        cells.append(memory(s["peak_memory_bytes"]))
        if wide:
            cells.append("" if s["busy_cores"] is None else f"{s['busy_cores']:.1f}")
        table.add_row(entry["backend"], entry["mode"], *cells)
    return table


def _notes(data: Mapping[str, Any], console: Console) -> None:
    for (backend, status, detail), runs in unmeasured(data).items():
        style = "dim" if status in HARMLESS else "bold red"
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        console.print(
            Text(
                f"{backend} {status}: {detail} [{runs[0]['workload']}, {runs[0]['mode']}{more}]", style=style
            )
        )
    for name, who in unsteady(data).items():
        console.print(Text(f"unsteady, {name}: {', '.join(who)}", style="yellow"))
    for entry in greedy(data):
        text = (
            f"{entry['backend']} kept {entry['summary']['busy_cores']:.1f} cores busy with "
            f"{data['settings']['threads']} threads: {entry['mode']}, {entry['workload']}"
        )
        console.print(Text(text, style="bold yellow"))
    if not data["complete"]:
        console.print(
            Text("not complete: what was measured until then is above; --resume FILE goes on", style="yellow")
        )


def unmeasured(data: Mapping[str, Any]) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    """Return the entries that were not measured, by backend, status and detail: the same is said once."""
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for entry in data["entries"]:
        if entry["status"] != "measured":
            found.setdefault((entry["backend"], entry["status"], entry["detail"]), []).append(entry)
    return found


def unsteady(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what was measured with a spread over a tenth.

    Workload and mode to backends, each with its spread.
    """
    found: dict[str, list[str]] = {}
    for entry in data["entries"]:
        if entry["summary"] and entry["summary"]["steady"] is False:
            found.setdefault(f"{entry['workload']}, {entry['mode']}", []).append(
                f"{entry['backend']} {percent(entry['summary']['spread'])}"
            )
    return found


def greedy(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of backends that kept more cores busy than they were given threads."""
    threads = data["settings"].get("threads")
    measured = [
        entry for entry in data["entries"] if entry["summary"] and entry["profile"] == "tuned" and threads
    ]
    return [entry for entry in measured if (entry["summary"]["busy_cores"] or 0.0) > threads + TOLERATED]


def show_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], changes: Iterable[TimeChange], console: Console
) -> None:
    """Print what changed between two records."""
    table = Table(title="New against old", title_justify="left", title_style="bold")
    for column in ("workload", "backend", "mode"):
        table.add_column(column, overflow="fold")
    for column in ("old", "new", "time", "noise", ""):
        table.add_column(column, justify="right", no_wrap=True)
    styles = {
        "slower": "bold red",
        "faster": "bold green",
        "same": "",
        "new": "dim",
        "gone": "dim",
        "cannot say": "yellow",
    }
    for change in changes:
        ratio = "" if change.ratio is None else f"{100 * (change.ratio - 1):+.1f} %"
        noise = "" if change.noise is None else f"±{100 * change.noise:.1f} %"
        said = Text(
            change.verdict + (f": {change.detail}" if change.detail else ""), style=styles[change.verdict]
        )
        table.add_row(
            change.workload,
            change.backend,
            change.mode,
            seconds(change.old),
            seconds(change.new),
            ratio,
            noise,
            said,
        )
    console.print(table)
    machine = drift(old, new)
    if machine is not None:
        console.print(
            f"The best bare matrix product is {100 * (machine - 1):+.1f} % as fast as it was: what the "
            f"machine itself did.",
            highlight=False,
        )
    if old["machine"].get("processor") != new["machine"].get("processor"):
        console.print(
            Text(
                f"Not the same processor: {old['machine'].get('processor')}, "
                f"{new['machine'].get('processor')}",
                style="bold yellow",
            )
        )
