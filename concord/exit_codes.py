"""Exit codes, and the message of a failing command.

Imports nothing slow, because a signal may arrive immediately.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

REFUSED, FAULT, INTERRUPTED, CLOSED = 2, 3, 130, 141

Handler = Any  # a function of a signal and a frame, or a constant of signal

# Ctrl-C, ``kill`` and a closed terminal end a command once its workers have ended.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

# Seconds in which further signals are ignored, because one event may send several.
PATIENCE = 3.0


class Halt:
    """The exit code that a signal causes, or 0, and the time of the last signal that counted."""

    code, time = 0, 0.0


def _interrupt(number: int, _frame: object) -> None:
    now = time.monotonic()
    if not Halt.code or now - Halt.time > PATIENCE:
        Halt.code, Halt.time = Halt.code or 128 + number, now
        raise KeyboardInterrupt


@contextmanager
def _handling(handler: Handler, after: Handler | None = None) -> Iterator[None]:
    """Install a handler, then restore the previous ones or install ``after``."""
    # Python lets only the main thread set handlers. Signals that are ignored from the start remain ignored,
    # as under nohup.
    main = threading.current_thread() is threading.main_thread()
    former = {number: signal.getsignal(number) for number in SIGNALS if main}
    former = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
    for number in former:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, after or handler)


@contextmanager
def halting() -> Iterator[Callable[[], bool]]:
    """Record the first signal; a later one ends the command immediately."""

    def note(number: int, frame: object) -> None:
        if Halt.code:
            _interrupt(number, frame)
        else:
            Halt.code, Halt.time = 128 + number, time.monotonic()

    with _handling(note):
        yield lambda: bool(Halt.code)
    if Halt.code:
        raise KeyboardInterrupt


def end(command: Callable[[], Any], last: bool = False) -> NoReturn:
    """Run a command and exit with its code; ``last``: the process ends afterwards.

    2: refused input, one line per problem; 3: a bug in Concord; 128 plus a signal's number.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed from the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open
        elif isinstance(stream, io.TextIOWrapper):
            # A file name may contain characters that the terminal's encoding lacks; printing it must not
            # crash.
            stream.reconfigure(errors="backslashreplace")
    Halt.code, Halt.time = 0, 0.0
    # At exit, Python restores all handlers but ignored ones, and the default action of these signals is to
    # kill.
    with _handling(_interrupt, signal.SIG_IGN if last else None):
        try:
            code = command()
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else REFUSED if end.code else 0
            # Typer exits with 1, which means a divergence, if the reader of the output has gone.
            code = CLOSED if isinstance(end.__context__, BrokenPipeError) else code
        except BaseException as error:
            code = _failed(error)
        if code == INTERRUPTED:  # even if typer has caught KeyboardInterrupt
            code = Halt.code or INTERRUPTED
            name = signal.Signals(code - 128).name
            _said(code, "interrupted" if code == INTERRUPTED else f"ended by {name}")
    sys.exit(code if isinstance(code, int) else 0)


def _said(code: int, *lines: str) -> int:
    for line in lines:
        print(f"concord: {line}", file=sys.stderr)
    return code


def _failed(error: BaseException) -> int:
    # Imported here because a successful command does not need it.
    import traceback

    from typer.exceptions import TyperException

    from concord.backends.wire import WorkerFailure
    from concord.spec.errors import SpecError
    from concord.spec.text import first_line
    from concord.terminal import complain, discard

    if isinstance(error, WorkerFailure):
        return _said(FAULT, f"error: no result: {error}", *error.stderr.splitlines())
    if isinstance(error, TyperException):
        message = re.sub("Missing .*? '(.*?)'.*", r"\1 is not given but is required", error.format_message())
        # Without a command, typer has printed the help, and has no message.
        error = SpecError([message] if message else [])
    if isinstance(error, SpecError):
        for problem in error.problems:
            complain(problem)
        return REFUSED
    if isinstance(error, OSError) and error.filename is not None:
        complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return REFUSED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        discard(sys.stdout)  # Python would fail again when it flushes at exit
        complain(f"standard output: cannot be written: {error.strerror}")
        return REFUSED
    if os.environ.get("CONCORD_TRACEBACK"):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {first_line(error)}"
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return _said(
        FAULT, f"a bug in Concord: {message} ({where}); set CONCORD_TRACEBACK=1 to see where it comes from"
    )
