"""How a command ends: with a code, and with a line if it is not done, whatever it ends by.

Imports nothing that takes a while: a signal may come at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from concord.streams import standard_streams

REFUSED, FAULT, INTERRUPTED = 2, 3, 130

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What ends a command so that it lets its workers go first: Ctrl-C, ``kill``, a closed terminal."""

PATIENCE = 3.0
"""Seconds after which a second signal ends a command at once; its workers notice."""


class Ended(KeyboardInterrupt):
    """A signal has ended the command."""


class _Signals:
    """What has come: the first ends the command in an orderly way."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.since = 0.0
        self.over = False

    def __call__(self, number: int, _frame: object) -> None:
        if self.over:
            return
        if self.first is None:
            self.first, self.since = signal.Signals(number), time.monotonic()
            raise Ended
        if time.monotonic() - self.since > PATIENCE:
            os._exit(128 + number)

    def lost(self, unraisable: Any) -> bool:
        """Whether the end was raised where Python lets nothing be raised; then it is raised again."""
        if not isinstance(unraisable.exc_value, Ended) or self.first is None:
            return False
        again = threading.Timer(0.1, os.kill, (os.getpid(), self.first))
        again.daemon, self.first = True, None
        again.start()
        return True

    def tell(self) -> int:
        """Say what has ended the command, and return the exit code."""
        number = self.first or signal.SIGINT
        return _told(128 + number, "interrupted" if number == signal.SIGINT else f"ended by {number.name}")


def _handlers() -> dict[int, Any]:
    """Return what handles each signal, but for those that are ignored from the start, as by ``nohup``."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}


def _put(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def _heeded(last: bool) -> Iterator[_Signals]:
    """Have signals end the command.

    Args:
        last: whether nothing follows that they could end.
    """
    signals, former, hook = _Signals(), _handlers(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if signals.lost(unraisable) else hook(unraisable)
    _put(dict.fromkeys(former, signals))
    try:
        yield signals
    finally:
        signals.over = True
        sys.unraisablehook = hook
        # Python, as it ends, gives others back their deadly default.
        _put(dict.fromkeys(former, signal.SIG_IGN) if last else former)


@contextmanager
def halting() -> Iterator[Callable[[], bool]]:
    """Have the first signal only be noted: it ends the command when the work is done; a second one at once.

    Yields:
        What says whether a signal has come.
    """
    seen, former = list[int](), _handlers()

    def note(number: int, _frame: object) -> None:
        _put(former)
        seen.append(number)

    _put(dict.fromkeys(former, note))
    try:
        yield lambda: bool(seen)
    finally:
        _put(former)
    if seen:
        signal.raise_signal(seen[0])


def end(command: Callable[[], Any], last: bool = False) -> NoReturn:
    """Do what a command does, and leave with its exit code.

    That is 2 for refused input, with a line for each problem; 3 for a bug in Concord; 128 and its
    number for a signal.

    Args:
        last: whether the process ends then.
    """
    with standard_streams() as lost, _heeded(last) as signals:
        code = _outcome(command, signals)
        if reason := lost():
            code = _told(REFUSED, f"error: standard output: cannot be written: {reason}")
    sys.exit(code)


def _outcome(command: Callable[[], Any], signals: _Signals) -> int:
    """Do what a command does, and return the exit code."""
    try:
        code = command()
    except KeyboardInterrupt:
        return signals.tell()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else REFUSED if end.code else 0
    except Exception as error:
        return _failed(error)
    if code == INTERRUPTED:  # typer has caught it
        return signals.tell()
    return code if isinstance(code, int) else 0


def _told(code: int, *lines: str) -> int:
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
    from concord.terminal import complain

    if isinstance(error, WorkerFailure):
        return _told(FAULT, f"error: the backend gave no result: {error}", *error.stderr.splitlines())
    if isinstance(error, TyperException):
        error.show()  # type: ignore[attr-defined]
        return REFUSED
    if isinstance(error, SpecError):
        for problem in error.problems:
            complain(problem)
        return REFUSED
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename is not None:
        complain(
            f"{os.fsdecode(error.filename)}: {error.strerror}"
        )  # pathlib says of no other name that it cannot tell whether it is there
        return REFUSED
    if os.environ.get("CONCORD_TRACEBACK"):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {first_line(error)}"
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return _told(
        FAULT, f"a bug in Concord: {what} ({where}); with CONCORD_TRACEBACK=1 it says where it comes from"
    )
