"""A hunt: the chunks of a plan, one after the other here or as tasks of a Dask cluster, and what they
find, merged.
"""

from __future__ import annotations

import importlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

from concord.conformance.campaign import Settings
from concord.conformance.fuzz.chunk import hunt_chunk
from concord.conformance.fuzz.findings import Findings, merged
from concord.conformance.fuzz.plan import Plan
from concord.conformance.fuzz.station import close_idle
from concord.spec.errors import SpecError, optional

Progress = Callable[[int], None]
"""Called with how many cases are done."""

Found = Iterator[tuple[int, Findings]]
"""Numbers of chunks that have ended, and what each has found."""

PATIENCE = 8.0
"""Seconds that a scheduler has to answer."""


def hunt(
    plan: Plan,
    settings: Settings,
    scheduler: str | None = None,
    progress: Progress = lambda done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Findings:
    """Run the chunks of a plan, and merge what they find, in their order. All workers are ended.

    Args:
        scheduler: the address of a Dask scheduler whose workers run the chunks, for example
            ``"tcp://host:8786"``; by default they run here.
        stopped: asked now and then; once it says True, the hunt ends with what it has found.

    Raises:
        SpecError: if Dask is not installed, or no scheduler answers.
    """
    started, found, fault = time.time(), list[tuple[int, Findings]](), ""
    chunks = _here(plan, settings, progress, stopped)
    if scheduler is not None:
        chunks = _on_dask(plan, settings, connected(scheduler), progress, stopped)
    try:
        for each in chunks:
            found.append(each)
    except SpecError:
        raise
    except Exception as error:  # what was found until then is kept
        said = next(iter(str(error).splitlines()), "")
        fault = f"the hunt ended early: a fault of Concord: {type(error).__name__}: {said}"
    findings = merged(each for _, each in sorted(found, key=lambda pair: pair[0]))
    for note in filter(None, (fault, *findings.said_of_unjudged)):
        findings.note(note)
    findings.owed |= bool(fault)
    findings.interrupted = stopped()
    findings.seconds = time.time() - started
    return findings


def _numbers(plan: Plan) -> Iterator[int]:
    return itertools.count() if plan.chunks is None else iter(range(plan.chunks))


def _is_last(plan: Plan, findings: Findings) -> bool:
    """Return whether no chunk is to follow one that has found this."""
    return findings.idle or (plan.stop_first and bool(findings.failures))


def _here(plan: Plan, settings: Settings, progress: Progress, stopped: Callable[[], bool]) -> Found:
    counted = itertools.count(1)
    try:
        for chunk in _numbers(plan):
            if plan.late or stopped():
                return
            findings = hunt_chunk(plan, settings, chunk, stopped, lambda: progress(next(counted)))
            yield chunk, findings
            if _is_last(plan, findings):
                return
    finally:
        close_idle()


def _on_dask(
    plan: Plan, settings: Settings, client: Any, progress: Progress, stopped: Callable[[], bool]
) -> Found:
    """Keep twice as many chunks at Dask as it has threads, so that none of them waits."""
    event = dask().Event(f"concord-{uuid.uuid4().hex}", client=client)
    executor, numbers, done, ending = client.get_executor(pure=False), _numbers(plan), 0, False
    pending: dict[Future[Findings], int] = {}
    with _closing(client, executor, event):
        while True:
            width = 2 * max(1, sum(client.nthreads().values()))
            while not (ending or plan.late) and len(pending) < width:
                chunk = next(numbers, None)
                if chunk is None:
                    break
                pending[executor.submit(_hunt_on_dask, plan, settings, chunk, event.name)] = chunk
            if not pending:
                return
            for future in wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)[0]:
                chunk, findings = pending.pop(future), future.result()
                done += findings.cases
                progress(done)
                yield chunk, findings
                ending |= _is_last(plan, findings)
            ending |= stopped()
            if ending:
                event.set()


@contextmanager
def _closing(client: Any, executor: Any, event: Any) -> Iterator[None]:
    """Let every chunk that runs end, and end the workers that Dask's workers have started."""
    try:
        yield
    finally:
        event.set()
        client.run(close_idle)
        executor.shutdown()
        client.close()


def connected(address: str) -> Any:
    """Return a client of a Dask scheduler, whose workers need this code and the frameworks.

    Raises:
        SpecError: if Dask is not installed, or no scheduler answers.
    """
    distributed = dask()
    try:
        return distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise SpecError(
            f"--scheduler is {address!r} but no scheduler answers there within {PATIENCE:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None


def dask() -> Any:
    """Return the module of Dask.

    Raises:
        SpecError: if it is not installed.
    """
    with optional("--scheduler", "dask"):
        return importlib.import_module("distributed")


def _hunt_on_dask(plan: Plan, settings: Settings, chunk: int, event: str) -> Findings:
    return hunt_chunk(plan, settings, chunk, dask().Event(event).is_set)
