"""Findings of a hunt: counts and largest errors by backend and precision, and the cases that failed."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from concord.conformance.fuzz.plan import Plan
from concord.conformance.fuzz.random_cases import FuzzCase
from concord.conformance.judging.verdict import FAILED_WORKER, Result, conclude
from concord.conformance.record_fields import Count, Number
from concord.conformance.run.tally import Tally

# Statuses of a backend that cannot be had at all; that is no finding.
NOT_THERE = ("absent", "missing", "broken")

# Statuses of a case that is a finding.
FAILED = ("diverges", "refused", "error", "crashed", "timed out", "out of memory")

# Backend, status, and the tensor that diverges first, or the backend's words.
Signature = tuple[str, str, str]


@dataclass
class Failure:
    """A way to fail, with the smallest case of a hunt."""

    result: Result
    case: FuzzCase  # the smallest that fails so
    times: Count = 1  # how many cases of the run do
    folder: str = ""  # where it was written; empty where it was not

    @property
    def signature(self) -> Signature:
        """What identifies the finding."""
        # Numbers of layers and other digits are left out: in whatever layer it shows, it is one finding.
        row = self.result.first_divergence
        note = self.result.detail if row is None else row.note if row.deciding is None else ""
        words = f"{row.tensor if row else ''} {re.sub('[0-9]+', '#', note)}"
        return self.result.backend, self.result.status, re.sub(r"\blayers\.\d+\.", "", words).strip()

    @property
    def name(self) -> str:
        """A name for files: the backend, the seed of the run and the number of the case."""
        backend = re.sub("[^A-Za-z0-9]+", "-", self.result.backend).strip("-")
        return f"{backend}-{self.result.case.removeprefix('fuzz-')}"


def explained(result: Result) -> Result:
    """Return a result with its explanation, without the data that only the search needs."""
    verdict = result.verdict
    if verdict is None or (verdict.judge is None and verdict.case is None):
        return result
    try:
        verdict = verdict.explained()
    except Exception as error:  # random cases are hard on the search for causes; what was found matters more
        verdict = verdict.unexplained()
        result = dataclasses.replace(result, attribution=f"looking for its cause failed: {error!r}")
    return dataclasses.replace(result, verdict=dataclasses.replace(verdict, case=None))


@dataclass
class Findings:
    """The findings of a hunt, or of chunks that were merged."""

    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)  # by backend and precision
    failures: list[Failure] = field(default_factory=list)  # one for each signature
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was not run, and why
    cases: Count = 0  # those that were drawn and run
    # Whether a backend that was asked for was not there, or Concord failed to judge a case.
    owed: bool = False
    interrupted: bool = False
    seconds: Number = 0.0
    plan: Plan | None = None

    def tally(self, backend: str, dtype: str) -> Tally:
        """Return the tally of a backend in a precision."""
        return self.tallies.setdefault(backend, {}).setdefault(dtype, Tally())

    def each(self) -> list[tuple[str, str, Tally]]:
        """Return each backend, precision and tally, sorted by name."""
        tallies = sorted(self.tallies.items())
        return [(backend, dtype, of[dtype]) for backend, of in tallies for dtype in sorted(of)]

    def add(self, failure: Failure) -> None:
        """Count a failure; of those with one signature the smallest case stays."""
        for place, known in enumerate(self.failures):
            if known.signature == failure.signature:
                smaller = min(known, failure, key=lambda one: _size(one.case))
                times = known.times + failure.times
                self.failures[place] = dataclasses.replace(smaller, times=times)
                return
        self.failures.append(failure)

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Add the findings of another."""
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
        """0: nothing found. 1: something diverges. 3: a backend crashed, is missing, or was not judged."""
        statuses = {status for _, _, tally in self.each() for status in tally.statuses}
        if self.owed or statuses & set(FAILED_WORKER) or self.unjudged or not self.judged:
            return 3
        return 1 if statuses & {"diverges", "refused"} else 0

    @property
    def judged(self) -> list[str]:
        """The backends with a judged case."""
        return [name for name in self.tallies if name not in self.unjudged]

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The backends without a judged case."""
        _, unjudged = conclude(
            (backend, status) for backend, _, tally in self.each() for status in tally.statuses
        )
        return unjudged


def _size(case: FuzzCase) -> tuple[int, int]:
    return case.batch * case.tokens * case.config.d_model, case.config.num_layers
