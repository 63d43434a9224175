"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord.speed.peers import PEERS

Entry = Mapping[str, Any]

HARMLESS = ("unsupported", "absent")  # statuses that are not failures

# Number of cores that a process may keep busy beyond its threads, since runtimes have additional threads for
# other work.
TOLERATED = 0.25

# Number of cores that other processes may keep busy without a warning.
NOISE = 0.25

WIDE = 170  # columns that fit every figure

NARROW = ("step", "±", "of peer", "tokens/s", "MiB")  # figures for any width


def seconds(value: float) -> str:
    """Format a duration in a suitable unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def rate(value: float) -> str:
    """Format GFLOP/s in a suitable unit."""
    return f"{value:.0f} G" if value < 1e4 else f"{value / 1e3:.0f} T"


def percent(value: float) -> str:
    """Format a share."""
    return f"{100 * value:.0f} %"


# By heading: the key in the entry or summary, and the format of the number.
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


def _figures(entry: Entry, peer: float | None) -> dict[str, tuple[float | None, str]]:
    numbers, steps = {**entry, **entry["summary"]}, entry["summary"]["steps"]
    numbers["of_best_peer"] = peer and numbers["median_seconds"] / peer
    figures = {}
    for heading, (key, write) in FIGURES.items():
        value = numbers.get(key)
        figures[heading] = value, "" if value is None else write(value)
    if numbers["spread"] is None:
        # Too few steps have no spread; instead, their number indicates the reliability of the median.
        figures["±"] = None, f"{steps} step{'' if steps == 1 else 's'}"
    elif not numbers["steady"]:
        figures["±"] = numbers["spread"], f"{figures['±'][1]} unsteady"
    return figures


def fastest_first(data: Entry, workload: str) -> list[tuple[Entry, dict[str, tuple[float | None, str]]]]:
    """A workload's measurements with their figures, fastest first."""
    entries = [entry for entry in data["entries"] if entry["workload"] == workload and entry["summary"]]
    entries.sort(key=lambda entry: float(entry["summary"]["median_seconds"]))
    peers = (entry["summary"]["median_seconds"] for entry in entries if entry["backend"] in PEERS)
    peer = next(peers, None)
    return [(entry, _figures(entry, peer)) for entry in entries]


def rows(data: Entry, workload: str, headings: Sequence[str]) -> list[list[str]]:
    """Backend, mode and chosen figures of a workload's measurements."""
    return [
        [entry["backend"], entry["mode"], *(figures[heading][1] for heading in headings)]
        for entry, figures in fastest_first(data, workload)
    ]


def to_deploy(data: Entry) -> dict[str, str]:
    """Each framework's fastest mode, as one sentence per workload."""
    doubt = " (which was busy)" if busy_before(data) else ""
    sentences = {}
    for workload in data["workloads"]:
        best: dict[str, str] = {}
        for backend, mode, step in rows(data, workload, ["step"]):
            best.setdefault(backend, f"{backend} {mode} ({step})")
        if best:
            sentences[workload] = f"Fastest on this machine{doubt}, {workload}: {', '.join(best.values())}."
    return sentences


def limits(data: Entry) -> str:
    """Best rates of plain products, in words."""
    rates = (f"{rate(best)}FLOP/s ({dtype})" for dtype, best in data["best_product_gflops"].items())
    return ", ".join(rates) or "none"


def versions_of(data: Entry) -> dict[str, str | None]:
    """Each backend's version."""
    return {name: next(iter(profiles.values())).get("version") for name, profiles in data["backends"].items()}


def size_of(work: Entry) -> str:
    """Describe a workload in words."""
    recipe = work.get("recipe")
    return (
        f"{work['batch']} x {work['tokens']} tokens, {work['real_tokens']:,} real, "
        f"{work['flops'] / 1e9:.3g} GFLOP a step"
        + (f"; updated by AdamW, learning rate {recipe['learning_rate']:g}" if recipe else "")
    )


def unmeasured(data: Entry) -> dict[tuple[str, str, str], list[Entry]]:
    """Group entries without a measurement by backend, status and detail."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in data["entries"]:
        if entry["status"] != "measured":
            groups.setdefault((entry["backend"], entry["status"], entry["detail"]), []).append(entry)
    return groups


def busy_before(data: Entry) -> str:
    """Report disturbance by other processes, unless negligible."""
    busy, cores = data["settings"].get("cores_busy_before", 0.0), data["machine"]["cores"]
    return f"Other processes kept {busy:.1f} of {cores} cores busy" if busy > NOISE else ""


def greedy(data: Entry) -> list[Entry]:
    """Entries of backends that kept more cores busy than their threads."""
    threads = data["settings"].get("threads")
    return [
        entry
        for entry in data["entries"]
        if entry["summary"] and threads and (entry["summary"]["busy_cores"] or 0.0) > threads + TOLERATED
    ]


def notes(data: Entry) -> Iterator[tuple[str, str]]:
    """Yield remarks on a record, with their styles."""
    for (backend, status, detail), runs in unmeasured(data).items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        where = f"[{runs[0]['workload']}, {runs[0]['mode']}{more}]"
        yield f"{backend} {status}: {detail} {where}", "dim" if status in HARMLESS else "bold red"
    for entry in greedy(data):
        cores, threads = entry["summary"]["busy_cores"], data["settings"]["threads"]
        where = f"[{entry['workload']}, {entry['mode']}]"
        yield f"{entry['backend']} kept {cores:.1f} cores busy with {threads} threads {where}", "bold yellow"
    if not data["complete"]:
        yield "not complete: the table above has only what was measured before the stop", "yellow"


def show(data: Entry, console: Console) -> None:
    """Print a record."""
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
    """A record in Markdown."""
    parts, headings = [], [*NARROW, "of best"]
    for name, work in data["workloads"].items():
        lines = [f"| {' | '.join(row)} |" for row in rows(data, name, headings)]
        if lines:
            head = f"| backend | mode | {' | '.join(headings)} |\n|---|---|{'---:|' * len(headings)}"
            caption = f"**{name}**: {work['source']}; {size_of(work)}"
            parts.append("\n".join([caption, "", head, *lines]))
    machine = data["machine"]
    versions = (f"{name} {version}" for name, version in versions_of(data).items() if version)
    caption = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; fastest plain "
        f"matrix product {limits(data)}; {data['written'][:10]}; {', '.join(versions)}."
    )
    return "\n\n".join([*parts, *to_deploy(data).values(), caption]) + "\n"
