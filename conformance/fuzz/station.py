"""A set of workers: one for each backend, kept between chunks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

from concord.backends.pool import Pool
from concord.conformance.campaign import Job, Runner, Settings
from concord.conformance.verdict import Result

RESTARTS = 5
"""How often a worker is started again in one chunk, after crashes of a kind that is known already."""


class Station(Pool):
    """One worker for each backend.

    Args:
        names: of backends.
        settings: how they run.
    """

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        super().__init__(len(names))
        self.key = _key(names, settings)
        self.environments: dict[str, dict[str, Any]] = {}
        self.runners = {name: Runner(name, name, settings, self, self.environments) for name in names}

    def refresh(self) -> None:
        """Let every backend have its restarts again."""
        for runner in self.runners.values():
            runner.supervisor.refresh(RESTARTS)

    def attempt(self, job: Job, *names: str) -> list[Result]:
        """Run a job on backends at the same time, by default on all that are left, and judge the runs."""
        return self.map(
            lambda runner: runner.attempt(job),
            [self.runners[name] for name in names]
            or [runner for runner in self.runners.values() if not runner.supervisor.failure],
        )

    def dismiss(self, name: str) -> None:
        """Do without a backend from now on."""
        self.runners.pop(name).supervisor.end()


def _key(names: Sequence[str], settings: Settings) -> str:
    return repr((tuple(names), settings))


_idle: list[Station] = []
_guard = threading.Lock()


def borrow(names: Sequence[str], settings: Settings) -> Station:
    """Return a set of workers that nobody uses, or a new one.

    Starting four frameworks takes longer than a chunk.
    """
    with _guard:
        for station in _idle:
            if station.key == _key(names, settings):
                _idle.remove(station)
                return station
    return Station(names, settings)


def give_back(station: Station) -> None:
    """Keep a set of workers for the next chunk, if they have not been ended."""
    if station.stopped:
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
