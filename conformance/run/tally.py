"""Counts and largest errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Literal

from concord.conformance.judging.expectation import is_gradient
from concord.conformance.judging.verdict import BINS, Judgement, Result
from concord.conformance.record_fields import Count, Field, Number, also

Kind = Literal["taps", "gradients"]
KINDS: tuple[Kind, ...] = ("taps", "gradients")


@dataclass(frozen=True)
class Peak:
    """A statistic's largest value, with its tensor and case."""

    value: Number = 0.0
    tensor: str = ""
    case: str = ""


@dataclass
class Statistics:
    """Judgements of one kind of tensor."""

    tensors: Count = 0  # number of judged tensors
    undetermined: Count = 0  # number of undetermined tensors
    z: Peak = Peak()  # the largest error of an element, in sigma
    rms: Peak = Peak()  # the largest RMS error of a tensor, in RMS sigma
    # Number of elements by bin of Z_BINS, and beyond the last.
    histogram: Annotated[list[Count], Field(min_length=BINS, max_length=BINS)] = field(
        default_factory=lambda: [0] * BINS
    )

    def add(self, judgement: Judgement, tensor: str, case: str) -> None:
        """Count a judgement."""
        if judgement.status == "undetermined":
            self.undetermined += 1
            return
        z, rms = (Peak(value, tensor, case) for value in (judgement.z, judgement.rms))
        self.merge(Statistics(1, 0, z, rms, [*judgement.histogram]))

    def merge(self, other: Statistics) -> None:
        """Add other counts."""
        self.tensors += other.tensors
        self.undetermined += other.undetermined
        # The first of equal peaks is kept.
        self.z = max(self.z, other.z, key=lambda peak: peak.value)
        self.rms = max(self.rms, other.rms, key=lambda peak: peak.value)
        self.histogram = [ours + others for ours, others in zip(self.histogram, other.histogram, strict=True)]


@dataclass
class Tally:
    """Counts of one backend in one precision."""

    as_written = also("cases")

    statuses: Counter[str] = field(default_factory=Counter)  # cases by status
    tensors: Count = 0  # number of judged tensors
    # Deciding judgements by kind.
    statistics: Annotated[dict[Kind, Statistics], Field(min_length=2)] = field(
        default_factory=lambda: {kind: Statistics() for kind in KINDS}
    )

    @property
    def cases(self) -> int:
        """Number of cases."""
        return self.statuses.total()

    def add(self, result: Result) -> None:
        """Count a result."""
        self.statuses[result.status] += 1
        for row in result.table:
            self.tensors += row.status in ("agrees", "diverges")
            if row.deciding is not None:
                kind: Kind = "gradients" if is_gradient(row.tensor) else "taps"
                self.statistics[kind].add(row.deciding, row.tensor, result.case)

    def merge(self, other: Tally) -> None:
        """Add other counts."""
        self.statuses += other.statuses
        self.tensors += other.tensors
        for kind, statistics in self.statistics.items():
            statistics.merge(other.statistics[kind])
