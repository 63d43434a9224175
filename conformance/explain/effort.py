"""How much of the processor a search may take, and how far it came.

What else a machine does must not change what is found.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")


class Effort:
    """What one search may take, in the thread that makes it.

    Args:
        seconds: of processor time of this thread.

    Attributes:
        tried: how many explanations there was time for.
        untried: how many there were besides.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self.started = seconds, time.thread_time()
        self.tried = self.untried = 0

    def spent(self, share: float = 1.0) -> bool:
        """Return whether a share of the time is spent."""
        return time.thread_time() - self.started > share * self.seconds

    def among(self, explanations: Iterable[T], share: float = 1.0) -> Iterator[T]:
        """Yield explanations until a share of the time is spent, and count the others."""
        for explanation in explanations:
            if self.spent(share):
                self.untried += 1
            else:
                self.tried += 1
                yield explanation

    @property
    def text(self) -> str:
        """What is to be said of a search that was cut short; empty of one that was not."""
        if not self.untried:
            return ""
        return (
            f"the search for a cause was cut short: {self.tried} of {self.tried + self.untried} known "
            f"explanations were tried"
        )


_guard = threading.Lock()
_searches: list[threadpool_limits] = []


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have NumPy multiply in the thread that asks for it.

    Threads that wait for a busy core take twenty times as long as one.

    The limit holds for the whole process, and is lifted when the last of several searches is done.
    """
    with _guard:
        _searches.append(_searches[-1] if _searches else threadpool_limits(1, user_api="blas"))
    try:
        yield
    finally:
        with _guard:
            limit = _searches.pop()
            if not _searches:
                limit.restore_original_limits()
