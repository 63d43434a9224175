"""What whoever waits for a long judgement is told.

How many runs of the reference it has taken, and how long the rest will.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

EVERY = 5.0
"""Seconds between two times that something is said; what takes less says nothing."""


class Underway(str):
    """What is being done, for those who are told of what has been done too."""

    __slots__ = ()


Tell = Callable[[Underway], None]

_listener: ContextVar[Tell | None] = ContextVar("listener", default=None)


@contextmanager
def told(tell: Tell) -> Iterator[None]:
    """Have what is judged within the block, in this thread, say how far it has come."""
    before = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(before)


def say(text: str) -> None:
    """Say what is being done."""
    tell = _listener.get()
    if tell is not None:
        tell(Underway(text))


class Countdown:
    """Counts equal steps, and says how many there were and how long the others will take.

    Any thread may count.

    Args:
        what: is being done.
        count: how many steps it takes.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what, self.count, self.done = what, count, 0
        self.tell = _listener.get()
        self.started = self.said = time.monotonic()
        self.busy = threading.Lock()

    def step(self) -> None:
        """Count one step that is done."""
        with self.busy:
            self.done += 1
            now = time.monotonic()
            if self.tell is None or now - self.said < EVERY or self.done >= self.count:
                return
            self.said = now
            left = (now - self.started) / self.done * (self.count - self.done)
            self.tell(Underway(f"{self.what}: {self.done} of {self.count} runs, about {left:.0f} s more"))
