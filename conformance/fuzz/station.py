"""A set of workers: one for each backend, kept between chunks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from conformance.campaign import Job, Result, Settings, _Crew, _Living

RESTARTS = 5
"""How often a worker is started again in one chunk, after crashes of a kind that is known already."""


class Defect(BaseException):  # hypothesis does not try to shrink what is no Exception
    """An error of the harness itself, and no finding; the message is the name of the case."""


def attempt(crew: _Crew, job: Job) -> Result:
    """Run a job on a backend, and judge the run.

    Raises:
        Defect: if the harness fails at it.
    """
    try:
        return crew.attempt(job)
    except Exception as error:
        raise Defect(job.case) from error


class Station:
    """One worker for each backend, started when first needed, and started again when it dies.

    Args:
        names: of backends.
        settings: how they run.
    """

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        self.key = _key(names, settings)
        self.settings = settings
        self.living = _Living()
        self.environments: dict[str, dict[str, Any]] = {}
        self.crews = {name: _Crew(name, settings, self.environments, lambda backend, done: None, self.living) for name in names}
        self.pool = ThreadPoolExecutor(max_workers=len(self.crews))

    @property
    def halted(self) -> bool:
        """Whether the workers have been ended."""
        return self.living.stopped

    def refresh(self) -> None:
        """Let every backend have its restarts again."""
        for crew in self.crews.values():
            crew.restarts, crew.failure = RESTARTS, None

    def attempt(self, job: Job) -> list[Result]:
        """Run a job on every backend that is left, at the same time, and judge the runs."""
        return list(self.pool.map(lambda crew: attempt(crew, job), [crew for crew in self.crews.values() if not crew.failure]))

    def dismiss(self, name: str) -> None:
        """Do without a backend from now on."""
        self.crews.pop(name).close()

    def close(self) -> None:
        """End every worker."""
        self.living.stop()
        self.pool.shutdown()
        for crew in self.crews.values():
            crew.close()

    @contextmanager
    def watching(self, halted: Callable[[], bool]) -> Iterator[None]:
        """End every worker as soon as ``halted`` says so: a run may take long to end by itself."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                if halted():
                    self.living.stop()
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _key(names: Sequence[str], settings: Settings) -> str:
    return repr((tuple(names), settings))


_idle: list[Station] = []
_guard = threading.Lock()


def borrow(names: Sequence[str], settings: Settings) -> Station:
    """Return a set of workers that nobody uses, or a new one: starting four frameworks takes longer than a chunk."""
    with _guard:
        for station in _idle:
            if station.key == _key(names, settings):
                _idle.remove(station)
                return station
    return Station(names, settings)


def give_back(station: Station) -> None:
    """Keep a set of workers for the next chunk, if they have not been ended."""
    if station.halted:
        station.close()
        return
    with _guard:
        _idle.append(station)


def close_idle() -> None:
    """End the workers that are kept between chunks."""
    with _guard:
        stations, _idle[:] = list(_idle), []
    for station in stations:
        station.close()


atexit.register(close_idle)
