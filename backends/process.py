"""A Python process that holds objects, whose methods are called from here.

Watched while it works, and ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import concord
from concord.backends import bootstrap, heaps, machine
from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure, decode, encode
from concord.spec.errors import SpecError
from concord.spec.text import first_line, legible

T = TypeVar("T")

ROOT = Path(concord.__file__).resolve().parent.parent
"""The folder that a worker imports this package from: a checkout, or where it is installed."""

LAST_WORDS = 1 << 16
"""Bytes of the end of what a process has written to standard error that are looked at."""

MOST_WORDS = 1 << 26
"""Bytes of it that are kept in a file."""

WIDTH = 1000
"""Characters of a line of it that are told."""

PIECE = 1 << 20
"""Bytes that are read at once."""

GLANCE = 0.05
"""Seconds between two looks at a process that works."""

THOROUGH = 10
"""Of so many looks one is at all that the process has started."""

FAMILY = 2
"""How many processes there are at least: it, and the one that watches for the end of its parent."""

ROUNDS = 10
"""How often it is looked for processes to be killed."""


class Process:
    """A process that holds an object. Use it in a ``with`` block, or call :meth:`close`.

    Args:
        time_limit: seconds that one answer may take.
        memory_limit: bytes that it may hold, with all that it has started; by default four fifths of the
            machine's.

    Attributes:
        peak_memory: bytes that it has held at most.
        dead: how it ended, once it has.
    """

    def __init__(self, time_limit: float, memory_limit: int | None) -> None:
        self.time_limit = time_limit
        self.memory_limit = memory_limit or int(0.8 * machine.memory()[0])
        self.peak_memory = 0
        self.dead: WorkerFailure | None = None
        # It lives as long as the process.
        self._stderr = tempfile.TemporaryFile(prefix="concord-")  # noqa: SIM115
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)  # for it may be cut off
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for: tuple[str, str] | None = None
        self._left, self._looked, self._looks = time_limit, time.monotonic(), 0

    def start(
        self,
        target: str,
        environment: Mapping[str, str],
        python: str | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process.

        Args:
            target: what makes the object that it holds, ``"package.module:name"``.
            environment: that it gets on top of the parent's.
            python: the interpreter.
            opened: called as soon as there is a process, which may never answer.

        Raises:
            WorkerFailure: if there is no such interpreter, or no Python answers.
        """
        try:
            process = self._process = subprocess.Popen(
                [os.path.expanduser(python or sys.executable), bootstrap.__file__, str(ROOT), target],
                # Not even the standard library is to be found in the folder where somebody happens to stand.
                env={**os.environ, **environment, bootstrap.MARK: self._mark, "PYTHONSAFEPATH": "1"},
                process_group=0,  # Ctrl-C is this process's to handle, and what a worker starts ends with it
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            for pipe in (process.stdin, process.stdout):
                os.set_blocking(pipe.fileno(), False)
                weakref.finalize(self, pipe.close)
            self._writing, self._reading = process.stdin.fileno(), process.stdout.fileno()
            opened()
            if self._exchange() != bootstrap.READY:
                raise EOFError
        except (OSError, EOFError) as error:
            words = self._last_words()
            self.close()
            cause = (
                error.strerror
                if isinstance(error, OSError) and error.filename
                else f"no Python answered ({type(error).__name__})"
            )
            started = f"its process could not be started: {python or sys.executable}: {cause}"
            raise WorkerFailure(*(self._stopped_for or ("broken", started)), words) from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid if self._process else None

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return machine.resident(self._process.pid) if self._process else 0

    def call(self, number: int, method: str, *given: Any, **named: Any) -> Any:
        """Call a method of an object there.

        Args:
            number: of the object; the first one has 0.
            method: its name, or such a path as ``"bench.repeat"``.
            given, named: what it is given: what :func:`concord.backends.wire.encode` can send.

        Raises:
            SpecError, Unsupported: if it does.
            WorkerFailure: if it raises anything else, or gives no answer. The process is ended then.
        """
        if self.dead:
            raise self.dead
        message = encode([number, method, given, named])
        try:
            answer = self._exchange(bootstrap.head(message), message)
        except (EOFError, OSError):
            raise self._fail(*self._how_it_ended()) from None
        del message
        size = len(answer)
        status, found = self.read(partial(decode, answer))
        del answer
        heaps.give_back(size)
        match status:
            case "ok":
                return found
            case "unsupported":
                raise Unsupported(found)
            case "refused":
                raise SpecError(found)
            case "crashed" | "out of memory":
                raise self._fail(status, found)
        raise WorkerFailure(status, found, self._last_words())

    def read(self, parse: Callable[[], T]) -> T:
        """Return what an answer is read as.

        Raises:
            WorkerFailure: if it cannot be read, for example arrays of a type that NumPy has not.
        """
        try:
            return parse()
        except Exception as error:
            first = f"{type(error).__name__}: {first_line(error)}"
            what = "; ".join(error.problems) if isinstance(error, SpecError) else first
            raise WorkerFailure("error", f"its answer cannot be read: {what}", self._last_words()) from None

    def _exchange(self, *contents: bytes) -> bytes:
        """Send contents, and return the message that is the answer.

        Raises:
            EOFError, OSError: if the process is gone, is ended meanwhile, or something else has written into
                the pipe.
        """
        self._left, self._looked = self.time_limit, time.monotonic()
        for content in contents:
            left = memoryview(content)
            while left:
                self._wait(self._writing, select.POLLOUT)
                left = left[os.write(self._writing, left) :]
        size = int.from_bytes(self._receive(bootstrap.SIZE), "little")
        if size > self.memory_limit:
            raise OSError("the answer is no message")
        answer = self._receive(size)
        self._shorten()  # it may have been faster than a look
        return answer

    def _receive(self, size: int) -> bytes:
        found = io.BytesIO()
        while found.tell() < size:
            self._wait(self._reading, select.POLLIN)
            piece = os.read(self._reading, min(size - found.tell(), PIECE))
            if not piece:
                raise EOFError
            found.write(piece)
        return found.getvalue()

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until a pipe is ready, and look at the process meanwhile."""
        ready = select.poll()
        ready.register(pipe, event)
        while not ready.poll(GLANCE * 1000):
            assert self._process is not None
            # What it has started may hold the pipe for ever.
            if self._process.poll() is not None and not ready.poll(0):
                raise EOFError
            self._look()

    def _look(self) -> None:
        """Notice what is too much, and end the process then.

        Raises:
            EOFError: if so.
        """
        now = time.monotonic()
        # A parent that was stopped has not waited.
        self._left, self._looked = self._left - min(now - self._looked, 1.0), now
        self._looks += 1
        used = self.size
        # To look at what the process has started too takes longer.
        if self._looks % THOROUGH == 0 and used <= self.memory_limit:
            family = bootstrap.marked(self._mark)
            used = machine.held_by(family, self.memory_limit) if len(family) > FAMILY else used
        self.peak_memory = max(self.peak_memory, used)
        self._shorten()
        if used > self.memory_limit:
            held, limit = used / 2**20, self.memory_limit / 2**20
            self._stopped_for = (
                "out of memory",
                f"it held {held:,.0f} MiB, over its limit of {limit:,.0f} MiB, and was stopped",
            )
        elif self._left < 0:
            self._stopped_for = "timed out", f"no answer within {self.time_limit:g} s; it was stopped"
        if self._stopped_for:
            self._kill()
            raise EOFError

    def _shorten(self) -> None:
        """Keep the end of what the process has written, and let the rest go: it may write without end."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, by another thread
            if os.stat(self._stderr.fileno()).st_size > MOST_WORDS:
                end = self._end_of_words()
                os.ftruncate(self._stderr.fileno(), 0)
                os.write(self._stderr.fileno(), end)

    def _how_it_ended(self) -> tuple[str, str]:
        """Return status and detail of a process that is gone."""
        if self._stopped_for:
            return self._stopped_for
        try:
            code = self._process.wait(timeout=5) if self._process else None
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            named = -code in set(signal.Signals)  # those for use in real time have no names
            return "crashed", f"killed by {signal.Signals(-code).name if named else f'signal {-code}'}"
        return "crashed", "its process ended" + ("" if code is None else f" with exit code {code}")

    def _fail(self, status: str, detail: str) -> WorkerFailure:
        self.dead = WorkerFailure(status, detail, self._last_words())
        self.close()
        return self.dead

    def _kill(self) -> None:
        """Kill the process, and all that it has started."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # there is no such group any more
            os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(ROUNDS):  # one may start another meanwhile
            for pid in (family := bootstrap.marked(self._mark)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not family:
                break
        self._process.kill()  # does nothing to one that has ended

    def _end_of_words(self) -> bytes:
        size = os.stat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), LAST_WORDS, max(size - LAST_WORDS, 0))

    def _last_words(self, lines: int = 10) -> str:
        try:
            text = legible(self._end_of_words().decode(errors="replace")).rstrip()
        except (OSError, ValueError):  # closed meanwhile, by another thread
            return ""
        return "\n".join(line[:WIDTH] for line in text.splitlines()[-lines:])

    def close(self) -> None:
        """End the process, at once if it is busy. Any thread may."""
        self._kill()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
