"""A Python process that holds objects, whose methods are called from here.

Watched while it works, and ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import concord
from concord.backends import heaps, machine
from concord.backends.interface import Unsupported
from concord.backends.wire import Channel, Message, WorkerFailure, decode, encode
from concord.spec.errors import SpecError
from concord.spec.text import legible

T = TypeVar("T")

ROOT = Path(concord.__file__).resolve().parent.parent
"""The folder that a worker imports this package from: a checkout, or where it is installed."""

LAST_WORDS = 1 << 16
"""Bytes of the end of what a process has written to standard error that are looked at."""

MOST_WORDS = 1 << 26
"""Bytes of it that are kept in a file."""

WIDTH = 1000
"""Characters of a line of it that are told."""

GLANCE = 0.05
"""Seconds between two looks at a process that works."""

THOROUGH = 10
"""Of so many looks one is at all that the process has started."""

FAMILY = 2
"""How many processes there are at least: it, and the one that watches for the end of its parent."""

ROUNDS = 10
"""How often it is looked for processes to be killed."""

MARK = "CONCORD_WORKER"
"""The variable by which a process, and all that it starts, are known in their environment."""

READY = b"ready"
"""What a process says first, so that an interpreter is known from any other program."""

_FIRST_LINE = "import sys;exec(eval(sys.stdin.readline()))"

_BOOTSTRAP = f"""
{inspect.getsource(machine.marked)}
import json, os, select, sys
from multiprocessing.connection import Connection
mark = os.environ.get("{MARK}")
os.environ.pop("PYTHONSAFEPATH", None)
# Whatever a framework prints must not get among the messages.
reading, writing = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
if hasattr(os, "fork"):
    os.setpgrp()  # Ctrl-C is the parent's to handle, and what this process starts ends with it
    if os.fork() == 0:
        # A process of its own, for a framework may keep every thread of this one from running. It has nothing
        # but the pipe of which the parent has the other end: that is hung up once the parent is gone, however
        # it ended.
        os.dup2(reading.fileno(), 0)
        os.closerange(1, 256)
        pipe = select.poll()
        pipe.register(0, getattr(select, "POLLRDHUP", 0))
        pipe.poll()
        for pid in marked(mark) if mark else ():
            if pid != os.getpid():
                try:
                    os.kill(pid, 9)
                except OSError:
                    pass
        os.killpg(0, 9)
writing.send_bytes({READY!r})
settings = json.loads(reading.recv_bytes())
os.environ.update(settings["environment"])
for name, value in settings["appended"].items():
    os.environ[name] = " ".join(filter(None, (os.environ.get(name), value)))
root, here = (os.path.realpath(os.path.expanduser(folder)) for folder in (settings["root"], os.getcwd()))
# A folder whose subfolders bear the frameworks' names must never be searched for imports.
shadowing = os.path.join(root, "backends")
searched = [os.path.abspath(entry or ".") if os.path.exists(entry or ".") else entry for entry in sys.path]
others = [entry for entry in searched if os.path.realpath(entry) not in (shadowing, root, here)]
sys.path[:] = [root, *others]  # the index has another "concord"
import concord
# The folder where somebody happens to stand may hold a torch.py: what is installed comes first.
sys.path[:] = [*others, *dict.fromkeys((root, os.getcwd() if here not in (root, shadowing) else root))]
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, this process goes first
except OSError:
    pass
