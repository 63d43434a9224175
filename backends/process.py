"""A supervised Python process; the parent calls methods of its objects."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import concord
from concord.backends import bootstrap, heaps, machine
from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure, decode, encode
from concord.spec.errors import SpecError

# Folder from which a worker imports this package: a checkout, or site-packages.
ROOT = Path(concord.__file__).resolve().parent.parent

# For the end of standard error: bytes to read, lines to show, and characters per line.
LAST_WORDS, LINES, WIDTH = 1 << 16, 10, 1000

# Seconds between checks of a working process.
GLANCE = 0.05


class Process:
    """A process with objects, in a ``with`` block or until :meth:`close`.

    Args:
        time_limit: seconds per answer, without those in which it waits for a core.
        memory_limit: bytes; by default 80 % of the machine's memory.

    Attributes:
        peak_memory: bytes.
        dead: how the process ended, if it has.
    """

    def __init__(self, time_limit: float, memory_limit: int | None) -> None:
        self.time_limit = time_limit
        self.memory_limit = memory_limit or int(0.8 * machine.memory()[0])
        self.peak_memory = 0
        self.dead: WorkerFailure | None = None
        self._stderr = tempfile.TemporaryFile(prefix="concord-")  # noqa: SIM115 - lives with the process
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for: tuple[str, str] | None = None

    def start(
        self,
        target: str,
        environment: Mapping[str, str],
        python: str | None = None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process.

        Args:
            target: factory of its first object, ``"package.module:name"``.
            environment: variables added to the parent's.

        Raises:
            WorkerFailure: if the interpreter does not exist.
        """
        program = os.path.expanduser(python or sys.executable)
        self._connection, other = Pipe()
        try:
            with other:
                self._process = subprocess.Popen(
                    [program, bootstrap.__file__, str(ROOT), target],
                    # Otherwise a file in the current folder could replace a module of the standard library.
                    env={**os.environ, **environment, "PYTHONSAFEPATH": "1"},
                    # Its own group: Ctrl-C reaches only the parent, and children of the worker end with it.
                    process_group=0,
                    stdin=other.fileno(),
                    stdout=self._stderr,
                    stderr=self._stderr,
                )
            opened()
        except OSError as error:
            self.close()
            detail = f"its process could not be started: {program}: {error.strerror}"
            raise WorkerFailure("broken", detail) from None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    @property
    def size(self) -> int:
        """Resident bytes."""
        return machine.resident(self._process.pid) if self._process else 0

    def call(self, number: int, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of an object in the process.

        Args:
            method: a name, or a path such as ``"bench.repeat"``.
            arguments, named: see :func:`concord.backends.wire.encode`.

        Raises:
            SpecError, Unsupported: if the method raises it.
            WorkerFailure: if it raises another error or does not answer.
        """
        if self.dead:
            raise self.dead
        message = encode([number, method, arguments, named])
        try:
            with self._watched():
                self._connection.send_bytes(message)
                answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._fail(*self._how_it_ended()) from None
        del message  # message and answer may each take gigabytes
        size = len(answer)
        status, value = decode(answer)
        del answer
        heaps.give_back(size)
        match status:
            case "ok":
                return value
            case "unsupported":
                raise Unsupported(value)
            case "refused":
                raise SpecError(value)
            case "crashed" | "out of memory":
                raise self._fail(status, value)
        raise WorkerFailure(status, value, self._last_words())

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        # The calling thread blocks in recv. The watcher wakes it by killing the process, which closes the
        # connection.
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()

    def _watch(self, done: threading.Event) -> None:
        assert self._process is not None
        remaining, previous = self.time_limit, time.monotonic()
        before = machine.waited(self._process.pid)
        while not done.wait(GLANCE):
            now = time.monotonic()
            # Time during which the parent was stopped, for example by Ctrl-Z, does not count.
            remaining, previous = remaining - min(now - previous, 1.0), now
            size = self.size
            self.peak_memory = max(self.peak_memory, size)
            if size > self.memory_limit:
                used, limit = size / 2**20, self.memory_limit / 2**20
                detail = f"it used {used:,.0f} MiB, over its limit of {limit:,.0f} MiB, and was stopped"
                self._stopped_for = "out of memory", detail
            elif remaining < 0:
                # Nor does time for which others keep it from the cores: on a busy machine, compiling for
                # JAX took longer than the limit.
                waits = machine.waited(self._process.pid) - before
                if remaining + max(waits.values(), default=0) / 1e9 < 0:
                    self._stopped_for = "timed out", f"no answer within {self.time_limit:g} s; it was stopped"
            if self._stopped_for or self._process.poll() is not None:
                self._kill()
                return

    def _how_it_ended(self) -> tuple[str, str]:
        if self._stopped_for:
            return self._stopped_for
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=5) if self._process else None
        if code is not None and code < 0:
            return "crashed", f"killed by {signal.Signals(-code).name}"
        return "crashed", "its process ended" + ("" if code is None else f" with exit code {code}")

    def _fail(self, status: str, detail: str) -> WorkerFailure:
        self.dead = WorkerFailure(status, detail, self._last_words())
        self.close()
        return self.dead

    def _kill(self) -> None:
        if self._process:
            with contextlib.suppress(OSError):  # the group has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):  # another thread has closed it
            size = os.stat(self._stderr.fileno()).st_size
            text = os.pread(self._stderr.fileno(), LAST_WORDS, max(size - LAST_WORDS, 0)).decode(
                errors="replace"
            )
            return "\n".join(line[:WIDTH] for line in text.rstrip().splitlines()[-LINES:])
        return ""

    def close(self) -> None:
        """End the process immediately. Thread-safe."""
        self._kill()
        if self._process:
            # On a busy machine, a killed process may end seconds later. Without this wait it would remain a
            # zombie and cause a ResourceWarning.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15.0)
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
