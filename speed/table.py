"""Measurements in figures: as tables of a terminal and of a Markdown file, and as the page has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord.speed.peers import PEERS

Entry = Mapping[str, Any]

HARMLESS = ("unsupported", "absent")
"""Statuses that are nobody's fault."""

TOLERATED = 0.25
"""Cores beyond the number of threads that a process may keep busy with what it does besides."""

NOISE = 0.25
"""Cores that other processes may keep busy without a warning."""

WIDE = 170
"""Columns from which on every figure has room."""

NARROW = ("step", "±", "of peer", "tokens/s", "MiB")
"""Figures that have room everywhere."""


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def rate(value: float) -> str:
    """Return GFLOP/s in the unit that suits them."""
    return f"{value:.0f} G" if value < 1e4 else f"{value / 1e3:.0f} T"


def percent(value: float) -> str:
    """Return a share."""
    return f"{100 * value:.0f} %"


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "step": ("median_seconds", seconds),
    "±": ("spread", lambda spread: percent(spread / 2)),
    "of peer": ("of_best_peer", "{:.2f}".format),
    "min": ("min_seconds", seconds),
    "tokens/s": ("real_tokens_per_second", "{:,.0f}".format),
    "FLOP/s": ("gflops", rate),
    "of best": ("share_of_best_product", percent),
    "of own": ("share_of_own_product", percent),
    "build": ("build_seconds", seconds),
    "compile": ("compile_seconds", seconds),
    "first": ("first_seconds", seconds),
    "MiB": ("peak_memory_bytes", lambda size: f"{size / 2**20:,.0f}"),
    "cores": ("busy_cores", "{:.1f}".format),
    "error": ("error_in_tolerances", "{:.2f}".format),
}
"""What is said of a measurement: its key in the entry or summary, and how it is written, by heading."""


def _figures(entry: Entry, peer: float | None) -> dict[str, tuple[float | None, str]]:
    """Return the number and the text of each of :data:`FIGURES`; too few steps for a spread are counted."""
    numbers, steps = {**entry, **entry["summary"]}, entry["summary"]["steps"]
    numbers["of_best_peer"] = peer and numbers["median_seconds"] / peer
    figures = {}
    for heading, (key, write) in FIGURES.items():
        value = numbers.get(key)
        figures[heading] = value, "" if value is None else write(value)
    if numbers["spread"] is None:
        figures["±"] = None, f"{steps} step{'' if steps == 1 else 's'}"
    elif not numbers["steady"]:
        figures["±"] = numbers["spread"], f"{figures['±'][1]} unsteady"
    return figures


def fastest_first(data: Entry, workload: str) -> list[tuple[Entry, dict[str, tuple[float | None, str]]]]:
    """Return the measurements of a workload, each with its figures."""
    measured = [entry for entry in data["entries"] if entry["workload"] == workload and entry["summary"]]
    measured.sort(key=lambda entry: float(entry["summary"]["median_seconds"]))
    peers = (entry["summary"]["median_seconds"] for entry in measured if entry["backend"] in PEERS)
    peer = next(peers, None)
    return [(entry, _figures(entry, peer)) for entry in measured]


def rows(data: Entry, workload: str, headings: Sequence[str]) -> list[list[str]]:
    """Return backend, mode and the figures under each heading of the measurements of a workload."""
    return [
        [entry["backend"], entry["mode"], *(figures[heading][1] for heading in headings)]
        for entry, figures in fastest_first(data, workload)
    ]


def to_deploy(data: Entry) -> dict[str, str]:
    """Say of each workload that was measured which mode of each framework is the fastest."""
    doubt = ", as far as one can tell" if busy_before(data) else ""
    sentences = {}
    for workload in data["workloads"]:
        best: dict[str, str] = {}
        for backend, mode, step in rows(data, workload, ["step"]):
            best.setdefault(backend, f"{backend} {mode} ({step})")
        if best:
            sentences[workload] = f"To deploy on this machine{doubt}, {workload}: {', '.join(best.values())}."
    return sentences


