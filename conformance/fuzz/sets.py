"""A hunt over sets of workers: here, in processes of their own, with workers on other hosts, or as tasks of Dask."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import replace
from typing import Any

from concord.backends.pool import end_with_parent
from concord.conformance.campaign import Settings
from concord.conformance.fuzz.findings import Findings, merged
from concord.conformance.fuzz.hunting import hunt_chunk
from concord.conformance.fuzz.plan import Plan
from concord.conformance.fuzz.station import close_idle
from concord.spec.errors import SpecError, optional

Progress = Callable[[str, int], None]
"""Called with the name of a set of workers and how many cases it has done."""

DIED = "its process died"
"""Why a set of workers is given up."""

PATIENCE = 8.0
"""Seconds that a scheduler has to answer."""


class Place:
    """Where chunks run: one set of workers, or everything that a scheduler has.

    Attributes:
        name: what progress and notes call it.
        width: how many chunks it takes at a time.
    """

    name: str
    width = 1

    def submit(self, plan: Plan, chunk: int) -> Future[Findings]:
        """Begin a chunk."""
        raise NotImplementedError

    def halt(self) -> None:
        """Let every chunk that runs end with what it has found."""
        raise NotImplementedError

    def done(self, finished: int) -> int:
        """Return how many cases were done; ``finished`` of them are in chunks that have ended."""
        return finished

    def close(self) -> None:
        """End everything that was started."""
        raise NotImplementedError


class Here(Place):
    """A set of workers of this process."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.pool: Executor = ThreadPoolExecutor(max_workers=1)
        self.halted = threading.Event()
        self.counted = 0

    def submit(self, plan: Plan, chunk: int) -> Future[Findings]:
        """Begin a chunk."""
        return self.pool.submit(hunt_chunk, plan, self.settings, chunk, self.halted.is_set, self.tick)

    def tick(self) -> None:
        """Count a case."""
        self.counted += 1

    def halt(self) -> None:
        """Let the chunk that runs end with what it has found."""
        self.halted.set()

    def done(self, finished: int) -> int:
        """Return how many cases were done."""
        return self.counted

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown()
        close_idle()


class Process(Place):
    """A set of workers with a process of its own, which judges what they compute."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.halted, self.counted = context.Event(), context.Value("q", 0)
        self.pool = ProcessPoolExecutor(1, context, _settle, (settings, self.halted, self.counted))

    def submit(self, plan: Plan, chunk: int) -> Future[Findings]:
        """Begin a chunk."""
        return self.pool.submit(_hunt_in_process, plan, chunk)

    def halt(self) -> None:
        """Let the chunk that runs end with what it has found."""
        self.halted.set()

    def done(self, finished: int) -> int:
        """Return how many cases were done."""
        return int(self.counted.value)

    def close(self) -> None:
        """End the process and its workers."""
        with contextlib.suppress(BrokenExecutor):
            self.pool.submit(close_idle).result()
        self.pool.shutdown()


class _Settled:
    """What the process of a set was started with."""

    settings: Settings
    halted: Any
    counted: Any


def _settle(settings: Settings, halted: Any, counted: Any) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # the parent's to handle; ignored, they would be in every worker too
        signal.signal(number, lambda number, frame: None)
    end_with_parent()
    _Settled.settings, _Settled.halted, _Settled.counted = settings, halted, counted


def _hunt_in_process(plan: Plan, chunk: int) -> Findings:
    def tick() -> None:
        _Settled.counted.value += 1

    return hunt_chunk(plan, _Settled.settings, chunk, _Settled.halted.is_set, tick)


class Dask(Place):
    """Everything that a Dask scheduler has; its workers need this code and the frameworks.

    Args:
        address: of the scheduler, for example ``"tcp://host:8786"``.

    Raises:
        SpecError: if Dask is not installed, or no scheduler answers.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        self.name, self.settings = address, settings
        distributed = dask()
        try:
            self.client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise SpecError(
                f"--scheduler is {address!r} but no scheduler answers there within {PATIENCE:g} s: {str(error).splitlines()[0]}"
            ) from None
        self.event = f"concord-{uuid.uuid4().hex}"
        self.executor = self.client.get_executor(pure=False)

    @property
    def width(self) -> int:  # type: ignore[override]
        """Twice as many chunks as Dask has threads, so that none waits for us."""
        threads: int = sum(self.client.nthreads().values())
        return max(2, 2 * threads)

    def submit(self, plan: Plan, chunk: int) -> Future[Findings]:
        """Begin a chunk."""
        future: Future[Findings] = self.executor.submit(_hunt_on_dask, plan, self.settings, chunk, self.event)
        return future

    def halt(self) -> None:
        """Let every chunk that runs end with what it has found."""
        dask().Event(self.event, client=self.client).set()

    def close(self) -> None:
        """End the workers that Dask's workers have started, and the connection."""
        self.client.run(close_idle)
        self.executor.shutdown()
        self.client.close()


