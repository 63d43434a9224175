"""What was derived before and is wanted again: bounded in bytes."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar


class Cache:
    """Results by key, the ones used last kept up to a number of bytes; each has ``nbytes``."""

    LIMIT: ClassVar[int] = 48 << 20
    """Bytes that are kept in all."""

    LARGEST: ClassVar[int] = 16 << 20
    """Bytes of one result that is kept; what is larger is made anew each time."""

    def __init__(self) -> None:
        self.limit, self.largest = self.LIMIT, self.LARGEST
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()
        self._bytes = 0

    @contextlib.contextmanager
    def keeping(self, limit: int) -> Iterator[None]:
        """Keep so many bytes for a while, in results of any size."""
        before = self.limit, self.largest
        self.limit = self.largest = limit
        try:
            yield
        finally:
            self.limit, self.largest = before
            with self._guard:
                self._shrink()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what was made for a key before, or make it; threads that want the same wait for the first."""
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            with self._guard:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            made = make()
            with self._guard:
                self._keep(key, made)
            return made

    def _keep(self, key: str, made: Any) -> None:
        if made.nbytes > self.largest:
            self._making.pop(key, None)
            return
        self._kept[key] = made
        self._bytes += made.nbytes
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self.limit:
            oldest, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
            self._making.pop(oldest, None)
