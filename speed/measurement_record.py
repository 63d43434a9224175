"""The measurement as data, for ``--json`` and the page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from concord.conformance.judging.verdict import FAILED_WORKER
from concord.conformance.run import record
from concord.spec.errors import SpecError
from concord.speed import statistics
from concord.speed.measurement import SpeedPlan
from concord.speed.presets import Workload
from concord.speed.work import flops


class SpeedRecord:
    """A record that grows entry by entry, so that interrupted runs keep their entries."""

    def __init__(self, plan: SpeedPlan) -> None:
        self.began = time.perf_counter()
        self.complete = False
        self.signalled = 0  # the exit code, if a signal ended it
        self.backends: dict[str, Any] = {}
        self.workloads = {work.name: described(work) for work in plan.workloads}
        self.settings = {
            "device": plan.settings.device,
            "threads": plan.settings.threads,
            "turns": plan.turns,
            "budget": plan.budget,
        }
        self.entries: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry, in place of an earlier one of the same backend, mode and workload."""
        # Its environment has equal threads, and documented switches.
        self.backends[entry["backend"]] = {"tuned": entry["backend_info"]}
        key = entry["backend"], entry["mode"], entry["workload"]
        self.entries[key] = {name: value for name, value in entry.items() if name != "backend_info"}

    def record(self) -> record.Record:
        """The record with summaries."""
        entries = list(self.entries.values())
        best = best_rates(entries, self.workloads)
        body = {
            "exit_code": self.signalled or exit_code(entries),
            "seconds": time.perf_counter() - self.began,
            "complete": self.complete,
            "settings": self.settings,
            "workloads": self.workloads,
            "backends": self.backends,
            "best_product_gflops": best,
            "entries": [
                {**entry, "summary": summary(entry, work, best[work["dtype"]])}
                for entry in entries
                for work in [self.workloads[entry["workload"]]]
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


def best_rates(entries: Sequence[Mapping[str, Any]], workloads: Mapping[str, Any]) -> dict[str, float]:
    """Best bare product rates by dtype."""
    best: dict[str, float] = {}
    for entry in entries:
        dtype = workloads[entry["workload"]]["dtype"]
        best[dtype] = max(best.get(dtype, 0.0), entry.get("product_gflops", 0.0))
    return best


def summary(entry: Mapping[str, Any], work: Mapping[str, Any], best: float) -> dict[str, Any] | None:
    """Figures of an entry, or None if it was not measured.

    Args:
        best: the best rate of a bare product, in the workload's dtype.
    """
    turns = [turn["seconds"] for turn in entry["turns"]]
    if entry["status"] != "measured" or not turns:
        return None
    median, (low, high) = statistics.median(turns), statistics.interval(turns)
    spread = statistics.spread(turns)
    # Unpadded execution skips padding. If its rate included padding, it could exceed the machine's.
    rate = work["real_flops" if "unpadded" in entry["execution"] else "flops"] / median / 1e9
    peer = entry.get("peer_seconds")  # of the same turns
    peaks = [turn["peak_memory_bytes"] for turn in entry["turns"] if turn["peak_memory_bytes"]]
    return {
        "median_seconds": median,
        "min_seconds": statistics.least(turns),
        "low_seconds": low,
        "high_seconds": high,
        "spread": spread,
        "of_best_peer": median / peer if peer else None,
        "steady": None if spread is None else statistics.settled(turns),
        "steps": sum(len(turn) for turn in turns),
        "real_tokens_per_second": work["real_tokens"] / median,
        "gflops": rate,
        "share_of_best_product": rate / best if best else None,
        # PyTorch compiles in its first step, whose additional time counts as compilation.
        "compile_seconds": entry["compile_seconds"] + max(0.0, entry["first_seconds"] - median),
        "peak_memory_bytes": max(peaks, default=None),
        "busy_cores": sum(turn["busy_cores"] for turn in entry["turns"]) / len(turns),
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
