"""Progress of long judgements."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Seconds between messages; a shorter judgement sends none.
EVERY = 5.0


class Underway(str):
    """Text about the current task, as opposed to finished ones."""

    __slots__ = ()


Callback = Callable[[Underway], None]

_listener: ContextVar[Callback | None] = ContextVar("listener", default=None)


@contextmanager
def listening(callback: Callback) -> Iterator[None]:
    """Report the progress of judgements in this block and thread."""
    before = _listener.set(callback)
    try:
        yield
    finally:
        _listener.reset(before)


def say(text: str) -> None:
    """Report the current task."""
    if callback := _listener.get():
        callback(Underway(text))


class Countdown:
    """A thread-safe counter of equal steps that estimates the remaining time."""

    def __init__(self, what: str, count: int) -> None:
        self.what, self.count, self.done = what, count, 0
        self.callback = _listener.get()
        self.started = self.said = time.monotonic()
        self.busy = threading.Lock()

    def step(self) -> None:
        """Count one finished step."""
        with self.busy:
            self.done += 1
            now = time.monotonic()
            if self.callback is None or now - self.said < EVERY or self.done >= self.count:
                return
            self.said = now
            seconds = (now - self.started) / self.done * (self.count - self.done)
            self.callback(
                Underway(f"{self.what}: {self.done} of {self.count} runs, about {seconds:.0f} s left")
            )