def dask() -> Any:
    """Return the module of Dask.

    Raises:
        SpecError: if it is not installed.
    """
    with optional("--scheduler", "dask"):
        return importlib.import_module("distributed")


def _hunt_on_dask(plan: Plan, settings: Settings, chunk: int, event: str) -> Findings:
    return hunt_chunk(plan, settings, chunk, dask().Event(event).is_set)


def places(
    settings: Settings,
    names: Sequence[str],
    sets: int = 1,
    hosts: Sequence[str] = (),
    scheduler: str | None = None,
) -> list[Place]:
    """Return where a hunt is to run.

    Args:
        sets: how many sets of workers there are on this machine. One alone belongs to this process, others have
            processes of their own.
        hosts: ``"host"`` or ``"host:/path/to/checkout"``: one more set for each, whose workers run there.
        scheduler: the address of a Dask scheduler, in place of sets.

    Raises:
        SpecError: if the scheduler cannot be reached.
    """
    if scheduler is not None:
        return [Dask(scheduler, settings)]
    far = [(host.partition(":")[0], replace(settings, ssh=dict.fromkeys(names, host))) for host in hosts]
    if sets == 1 and not far:
        return [Here("cases", settings)]
    return [
        Process(name, chosen) for name, chosen in [*((f"set {i + 1}", settings) for i in range(sets)), *far]
    ]


def hunt(
    plan: Plan,
    where: Sequence[Place],
    progress: Progress = lambda place, done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Findings:
    """Run the chunks of a plan wherever there is room, and merge what they find, in their order. The places are closed.

    Args:
        where: see :func:`places`.
        stopped: asked now and then; once it says True, the hunt ends with what it has found.
    """
    started = time.time()
    work = _Work(plan, where, progress, stopped)
    try:
        work.run()
    finally:
        for place in where:
            place.halt()
            place.close()
    findings = merged(found for _, found in sorted(work.found, key=lambda pair: pair[0]))
    for note in (*work.notes, *findings.said_of_unjudged):
        findings.note(note)
    findings.owed |= bool(work.notes)
    findings.interrupted = work.interrupted
    findings.seconds = time.time() - started
    return findings


class _Work:
    """Chunks, and who runs them."""

    def __init__(
        self, plan: Plan, where: Sequence[Place], progress: Progress, stopped: Callable[[], bool]
    ) -> None:
        self.plan, self.where, self.progress, self.stopped = plan, list(where), progress, stopped
        self.pending: dict[Future[Findings], tuple[Place, int]] = {}
        self.found: list[tuple[int, Findings]] = []
        self.notes: list[str] = []
        self.chunks: Iterator[int] = (
            iter(range(plan.chunks)) if plan.chunks is not None else itertools.count()
        )
        self.again: list[int] = []  # chunks whose place has failed
        self.ending = self.interrupted = False

    def run(self) -> None:
        """Give chunks out until there are no more."""
        self.give_out()
        while self.pending:
            self.collect()
            self.give_out()

    def give_out(self) -> None:
        for place in list(self.where):
            while (
                not self.ending
                and not self.plan.late
                and sum(at is place for at, _ in self.pending.values()) < place.width
            ):
                chunk = self.again.pop() if self.again else next(self.chunks, None)
                if chunk is None:
                    break
                try:
                    self.pending[place.submit(self.plan, chunk)] = place, chunk
                except BrokenExecutor:
                    self.retire(place, chunk, DIED)
                    break

    def collect(self) -> None:
        if self.stopped() and not self.interrupted:
            self.interrupted = True
            self.halt()
        done, _ = wait(self.pending, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in done:
            self.take(future, *self.pending.pop(future))
        for place in self.where:
            finished = sum(found.cases for _, found in self.found)
            self.progress(place.name, place.done(finished))

    def take(self, future: Future[Findings], place: Place, chunk: int) -> None:
        try:
            found = future.result()
        except BrokenExecutor:
            self.retire(place, chunk, DIED)
            return
        except Exception as error:  # what all others have found is kept
            self.retire(
                place,
                chunk,
                f"a fault of Concord: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            )
            return
        if found.idle and len(self.where) > 1:
            self.retire(place, chunk, "; ".join(found.notes) or "no backend is there")
            return
        self.found.append((chunk, found))
        if found.idle or (self.plan.stop_first and found.failures):
            self.halt()

    def retire(self, place: Place, chunk: int, reason: str) -> None:
        """Do without a place, and let another one do what it should have done."""
        if place in self.where:
            self.where.remove(place)
            self.notes.append(f"{place.name} was given up: {reason}")
        self.again.append(chunk)

    def halt(self) -> None:
        """Let all that runs end with what it has found."""
        self.ending = True
        for place in self.where:
            place.halt()
