"""Standard output and error that may be full, or gone: that does not end the work.

Imports nothing that takes a while: a signal may come at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast


class Stream:
    """A standard stream that may be full, or read by nobody. What it cannot take is dropped.

    Attributes:
        lost: the first reason why something could not be written; empty if nothing was lost, or the reader
            had enough.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.lost = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.lost = self.lost or (
                "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
            )
            # What was not written yet is written once more, at the latest when the process ends.
            with suppress(OSError, io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())


@contextmanager
def standard_streams() -> Iterator[Callable[[], str]]:
    """Have standard output and error that can be written to, whatever became of them.

    Yields:
        A function that says what kept standard output from being written, if anything.
    """
    # A closed one would be the next file that is opened here, or in a worker.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    out, err = (Stream(stream or io.StringIO()) for stream in (sys.stdout, sys.stderr))
    for stream in (out.stream, err.stream):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(Any, out), cast(Any, err)

    def lost() -> str:
        out.flush()
        return out.lost

    try:
        yield lost
    finally:
        err.flush()
        sys.stdout, sys.stderr = before
