"""Who works when, where several backends do the same jobs: as many at a time as there are cores, and none far ahead of the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from concord.backends.pool import GLANCE

AHEAD = 8
"""By how many jobs one backend may be ahead of another: what a job is judged by is kept for about as long as that."""


class Pace:
    """The turns of several workers at the same jobs; who is furthest behind comes first.

    Args:
        names: of the workers.
        stopped: whether the work was ended.
        width: how many have their turn at a time; by default as many as there are cores.
        ahead: by how many jobs one may be ahead of another that is still at work.
    """

    def __init__(
        self,
        names: Iterable[str],
        stopped: Callable[[], bool] = lambda: False,
        width: int | None = None,
        ahead: int = AHEAD,
    ) -> None:
        self._at = dict.fromkeys(names, 0)
        self._waiting: set[str] = set()
        self._free, self._ahead, self._stopped = width or os.cpu_count() or 1, ahead, stopped
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, name: str, number: int) -> Iterator[bool]:
        """Wait for the turn of a worker, and hold it: False if the work was ended.

        Args:
            number: of the job that it is to do.
        """
        with self._changed:
            self._at[name] = number
            self._waiting.add(name)
            self._changed.notify_all()
            while not (self._stopped() or self._may(name)):
                self._changed.wait(GLANCE)
            self._waiting.discard(name)
            self._free -= 1
        try:
            yield not self._stopped()
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def leave(self, name: str) -> None:
        """Say that a worker has no more to do: nobody waits for it."""
        with self._changed:
            self._at.pop(name, None)
            self._changed.notify_all()

    def _may(self, name: str) -> bool:
        at = self._at[name]
        return (
            self._free > 0
            and at <= min(self._at.values()) + self._ahead
            and at == min(self._at[other] for other in self._waiting)
        )
