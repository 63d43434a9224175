"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord.conformance.wording import gather, markdown_table

Entry = Mapping[str, Any]

HARMLESS = ("unsupported", "absent")  # statuses that are not failures

# Number of cores that may be busy without a warning, with other processes before the measurement, or beyond a
# process's threads: runtimes have additional threads for other work.
NOISE = 0.25

WIDE = 170  # columns that fit every figure

MEDIUM = 100  # columns that also fit the memory

NARROW = ("step", "±", "of peer", "tokens/s", "MiB")  # figures for any width, but the last


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
    "build": ("build_seconds", seconds),
    "compile": ("compile_seconds", seconds),
    "first": ("first_seconds", seconds),
    "MiB": ("peak_memory_bytes", lambda size: f"{size / 2**20:,.0f}"),
    "cores": ("busy_cores", "{:.1f}".format),
    "error": ("error_in_tolerances", "{:.2f}".format),
}


def _figures(entry: Entry) -> dict[str, tuple[float | None, str]]:
    numbers, steps = {**entry, **entry["summary"]}, entry["summary"]["steps"]
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


def tasks(data: Entry) -> dict[str, list[str]]:
    """Measured workloads that differ only in precision, together."""
    works, measured = data["workloads"], {entry["workload"] for entry in data["entries"] if entry["summary"]}
    return gather(
        (name for name in works if name in measured),
        lambda name: " ".join(itemgetter("preset", "kind", "padding")(works[name])),
    )


def fastest_first(
    data: Entry, workloads: Sequence[str]
) -> list[tuple[Entry, dict[str, tuple[float | None, str]]]]:
    """Measurements of workloads with their figures, fastest first; a mode names its precision."""
    entries = [entry for entry in data["entries"] if entry["workload"] in workloads and entry["summary"]]
    entries.sort(key=lambda entry: entry["summary"]["median_seconds"])
    return [
        ({**entry, "mode": mode.removesuffix(" float32")}, _figures(entry))
        for entry in entries
        for mode in [f"{entry['mode']} {data['workloads'][entry['workload']]['dtype']}"]
    ]


def rows(data: Entry, workloads: Sequence[str], headings: Sequence[str]) -> list[list[str]]:
    """Backend, mode and chosen figures of measurements."""
    return [
        [entry["backend"], entry["mode"], *(figures[heading][1] for heading in headings)]
        for entry, figures in fastest_first(data, workloads)
    ]


def fastest_modes(data: Entry, workload: str, *headings: str) -> dict[str, str]:
    """Each backend's fastest mode with chosen figures, fastest first."""
    best: dict[str, str] = {}
    for backend, mode, *figures in rows(data, [workload], headings):
        best.setdefault(backend, f"{mode} ({', '.join(filter(None, figures))})")
    return best


def to_deploy(data: Entry, workloads: Sequence[str]) -> Iterator[str]:
    """Yield each framework's fastest mode, as one sentence per workload."""
    doubt = " (which was busy)" if busy_before(data) else ""
    for workload in workloads:
        fastest = (f"{backend} {mode}" for backend, mode in fastest_modes(data, workload, "step").items())
        yield f"Fastest on this machine{doubt}, {workload}: {', '.join(fastest)}."


def limits(rates: Mapping[str, float]) -> str:
    """Best rates of plain products by dtype, in words."""
    return ", ".join(f"{rate(best)}FLOP/s ({dtype})" for dtype, best in rates.items()) or "none"


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
    failed = (entry for entry in data["entries"] if entry["status"] != "measured")
    return gather(failed, itemgetter("backend", "status", "detail"))


def busy_before(data: Entry) -> str:
    """Report disturbance by other processes, unless negligible."""
    busy, cores = data["settings"].get("cores_busy_before", 0.0), data["machine"]["cores"]
    return f"Other processes kept {busy:.1f} of {cores} cores busy" if busy > NOISE else ""


def greedy(data: Entry) -> list[Entry]:
    """Entries of backends that kept more cores busy than their threads."""
    threads = data["settings"]["threads"]
    return [
        entry
        for entry in data["entries"]
        if entry["summary"] and threads and entry["summary"]["busy_cores"] > threads + NOISE
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
    narrow = NARROW if console.width >= MEDIUM else NARROW[:-1]
    headings, sentences = list(FIGURES)[:-1] if console.width >= WIDE else narrow, list[str]()
    for task, names in tasks(data).items():
        title = f"{task}: {size_of(data['workloads'][names[0]])}"
        table = Table("backend", "mode", title=title, title_justify="left", title_style="bold")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows(data, names, headings):
            table.add_row(*row)
        console.print(table)
        sentences += to_deploy(data, names)
    for sentence in sentences:
        console.print(Text(sentence))
    for text, style in notes(data):
        console.print(Text(text, style=style))


def markdown(data: Entry) -> str:
    """A record in Markdown."""
    parts, sentences, headings = [], list[str](), [*NARROW, "of best"]
    for task, names in tasks(data).items():
        work = data["workloads"][names[0]]
        head = [["backend", "mode", *headings], ["---", "---", *["---:"] * len(headings)]]
        text = markdown_table([*head, *rows(data, names, headings)])
        parts.append(f"**{task}**: {work['source']}; {size_of(work)}\n\n{text}")
        sentences += to_deploy(data, names)
    machine = data["machine"]
    versions = (f"{name} {version}" for name, version in versions_of(data).items() if version)
    caption = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; fastest plain matrix "
        f"product {limits(data['best_product_gflops'])}; {data['written'][:10]}; {', '.join(versions)}."
    )
    return "\n\n".join([*parts, *sentences, caption]) + "\n"
