"""One chunk of a hunt: random cases on every backend of one set of workers, and failures made small."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis.errors import Flaky

from concord.conformance.campaign import Settings
from concord.conformance.fuzz.cases import FuzzCase
from concord.conformance.fuzz.findings import (
    FAILED,
    NOT_THERE,
    Failure,
    Findings,
    Origin,
    Signature,
    failure_of,
    signature_of,
)
from concord.conformance.fuzz.plan import Failed, Plan, draw, drawn, files_elsewhere
from concord.conformance.fuzz.station import RESTARTS, Station, borrow, give_back
from concord.conformance.verdict import NOT_JUDGED, Result

ATTEMPTS = {"diverges": 200, "error": 100, "refused": 100, "crashed": 25, "out of memory": 10, "timed out": 0}
"""How many smaller cases are tried for a failure. After a crash each costs the start of a worker."""

SHRUNK = 5
"""How many failures of a backend are made smaller in one chunk.

One that fails in more ways needs no smaller cases.
"""


class Over(BaseException):  # hypothesis lets through what is no Exception
    """The chunk ends here."""


def _fail() -> None:
    raise Failed  # in one place: hypothesis takes failures of different lines for different ones


def hunt_chunk(
    plan: Plan,
    settings: Settings,
    chunk: int,
    halted: Callable[[], bool] = lambda: False,
    progress: Callable[[], None] = lambda: None,
) -> Findings:
    """Run one chunk. Workers are kept for the next one in this process.

    See :func:`concord.conformance.fuzz.station.close_idle`.

    Args:
        chunk: its number, from 0.
        halted: asked now and then; once it says True, the chunk ends with what it has found.
        progress: called after each case.
    """
    station = borrow(plan.names, settings)
    try:
        station.halted = halted
        findings = _Chunk(plan, chunk, station, progress).run()
    except BaseException:
        station.close()
        raise
    give_back(station)
    return findings


class _Chunk:
    """A chunk at work."""

    def __init__(self, plan: Plan, chunk: int, station: Station, progress: Callable[[], None]) -> None:
        self.plan, self.chunk, self.station, self.progress = plan, chunk, station, progress
        self.findings = Findings()
        self.times: Counter[Signature] = Counter()
        self.known: set[Signature] = set()
        self.faults: set[str] = set()

    def run(self) -> Findings:
        self.station.refresh()
        try:
            with files_elsewhere():
                for index in self.plan.indices(self.chunk):
                    try:
                        self.case(index)
                    except Exception as error:
                        self.fault(_name(Origin(self.plan.seed, index)), type(error).__name__, str(error))
        except Over:
            pass
        finally:
            self.conclude()
        return self.findings

    def conclude(self) -> None:
        findings = self.findings
        findings.environments |= self.station.environments
        findings.failures = [
            replace(failure, times=self.times[failure.signature]) for failure in findings.failures
        ]
        for runner in self.station.runners.values():
            if runner.supervisor.failure:
                findings.note(
                    f"{runner.name}: {runner.supervisor.failure}; it was not started again for the rest of "
                    f"chunk {self.chunk}"
                )

    @property
    def over(self) -> bool:
        return self.station.stopped or self.plan.late

    def case(self, index: int) -> None:
        """Run the case of a number, and make each new failure that it shows as small as can be."""
        origin, case = Origin(self.plan.seed, index), drawn(self.plan, index)
        for result in self.examine(case, origin):
            if result.status in FAILED and signature_of(result) not in self.known:
                self.pursue(result, case, origin)
                if self.plan.stop_first:
                    raise Over

    def fault(self, case: str, *what: str) -> None:
        """Note what Concord itself failed at, once in each way: that is no finding, and the hunt goes on."""
        self.findings.owed = True
        told = ": ".join(next(iter(words.splitlines()), "") for words in what)
        if told not in self.faults:
            self.faults.add(told)
            self.findings.note(f"{case} could not be judged: {told}")

    def examine(self, case: FuzzCase, origin: Origin) -> list[Result]:
        """Run a case on every backend, count what comes of it, and return it."""
        if self.over:
            raise Over
        results = self.station.attempt(case.job(_name(origin), self.plan.end_to_end))
        if self.station.stopped:  # the workers were ended in the middle of it
            raise Over
        there = [result for result in results if result.status not in NOT_THERE]
        for result in results:
            if result.status in NOT_THERE:
                self.dismiss(result)
        for result in there:
            if result.status == NOT_JUDGED:
                self.fault(result.case, result.backend, result.detail)
            self.findings.tally(result.backend, result.dtype).add(result.status, result.verdict, origin, case)
            if result.status in FAILED:
                self.times[signature_of(result)] += 1
        if not there:
            self.findings.idle = not self.station.runners
            raise Over
        self.findings.cases += 1
        self.progress()
        return there

    def dismiss(self, result: Result) -> None:
        self.station.dismiss(result.backend)
        self.findings.owed |= result.status != "absent"
        self.findings.note(f"{result.backend} is {result.status}: {result.detail}")

    def pursue(self, result: Result, case: FuzzCase, origin: Origin) -> None:
        """Record a failure, with the smallest case that fails in the same way.

        Whatever becomes of the search, what was seen is recorded.
        """
        enough = sum(backend == result.backend for backend, *_ in self.known) >= SHRUNK
        pursuit = _Pursuit(result, case, origin, self.station, lambda: enough or self.over)
        smallest: list[FuzzCase] = []
        try:
            with contextlib.suppress(Failed, Flaky):  # the latter: a backend that does not fail each time
                draw(self.plan, origin.index, pursuit.look, smallest.append)
            for passed in smallest:
                pursuit.attempt(passed)  # hypothesis believes that it passes
        finally:
            self.known.add(pursuit.signature)
            self.findings.failures.append(pursuit.failure)


class _Pursuit:
    """A failure that is being made smaller, on the backend that failed."""

    def __init__(
        self, result: Result, case: FuzzCase, origin: Origin, station: Station, over: Callable[[], bool]
    ) -> None:
        self.result, self.origin, self.station, self.over = result, origin, station, over
        self.signature = signature_of(result)
        self.tried = {case: True}
        self.found_as = self.case = case  # the latter: the smallest so far
        self.attempts = 0

    def look(self, case: FuzzCase) -> None:
        """Fail if a case fails in the same way as the first."""
        if self.attempt(case):
            _fail()

    def attempt(self, case: FuzzCase) -> bool:
        """Return whether a case fails in the same way.

        Once there were attempts enough, no further one does.
        """
        if case not in self.tried and (self.attempts >= ATTEMPTS[self.result.status] or self.over()):
            return False
        if case not in self.tried:
            result = self.run(case)
            self.tried[case] = not self.over() and signature_of(result) == self.signature
            if self.tried[case]:
                self.result, self.case = result, case
        return self.tried[case]

    def run(self, case: FuzzCase) -> Result:
        self.attempts += 1
        if self.result.status != "timed out":
            self.station.runners[self.result.backend].supervisor.refresh(RESTARTS)
        (result,) = self.station.attempt(case.job(_name(self.origin)), self.result.backend)
        return result

    @property
    def failure(self) -> Failure:
        """What there is to say of it."""
        return failure_of(self.result, self.case, self.found_as, self.origin, self.attempts)


def _name(origin: Origin) -> str:
    return f"fuzz-{origin.seed}-{origin.index}"