from concord.backends.remote import serve
serve(reading, writing, settings["target"])
"""


class Process:
    """A process that holds an object. Use it in a ``with`` block, or call :meth:`close`.

    Args:
        local: whether it runs on this machine.
        time_limit: seconds that one answer may take.
        memory_limit: bytes that it may hold, with all that it has started; by default four fifths of the
            machine's.

    Attributes:
        peak_memory: bytes that it has held at most.
        dead: how it ended, once it has.
    """

    def __init__(self, local: bool, time_limit: float, memory_limit: int | None) -> None:
        self.local, self.time_limit = local, time_limit
        self.memory_limit = memory_limit or int(0.8 * machine.memory()[0])
        self.peak_memory = 0
        self.dead: WorkerFailure | None = None
        # It lives as long as the process.
        self._stderr = tempfile.TemporaryFile(prefix="concord-")  # noqa: SIM115
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)  # for it may be cut off
        self._words = b""
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for: tuple[str, str] | None = None
        self._silent = False

    def start(
        self,
        target: str,
        environment: Mapping[str, str],
        appended: Mapping[str, str] | None = None,
        python: str | None = None,
        host: str = "",
        root: str = str(ROOT),
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process.

        Args:
            target: what makes the object that it holds, ``"package.module:name"``.
            environment: that it gets on top of the parent's.
            appended: what is added to values of its environment.
            python: the interpreter.
            host: where, by ssh; empty: here.
            root: the folder there that it imports this package from.
            opened: called as soon as there is a process, which may never answer.

        Raises:
            WorkerFailure: if there is no such interpreter, no such host, or no Python answers.
        """
        # Not even the standard library is to be found in the folder where somebody happens to stand.
        marked = {**os.environ, MARK: self._mark, "PYTHONSAFEPATH": "1"}
        here: dict[str, Any] = {} if host else {"env": marked, "process_group": 0}
        arguments = (
            ["ssh", "-C", host, f"{python or 'python'} -c {shlex.quote(_FIRST_LINE)}"]
            if host
            else [os.path.expanduser(python or sys.executable), "-c", _FIRST_LINE]
        )
        here |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr, "bufsize": 0}
        try:
            process = self._process = subprocess.Popen(arguments, **here)  # over ssh it is the client
            opened()
            assert process.stdin is not None
            assert process.stdout is not None
            with self._watched(), process.stdin as stdin, process.stdout as stdout:
                stdin.write(f"{_BOOTSTRAP!r}\n".encode())
                self._channel = Channel(
                    Connection(os.dup(stdout.fileno()), writable=False),
                    Connection(os.dup(stdin.fileno()), readable=False),
                )
                self._wait()
                if self._channel.reading.recv_bytes(len(READY)) != READY:
                    raise EOFError
                settings = {"environment": environment, "appended": appended or {}, "root": root}
                self._channel.writing.send_bytes(json.dumps({**settings, "target": target}).encode())
        except (OSError, EOFError) as error:
            words = self._last_words()
            self.close()
            cause = (
                error.strerror
                if isinstance(error, OSError) and error.filename
                else f"no Python answered ({type(error).__name__})"
            )
            started = f"its process could not be started: {host or python or sys.executable}: {cause}"
            raise WorkerFailure(*(self._stopped_for or ("broken", started)), words) from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process id, on this machine."""
        return self._process.pid if self._process else None

    @property
    def size(self) -> int:
        """Bytes that it holds; 0 for a process on another host."""
        return machine.resident(self._process.pid) if self.local and self._process else 0

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
        with self._speaking():
            self._channel.send(*encode([number, method, given, named]))
            message = [self._receive()]
        size = len(message[0][1])
        status, found = self.read(lambda: decode(*message.pop()))
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
            first = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            what = "; ".join(error.problems) if isinstance(error, SpecError) else first
            raise WorkerFailure("error", f"its answer cannot be read: {what}", self._last_words()) from None

    def _wait(self) -> None:
        """Wait for an answer, but not for ever: a process that this one has started may hold the pipe."""
        while not self._channel.reading.poll(1.0):
            if self._silent:
                raise EOFError

    def _receive(self) -> Message:
        self._wait()
        return self._channel.receive()

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Watch the process while messages are exchanged, and say how it ended if it does meanwhile."""
        if self.dead:
            raise self.dead
        try:
            with self._watched():
                yield
        except (EOFError, OSError):
            raise self._fail(*self._how_it_ended()) from None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Have a thread watch time and memory."""
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()
            self._shorten()  # it may have been faster than the watch

    def _watch(self, done: threading.Event) -> None:
        """Kill the process when it takes too long or too much, and what it has left when it ends.

        The exchange ends by that.
        """
        left, last, looks = self.time_limit, time.monotonic(), 0
        while not done.wait(GLANCE):
            now = time.monotonic()
            left, last, looks = (
                left - min(now - last, 1.0),
                now,
                looks + 1,
            )  # a parent that was stopped has not waited
            self._look(left, looks % THOROUGH == 0)
            ended = self._process is not None and self._process.poll() is not None
            if ended and not self._stopped_for:
                done.wait(1.0)  # for its last answer
            if ended or self._stopped_for:
                self._kill()
                # A process that it has started may hold the pipe for ever.
                self._silent = not done.wait(1.0)
                return

    def _look(self, left: float, all_of_it: bool) -> None:
        """Notice what is too much.

        Args:
            left: seconds for the answer.
            all_of_it: whether to look at what the process has started too, which takes longer.
        """
        used = self.size
        if all_of_it and used <= self.memory_limit and len(family := machine.marked(self._mark)) > FAMILY:
            used = machine.held_by(family, self.memory_limit)
        self.peak_memory = max(self.peak_memory, used)
        if used > self.memory_limit:
            held, limit = used / 2**20, self.memory_limit / 2**20
            self._stopped_for = (
                "out of memory",
                f"it held {held:,.0f} MiB, over its limit of {limit:,.0f} MiB, and was stopped",
            )
        elif left < 0:
            self._stopped_for = "timed out", f"no answer within {self.time_limit:g} s; it was stopped"
        self._shorten()

    def _shorten(self) -> None:
        """Keep the end of what the process has written, and let the rest go: it may write without end."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, by another thread
            if os.stat(self._stderr.fileno()).st_size > MOST_WORDS:
                self._words = self._end_of_words()
                os.ftruncate(self._stderr.fileno(), 0)

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
        if self.local and hasattr(os, "killpg"):
            with contextlib.suppress(OSError):  # there is no such group any more
                os.killpg(self._process.pid, signal.SIGKILL)
            for _ in range(ROUNDS):  # one may start another meanwhile
                for pid in (family := machine.marked(self._mark)):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                if not family:
                    break
        self._process.kill()  # does nothing to one that has ended

    def _end_of_words(self) -> bytes:
        size = os.stat(self._stderr.fileno()).st_size
        return (self._words + os.pread(self._stderr.fileno(), LAST_WORDS, max(size - LAST_WORDS, 0)))[
            -LAST_WORDS:
        ]

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
