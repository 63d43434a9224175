"""Two records compared: what changed, and by more than the noise of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MARGIN = 0.02
"""The least change that is called one, however quiet both measurements were.

Clocks and placement do as much.
"""


@dataclass(frozen=True)
class TimeChange:
    """One measurement, old and new.

    Attributes:
        verdict: ``"faster"``, ``"slower"``, ``"same"``, ``"new"``, ``"gone"`` or ``"cannot say"`` (not the
            same work, or not measured on one side).
        ratio: new time over old time.
        noise: the least departure of that ratio from 1 that would have been called a change.
        detail: why nothing can be said.
    """

    backend: str
    mode: str
    workload: str
    verdict: str
    old: float | None = None
    new: float | None = None
    ratio: float | None = None
    noise: float | None = None
    detail: str = ""


def drift(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """Return how much faster bare matrix products are on the new side than on the old.

    What the machine itself did.
    """
    before, after = old["best_product_gflops"], new["best_product_gflops"]
    ratios = [after[dtype] / rate for dtype, rate in before.items() if rate and after.get(dtype)]
    return ratios[0] if ratios else None


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[TimeChange]:
    """Compare two records (:func:`concord.speed.record.read`), entry by entry."""
    before, after = (
        {(e["backend"], e["mode"], e["workload"]): e for e in data["entries"]} for data in (old, new)
    )
    for key in dict.fromkeys([*before, *after]):
        if key not in before or key not in after:
            yield TimeChange(*key, "new" if key in after else "gone")
        else:
            yield _change(
                key,
                before[key],
                after[key],
                old["workloads"][key[2]]["key"] == new["workloads"][key[2]]["key"],
            )


def _change(
    key: tuple[str, str, str], old: Mapping[str, Any], new: Mapping[str, Any], same_work: bool
) -> TimeChange:
    if not same_work:
        return TimeChange(*key, "cannot say", detail="the workload is not the same")
    a, b = old.get("summary"), new.get("summary")
    if not a or not b:
        return TimeChange(*key, "cannot say", detail=f"was {old['status']}, is {new['status']}")
    ratio = b["median_seconds"] / a["median_seconds"]
    # The noise of each side is the range of the middle half of its turns, doubled: all but few turns lie
    # within it.
    noise = MARGIN + sum(2 * (s["high_seconds"] - s["low_seconds"]) / s["median_seconds"] for s in (a, b))
    verdict = "slower" if ratio > 1 + noise else "faster" if 1 / ratio > 1 + noise else "same"
    return TimeChange(*key, verdict, a["median_seconds"], b["median_seconds"], ratio, noise)
