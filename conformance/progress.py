"""The progress of a long judgement: how many runs of the reference are done, how long the rest will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

EVERY = 5.0
"""Seconds between two times that something is said; what takes less says nothing."""


class Underway(str):
    """What is being done, for callbacks that take what has been done too."""

    __slots__ = ()


Callback = Callable[[Underway], None]

_listener: ContextVar[Callback | None] = ContextVar("listener", default=None)


@contextmanager
def listening(callback: Callback) -> Iterator[None]:
    """Call back with how far judgements within the block, in this thread, have come."""
    before = _listener.set(callback)
    try:
        yield
    finally:
        _listener.reset(before)


def say(text: str) -> None:
    """Say what is being done."""
    if callback := _listener.get():
        callback(Underway(text))


class Countdown:
    """Counts equal steps, and says how many there were and how long the others will take.

    Any thread may count.

    Args:
        what: is being done.
        count: how many steps it takes.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what, self.count, self.done = what, count, 0
        self.callback = _listener.get()
        self.started = self.said = time.monotonic()
        self.busy = threading.Lock()

    def step(self) -> None:
        """Count one step that is done."""
        with self.busy:
            self.done += 1
            now = time.monotonic()
            if self.callback is None or now - self.said < EVERY or self.done >= self.count:
                return
            self.said = now
            left = (now - self.started) / self.done * (self.count - self.done)
            self.callback(Underway(f"{self.what}: {self.done} of {self.count} runs, about {left:.0f} s more"))