def limits(data: Entry) -> str:
    """Return the best rates of bare products."""
    rates = (f"{rate(found)}FLOP/s ({dtype})" for dtype, found in data["best_product_gflops"].items())
    return ", ".join(rates) or "none"


def versions_of(data: Entry) -> dict[str, str | None]:
    """Return the version that each backend says it has."""
    return {name: next(iter(profiles.values())).get("version") for name, profiles in data["backends"].items()}


def size_of(work: Entry) -> str:
    """Return what a workload is, in words."""
    recipe = work.get("recipe")
    return (
        f"{work['batch']} x {work['tokens']} tokens, {work['real_tokens']:,} real, "
        f"{work['flops'] / 1e9:.3g} GFLOP a step"
        + (f"; updated by AdamW, rate {recipe['learning_rate']:g}" if recipe else "")
    )


def unmeasured(data: Entry) -> dict[tuple[str, str, str], list[Entry]]:
    """Return the entries that were not measured, by backend, status and detail: the same is said once."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in data["entries"]:
        if entry["status"] != "measured":
            found.setdefault((entry["backend"], entry["status"], entry["detail"]), []).append(entry)
    return found


def busy_before(data: Entry) -> str:
    """Say that other processes were at work when it was measured; empty where hardly any were."""
    busy, cores = data["settings"].get("cores_busy_before", 0.0), data["machine"]["cores"]
    return f"Other processes kept {busy:.1f} of {cores} cores busy" if busy > NOISE else ""


def greedy(data: Entry) -> list[Entry]:
    """Return the entries of backends that kept more cores busy than they were given threads."""
    threads = data["settings"].get("threads")
    return [
        entry
        for entry in data["entries"]
        if entry["summary"] and threads and (entry["summary"]["busy_cores"] or 0.0) > threads + TOLERATED
    ]


def notes(data: Entry) -> Iterator[tuple[str, str]]:
    """Yield what else is to be said of a record, and its style: what is missing or greedy."""
    for (backend, status, detail), runs in unmeasured(data).items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        where = f"[{runs[0]['workload']}, {runs[0]['mode']}{more}]"
        yield f"{backend} {status}: {detail} {where}", "dim" if status in HARMLESS else "bold red"
    for entry in greedy(data):
        cores, threads = entry["summary"]["busy_cores"], data["settings"]["threads"]
        where = f"[{entry['workload']}, {entry['mode']}]"
        yield f"{entry['backend']} kept {cores:.1f} cores busy with {threads} threads {where}", "bold yellow"
    if not data["complete"]:
        yield "not complete: what was measured until then is above", "yellow"


def show(data: Entry, console: Console) -> None:
    """Print a record: a table for each workload, fastest first, then what could not be measured."""
    headings = list(FIGURES)[:-1] if console.width >= WIDE else NARROW
    for name, work in data["workloads"].items():
        table = Table(
            "backend", "mode", title=f"{name}: {size_of(work)}", title_justify="left", title_style="bold"
        )
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows(data, name, headings):
            table.add_row(*row)
        if table.rows:
            console.print(table)
    for text in to_deploy(data).values():
        console.print(Text(text))
    for text, style in notes(data):
        console.print(Text(text, style=style))


def markdown(data: Entry) -> str:
    """Return a record as Markdown: each workload's table, fastest first, and what it was measured on."""
    parts, headings = [], [*NARROW, "of best"]
    for name, work in data["workloads"].items():
        lines = [f"| {' | '.join(row)} |" for row in rows(data, name, headings)]
        if lines:
            head = f"| backend | mode | {' | '.join(headings)} |\n|---|---|{'---:|' * len(headings)}"
            about = f"**{name}**: {work['source']}; {size_of(work)}"
            parts.append("\n".join([about, "", head, *lines]))
    machine = data["machine"]
    versions = (f"{name} {version}" for name, version in versions_of(data).items() if version)
    about = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; best bare matrix "
        f"product {limits(data)}; {data['written'][:10]}; {', '.join(versions)}."
    )
    return "\n\n".join([*parts, *to_deploy(data).values(), about]) + "\n"
