"""Findings of a hunt, and its counts and largest errors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from concord.conformance.fuzz.plan import Plan
from concord.conformance.fuzz.random_cases import FuzzCase
from concord.conformance.judging.expectation import is_gradient
from concord.conformance.judging.verdict import BINS, FAILED_WORKER, Judgement, Result, conclude
from concord.conformance.record_fields import Count, Field, Number, also

# Statuses of an unavailable backend, which are not findings.
NOT_THERE = ("absent", "missing", "broken")

# Statuses of a finding.
FAILED = ("diverges", "refused", "error", "crashed", "timed out", "out of memory")

# Backend, status, and the first divergent tensor or the backend's message.
Signature = tuple[str, str, str]


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


@dataclass
class Failure:
    """A kind of failure, with its smallest case."""

    result: Result
    case: FuzzCase  # the smallest such case
    times: Count = 1  # number of such cases
    folder: str = ""  # where it was written, if at all

    @property
    def signature(self) -> Signature:
        """The identity of the failure's kind."""
        # Digits and layers are removed, so that all layers give the same finding.
        row = self.result.first_divergence
        note = self.result.detail if row is None else row.note if row.deciding is None else ""
        words = f"{row.tensor if row else ''} {re.sub('[0-9]+', '#', note)}"
        return self.result.backend, self.result.status, re.sub(r"\blayers\.\d+\.", "", words).strip()

    @property
    def name(self) -> str:
        """Name of its files."""
        backend = re.sub("[^A-Za-z0-9]+", "-", self.result.backend).strip("-")
        return f"{backend}-{self.result.case.removeprefix('fuzz-')}"


def explained(result: Result) -> Result:
    """Explain a result, and drop the data for the search."""
    verdict = result.verdict
    if verdict is None or (verdict.judge is None and verdict.case is None):
        return result
    try:
        verdict = verdict.explained()
    except Exception as error:  # random cases may break the search, but the finding matters more
        verdict = verdict.unexplained()
        result = replace(result, attribution=f"the search for its cause failed: {error!r}")
    return replace(result, verdict=replace(verdict, case=None))


@dataclass
class Findings:
    """The findings of a hunt, or of merged chunks."""

    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)  # by backend and precision
    failures: list[Failure] = field(default_factory=list)  # one per signature
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cases: Count = 0  # cases drawn and run
    # Whether a requested backend was unavailable, or Concord failed to judge a case.
    owed: bool = False
    interrupted: bool = False
    seconds: Number = 0.0
    plan: Plan | None = None

    def tally(self, backend: str, dtype: str) -> Tally:
        """A backend's tally in a precision."""
        return self.tallies.setdefault(backend, {}).setdefault(dtype, Tally())

    def each(self) -> list[tuple[str, str, Tally]]:
        """Every backend, precision and tally in sorted order."""
        return [
            (backend, dtype, by_dtype[dtype])
            for backend, by_dtype in sorted(self.tallies.items())
            for dtype in sorted(by_dtype)
        ]

    def add(self, failure: Failure) -> None:
        """Count a failure, and keep the smallest case per signature."""
        for place, previous in enumerate(self.failures):
            if previous.signature == failure.signature:
                smaller = min(previous, failure, key=lambda candidate: _size(candidate.case))
                times = previous.times + failure.times
                self.failures[place] = replace(smaller, times=times)
                return
        self.failures.append(failure)

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Add other findings."""
        for backend, dtype, tally in other.each():
            self.tally(backend, dtype).merge(tally)
        for failure in other.failures:
            self.add(failure)
        self.environments = {**other.environments, **self.environments}
        for text in other.notes:
            self.note(text)
        self.cases += other.cases
        self.owed |= other.owed

    @property
    def exit_code(self) -> int:
        """0: no finding; 1: a divergence or refusal; 3: unjudged cases."""
        statuses = {status for _, _, tally in self.each() for status in tally.statuses}
        if self.owed or statuses & set(FAILED_WORKER) or self.unjudged or not self.judged:
            return 3
        return 1 if statuses & {"diverges", "refused"} else 0

    @property
    def judged(self) -> list[str]:
        """Backends with a judged case."""
        return [name for name in self.tallies if name not in self.unjudged]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Backends without a judged case."""
        _, unjudged = conclude(
            (backend, status) for backend, _, tally in self.each() for status in tally.statuses
        )
        return unjudged


def _size(case: FuzzCase) -> tuple[int, int]:
    return case.batch * case.tokens * case.config.d_model, case.config.num_layers
