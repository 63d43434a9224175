"""One chunk of a hunt: random cases on every backend of one set of workers, and failures made small."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from concord.conformance.campaign import NOT_JUDGED, Result, Settings
from concord.conformance.fuzz.cases import FuzzCase
from concord.conformance.fuzz.findings import FAILED, NOT_THERE, Failure, Findings, Origin, Signature, failure_of, signature_of
from concord.conformance.fuzz.plan import Failed, Plan, draw, files_elsewhere
from concord.conformance.fuzz.station import RESTARTS, Station, borrow, give_back

ATTEMPTS = {"diverges": 200, "error": 100, "refused": 100, "crashed": 25, "out of memory": 10, "timed out": 0}
"""How many smaller cases are tried for a failure. After a crash each costs the start of a worker."""

SHRUNK = 5
"""How many failures of a backend are made smaller in one chunk: one that fails in more ways needs no smaller cases."""


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
    """Run one chunk. Workers are kept for the next one in this process; see :func:`concord.conformance.fuzz.station.close_idle`.

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
        self.results: list[Result] = []  # of the case that was run last
        self.times: Counter[Signature] = Counter()
        self.known: set[Signature] = set()
        self.faults: set[str] = set()
        self.smallest: FuzzCase | None = None

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
        findings.failures = [replace(failure, times=self.times[failure.signature]) for failure in findings.failures]
        for crew in self.station.crews.values():
            if crew.seat.failure:
                findings.note(f"{crew.name}: {crew.seat.failure}; it was not started again for the rest of chunk {self.chunk}")

    @property
    def over(self) -> bool:
        return self.station.stopped or self.plan.late

    def case(self, index: int) -> None:
        """Run the case of a number, and make each new failure that it shows as small as can be."""
        origin = Origin(self.plan.seed, index)
        self.draw(index, lambda case: self.examine(case, origin))
        while self.results:
            result = self.results.pop(0)
            if result.status in FAILED and signature_of(result) not in self.known:
                self.pursue(result, origin)
                if self.plan.stop_first:
                    raise Over

    def fault(self, case: str, *what: str) -> None:
        """Note what Concord itself failed at, once in each way: that is no finding, and the hunt goes on."""
        self.findings.owed = True
        told = ": ".join(next(iter(words.splitlines()), "") for words in what)
        if told not in self.faults:
            self.faults.add(told)
            self.findings.note(f"{case} could not be judged: {told}")

    def draw(self, index: int, look: Callable[[FuzzCase], None]) -> None:
        draw(self.plan, index, look, lambda case: setattr(self, "smallest", case))

    def examine(self, case: FuzzCase, origin: Origin) -> None:
        """Run a case on every backend, and count what comes of it."""
        if self.over:
            raise Over
        results = self.station.attempt(case.job(_name(origin), self.plan.end_to_end))
        if self.station.stopped:  # the workers were ended in the middle of it
            raise Over
        for result in results:
            if result.status in NOT_THERE:
                self.dismiss(result)
                continue
            if result.status == NOT_JUDGED:
                self.fault(result.case, result.backend, result.detail)
            self.results.append(result)
            self.findings.tally(result.backend, result.dtype).add(result.status, result.verdict, origin, case)
            if result.status in FAILED:
                self.times[signature_of(result)] += 1
        if not self.results:
            self.findings.idle = not self.station.crews
            raise Over
        self.findings.cases += 1
        self.progress()

    def dismiss(self, result: Result) -> None:
        self.station.dismiss(result.backend)
        self.findings.owed |= result.status != "absent"
        self.findings.note(f"{result.backend} is {result.status}: {result.detail}")

    def pursue(self, result: Result, origin: Origin) -> None:
        """Record a failure, with the smallest case that fails in the same way."""
        enough = sum(backend == result.backend for backend, *_ in self.known) >= SHRUNK
        pursuit = _Pursuit(result, origin, self.station, lambda: enough or self.over)
        with contextlib.suppress(Failed):
            self.draw(origin.index, pursuit.look)
        if self.smallest:
            pursuit.attempt(self.smallest)  # hypothesis believes that it passes
        self.known.add(pursuit.signature)
        self.findings.failures.append(pursuit.failure)


class _Pursuit:
    """A failure that is being made smaller, on the backend that failed."""

    def __init__(self, result: Result, origin: Origin, station: Station, over: Callable[[], bool]) -> None:
        self.result, self.origin, self.station, self.over = result, origin, station, over
        self.signature = signature_of(result)
        self.tried: dict[FuzzCase, bool] = {}
        self.found_as: FuzzCase | None = None
        self.case: FuzzCase | None = None  # the smallest so far
        self.attempts = 0

    def look(self, case: FuzzCase) -> None:
        """Fail if a case fails in the same way as the first."""
        if self.found_as is None:
            self.found_as = self.case = case
            self.tried[case] = True
        if self.attempt(case):
            _fail()

    def attempt(self, case: FuzzCase) -> bool:
        """Return whether a case fails in the same way; once there were attempts enough, no further one does."""
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
            self.station.crews[self.result.backend].seat.refresh(RESTARTS)
        (result,) = self.station.attempt(case.job(_name(self.origin)), self.result.backend)
        return result

    @property
    def failure(self) -> Failure:
        """What there is to say of it."""
        assert self.case is not None
        assert self.found_as is not None
        return failure_of(self.result, self.case, self.found_as, self.origin, self.attempts)


def _name(origin: Origin) -> str:
    return f"fuzz-{origin.seed}-{origin.index}"
