"""The measurement as data, for ``--json`` and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concord.conformance.judging.verdict import FAILED_WORKER
from concord.conformance.run import record
from concord.spec.errors import SpecError
from concord.speed import statistics
from concord.speed.measurement import SpeedPlan
from concord.speed.presets import Workload
from concord.speed.work import flops

# Name of a backend's environment in records. There is only one: equal threads, and documented switches.
TUNED = "tuned"


class SpeedRecord:
    """A record that grows entry by entry, so that interrupted runs keep their entries."""

    def __init__(self, plan: SpeedPlan) -> None:
        self.seconds = 0.0
        self.complete = False
        self.signalled = 0  # the exit code, if a signal ended it
        self.backends: dict[str, Any] = {}
        self.workloads = {work.name: described(work) for work in plan.workloads}
        self.settings = {
            **{name: getattr(plan.settings, name) for name in ("device", "precision", "threads")},
            **{name: getattr(plan, name) for name in ("turns", "budget")},
        }
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry."""
        self.backends[entry["backend"]] = {TUNED: entry["backend_info"]}
        self.entries.append({name: value for name, value in entry.items() if name != "backend_info"})

    def record(self) -> record.Record:
        """The record with summaries."""
        best = best_rates(self.entries, self.workloads)
        body = {
            "exit_code": self.signalled or exit_code(self.entries),
            "seconds": self.seconds,
            "complete": self.complete,
            "settings": self.settings,
            "workloads": self.workloads,
            "backends": self.backends,
            "best_product_gflops": {dtype: rate for (name, dtype), rate in best.items() if not name},
            "entries": [
                {**entry, "summary": summary(entry, self.workloads[entry["workload"]], best)}
                for entry in self.entries
            ],
        }
        return record.make_record(body, "speed", "Speed, side by side")


def described(work: Workload) -> dict[str, Any]:
    """Describe a workload."""
    preset = work.preset
    return {
        "preset": preset.name,
        "source": preset.source,
        "kind": work.kind,
        "padding": work.padding,
        "dtype": work.dtype,
        "recipe": work.recipe.as_dict() if work.recipe else None,
        "key": work.key,
        "config": preset.config.as_dict(),
        "batch": preset.batch,
        "tokens": preset.tokens,
        "real_tokens": sum(work.lengths),
        "flops": flops(work),
        "real_flops": flops(work, real_only=True),
    }


def best_rates(
    entries: Sequence[Mapping[str, Any]], workloads: Mapping[str, Any]
) -> dict[tuple[str, str], float]:
    """Best bare product rates by backend and precision; ``""`` means all backends."""
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        for key in ((name, workloads[entry["workload"]]["dtype"]) for name in (entry["backend"], "")):
            best[key] = max(best.get(key, 0.0), entry.get("product_gflops") or 0.0)
    return best


def summary(
    entry: Mapping[str, Any], work: Mapping[str, Any], best: Mapping[tuple[str, str], float]
) -> dict[str, Any] | None:
    """Figures of an entry, or None if it was not measured."""
    turns = [turn["seconds"] for turn in entry["turns"]]
    if entry["status"] != "measured" or not turns:
        return None
    median, (low, high) = statistics.median(turns), statistics.interval(turns)
    spread = statistics.spread(turns)
    # Unpadded execution skips padding. If its rate included padding, it could exceed the machine's.
    rate = work["real_flops" if "unpadded" in entry["execution"] else "flops"] / median / 1e9
    own, overall = (best.get((name, work["dtype"])) for name in (entry["backend"], ""))
    busy = [turn["busy_cores"] for turn in entry["turns"] if turn["busy_cores"] is not None]
    peaks = [turn["peak_memory_bytes"] for turn in entry["turns"] if turn["peak_memory_bytes"]]
    return {
        "median_seconds": median,
        "min_seconds": statistics.least(turns),
        "low_seconds": low,
        "high_seconds": high,
        "spread": spread,
        "steady": None if spread is None else statistics.settled(turns),
        "steps": sum(len(turn) for turn in turns),
        "real_tokens_per_second": work["real_tokens"] / median,
        "gflops": rate,
        "share_of_own_product": rate / own if own else None,
        "share_of_best_product": rate / overall if overall else None,
        # PyTorch compiles in its first step, whose additional time counts as compilation.
        "compile_seconds": entry["compile_seconds"] + max(0.0, entry["first_seconds"] - median),
        "peak_memory_bytes": max(peaks, default=None),
        "busy_cores": sum(busy) / len(busy) if busy else None,
    }


def check(data: Mapping[str, Any]) -> None:
    """Refuse a record whose exit code contradicts its entries.

    Raises:
        SpecError: naming both.
    """
    if record.SIGNALLED > data["exit_code"] != (expected := exit_code(data["entries"])):
        raise SpecError(f"exit_code is {data['exit_code']} but its contents imply {expected}")


def exit_code(entries: Sequence[Mapping[str, Any]]) -> int:
    """0: measured; 1: withheld as wrong, or refused; 3: a backend failed, or nothing was judged."""
    statuses = {entry["status"] for entry in entries}
    if statuses & {*FAILED_WORKER, "undetermined"} or not statuses & {"measured", "withheld"}:
        return 3
    return 1 if statuses & {"withheld", "refused"} else 0
