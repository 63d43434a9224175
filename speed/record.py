"""The measurement as data: what ``--json`` writes, what a page is made from, and what ``--resume`` goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from concord.backends import machine
from concord.spec.errors import SpecError
from concord.spec.files import read_json
from concord.speed import statistics
from concord.speed.plan import Plan
from concord.speed.presets import Workload
from concord.speed.work import flops, real_tokens

SCHEMA = "concord.speed/2"

FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": str,
    "written": str,
    "seconds": (int, float),
    "complete": bool,
    "machine": dict,
    "settings": dict,
    "workloads": dict,
    "backends": dict,
    "best_product_gflops": dict,
    "entries": list,
}
"""What a record has to have; docs/guides/speed.md says what it means."""


class Record:
    """A record that grows.

    Args:
        plan: what is being measured.
        data: of a record to go on with.
    """

    def __init__(self, plan: Plan, data: Mapping[str, Any] | None = None) -> None:
        earlier = data or {}
        self.seconds = float(earlier.get("seconds", 0.0))
        self.complete = False
        self.backends: dict[str, Any] = dict(earlier.get("backends", {}))
        self.workloads: dict[str, Any] = {**earlier.get("workloads", {}), **{work.name: described(work) for work in plan.workloads}}
        self.settings = {"device": plan.device, "precision": plan.precision, "turns": plan.turns, "budget": plan.budget, "threads": plan.threads, "limit": plan.limit}
        self.entries: list[dict[str, Any]] = list(earlier.get("entries", []))

    @property
    def done(self) -> list[tuple[str, str, str]]:
        """What has been measured, or cannot be."""
        return [(entry["backend"], entry["mode"], entry["workload"]) for entry in self.entries]

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take in one entry."""
        about = entry["backend_info"]
        self.backends.setdefault(entry["backend"], {})[entry["profile"]] = about
        kept = {name: value for name, value in entry.items() if name != "backend_info"}
        self.entries.append({**kept, "import_seconds": about.get("import_seconds")})

    def as_dict(self) -> dict[str, Any]:
        """Return the whole as JSON data."""
        best = best_rates(self.entries, self.workloads)
        return {
            "schema": SCHEMA,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": self.seconds,
            "complete": self.complete,
            "machine": machine.describe(),
            "settings": self.settings,
            "workloads": self.workloads,
            "backends": self.backends,
            "best_product_gflops": {dtype: rate for (name, dtype), rate in best.items() if not name},
            "entries": [{**entry, "summary": summary(entry, self.workloads[entry["workload"]], best)} for entry in self.entries],
        }


def described(work: Workload) -> dict[str, Any]:
    """Return what a workload is."""
    preset = work.preset
    return {
        "preset": preset.name,
        "source": preset.source,
        "kind": work.kind,
        "padding": work.padding,
        "dtype": work.dtype,
        "key": work.key,
        "config": preset.config.as_dict(),
        "batch": preset.batch,
        "tokens": preset.tokens,
        "real_tokens": real_tokens(work),
        "flops": flops(work),
        "real_flops": flops(work, real_only=True),
    }


def best_rates(entries: Sequence[Mapping[str, Any]], workloads: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return the best rate of a bare product for each backend and precision, and over all backends under ``""``."""
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        for key in ((name, workloads[entry["workload"]]["dtype"]) for name in (entry["backend"], "")):
            best[key] = max(best.get(key, 0.0), entry.get("product_gflops") or 0.0)
    return best


def summary(entry: Mapping[str, Any], work: Mapping[str, Any], best: Mapping[tuple[str, str], float]) -> dict[str, Any] | None:
    """Return the figures of an entry; None if it was not measured."""
    turns = [turn["seconds"] for turn in entry["turns"]]
    if entry["status"] != "measured" or not turns:
        return None
    median, (low, high) = statistics.median(turns), statistics.interval(turns)
    rate = work["real_flops" if "packed" in entry["execution"] else "flops"] / median / 1e9
    own, any_one = (best.get((name, work["dtype"])) for name in (entry["backend"], ""))
    busy = [turn["busy_cores"] for turn in entry["turns"] if turn["busy_cores"] is not None]
    peaks = [turn["peak_memory_bytes"] for turn in entry["turns"] if turn["peak_memory_bytes"]]
    return {
        "median_seconds": median,
        "min_seconds": statistics.least(turns),
        "low_seconds": low,
        "high_seconds": high,
        "spread": finite(statistics.spread(turns)),
        "steady": statistics.settled(turns) if finite(statistics.spread(turns)) is not None else None,
        "steps": sum(len(turn) for turn in turns),
        "real_tokens_per_second": work["real_tokens"] / median,
        "gflops": rate,
        "share_of_own_product": rate / own if own else None,
        "share_of_best_product": rate / any_one if any_one else None,
        # Compilation that happens in the first step is what that took beyond a usual one.
        "compile_seconds": entry["compile_seconds"] + max(0.0, entry["first_seconds"] - median),
        "peak_memory_bytes": max(peaks, default=None),
        "busy_cores": sum(busy) / len(busy) if busy else None,
    }


def read(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        SpecError: if the file is missing, no JSON, of another schema, or lacks something.
    """
    data = read_json(path)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise SpecError(f"{path}: has schema {found!r} but must have {SCHEMA!r}; it is what 'concord speed --json' of this version writes")
    wrong = [f"{path}: {name!r} is missing or of the wrong type" for name, kind in FIELDS.items() if not isinstance(data.get(name), kind)]
    wrong += [] if wrong else [f"{path}: {problem}" for problem in _problems(data)]
    if wrong:
        raise SpecError(wrong)
    return data  # type: ignore[no-any-return]  # an object: its schema is a text in it


def _problems(data: Mapping[str, Any]) -> list[str]:
    wanted = ("backend", "mode", "workload", "status", "implementation", "execution", "profile", "turns")
    problems = []
    for i, entry in enumerate(data["entries"]):
        lacking = [name for name in wanted if not isinstance(entry, dict) or name not in entry]
        if lacking:
            problems.append(f"entries[{i}] lacks {', '.join(map(repr, lacking))}")
        elif entry["workload"] not in data["workloads"]:
            problems.append(f"entries[{i}] names workload {entry['workload']!r}, which is not described")
    return problems


def finite(value: float | None) -> float | None:
    """Return a number that JSON can hold, or None."""
    return value if value is not None and math.isfinite(value) else None
