"""Exit codes, and the line that a command ends with if it is not done, whatever it ends by.

Imports nothing that takes a while: a signal may come at once.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

REFUSED, FAULT, INTERRUPTED = 2, 3, 130

Handler = Any
"""A function of a signal and a frame, or what :mod:`signal` has in its place."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What ends a command so that it lets its workers go first: Ctrl-C, ``kill``, a closed terminal."""

PATIENCE = 3.0
"""Seconds within which a second signal changes nothing: several may come for one reason."""


@contextmanager
def _handling(handler: Handler, after: Handler | None = None) -> Iterator[Callable[[], None]]:
    """Have signals handled, except those that are ignored from the start, as by ``nohup``.

    Args:
        after: what handles them then, if not what did before.

    Yields:
        What puts the former handlers back.
    """
    main = threading.current_thread() is threading.main_thread()
    former = {number: signal.getsignal(number) for number in SIGNALS if main}
    former = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    for number in former:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
        for number in former if after else ():
            signal.signal(number, after)


@contextmanager
def halting() -> Iterator[Callable[[], bool]]:
    """Have the first signal only be noted: it ends the command when the work is done; a later one at once.

    Yields:
        What says whether a signal has come.
    """
    seen = list[tuple[int, float]]()

    def note(number: int, _frame: object) -> None:
        now = time.monotonic()
        if not seen:
            seen.append((number, now))
        elif now - seen[0][1] > PATIENCE:
            restore()
            signal.raise_signal(number)

    with _handling(note) as restore:
        yield lambda: bool(seen)
    if seen:
        signal.raise_signal(seen[0][0])


def end(command: Callable[[], Any], last: bool = False) -> NoReturn:
    """Do what a command does, and leave with its exit code.

    That is 2 for refused input, with a line for each problem; 3 for a bug in Concord; 128 and its
    number for a signal.

    Args:
        last: whether the process ends then.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed from the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    came = list[tuple[int, float]]()

    def interrupt(number: int, _frame: object) -> None:
        now = time.monotonic()
        if not came or now - came[-1][1] > PATIENCE:
            came.append((number, now))
            raise KeyboardInterrupt

    # Python, as it ends, gives others back their deadly default.
    with _handling(interrupt, signal.SIG_IGN if last else None):
        try:
            code = command()
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else REFUSED if end.code else 0
        except Exception as error:
            code = _failed(error)
        if code == INTERRUPTED:  # typer may have caught it
            number = signal.Signals(came[0][0]) if came else signal.SIGINT
            words = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
            code = _said(128 + number, words)
    sys.exit(code if isinstance(code, int) else 0)


def _said(code: int, *lines: str) -> int:
    for line in lines:
        print(f"concord: {line}", file=sys.stderr)
    return code


def _failed(error: Exception) -> int:
    """Say what is wrong, and return the exit code."""
    import traceback

    from typer.exceptions import TyperException

    from concord.backends.wire import WorkerFailure
    from concord.spec.errors import SpecError
    from concord.spec.text import first_line
    from concord.terminal import complain, discard

    if isinstance(error, WorkerFailure):
        return _said(FAULT, f"error: no result: {error}", *error.stderr.splitlines())
    if isinstance(error, TyperException):
        error.show()  # type: ignore[attr-defined]
        return REFUSED
    if isinstance(error, SpecError):
        for problem in error.problems:
            complain(problem)
        return REFUSED
    if isinstance(error, OSError) and error.filename is not None:
        complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return REFUSED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        discard(sys.stdout)
        complain(f"standard output: cannot be written: {error.strerror}")
        return REFUSED
    if os.environ.get("CONCORD_TRACEBACK"):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {first_line(error)}"
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return _said(
        FAULT, f"a bug in Concord: {what} ({where}); with CONCORD_TRACEBACK=1 it says where it comes from"
    )
