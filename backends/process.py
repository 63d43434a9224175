"""A Python process that is given messages and answers them.

Watched while it works, and ended with all that it has started.

Nothing here knows what the messages say; :mod:`concord.backends.worker` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import execnet
from execnet import gateway_base, gateway_bootstrap, gateway_io

import concord
from concord.backends import machine
from concord.backends.wire import Payload, payload_of
from concord.spec.text import legible

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

_BOOTSTRAP = f"""
{inspect.getsource(machine.marked)}
import os, select, sys, warnings
mark = os.environ.get("{MARK}")
os.environ.pop("PYTHONSAFEPATH", None)
if hasattr(os, "fork"):
    os.setpgrp()  # Ctrl-C is the parent's to handle, and what this process starts ends with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the thread that receives; nothing of it is used
        watching = os.fork() == 0
    if watching:
        # A process of its own, for a framework may keep every thread of this one from running. It has nothing
        # but the pipe of which the parent has the other end: that is hung up once the parent is gone, however
        # it ended.
        os.dup2(channel.gateway._io.infile.fileno(), 0)
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
settings = channel.receive()
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
import importlib
module, _, name = settings.get("serve", "concord.backends.remote:serve").partition(":")
getattr(importlib.import_module(module), name)(channel, settings["target"])
"""


class WorkerFailure(RuntimeError):
    """A worker that gave no result.

    Attributes:
        status: ``"absent"`` (not installed), ``"broken"`` (installed, cannot be imported), ``"crashed"``,
            ``"timed out"``, ``"out of memory"``, or ``"error"`` (the backend raised an exception and lives
            on).
        detail: one line that says what happened.
        stderr: the last lines that the worker wrote.
    """

    def __init__(self, status: str, detail: str, stderr: str = "") -> None:
        self.status, self.detail, self.stderr = status, detail, stderr
        super().__init__(f"{status}: {detail}")


class _Streams(gateway_base.Popen2IO):
    """The pipes of a new process, and the process.

    What execnet's ``create_io`` makes, with an environment and standard error of its own.
    """

    remoteaddress: str | None  # of a process on another host

    def __init__(self, arguments: list[str], execmodel: Any, **how: Any) -> None:
        self.popen = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)
        super().__init__(self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    def wait(self) -> int | None:
        return self.popen.wait()

    def kill(self) -> None:
        self.popen.kill()


class Process:
    """A process that answers messages. Use it in a ``with`` block, or call :meth:`close`.

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
        self._group = execnet.Group()
        self._closing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for: tuple[str, str] | None = None
        self._silent = False

    def start(self, python: str | None, host: str, opened: Callable[[], None]) -> None:
        """Start the process; it waits for its settings then.

        Args:
            host: where, by ssh; empty: here.
            opened: called as soon as there is a process, which may never answer.

        Raises:
            WorkerFailure: if there is no such interpreter, no such host, or no Python answers.
        """
        where = f"ssh={host}" if host else "popen"
        if python:
            # "//" would end the path in execnet's notation, and a local path is split as a shell would.
            path = re.sub("/+", "/", python if host else shlex.quote(os.path.expanduser(python)))
            where += f"//python={path}"
        try:
            self._channel = self._open_gateway(execnet.XSpec(where), opened).remote_exec(_BOOTSTRAP)
        except (
            Exception
        ) as error:  # execnet cannot start the interpreter, reaches no host, or hears no Python there
            words = self._last_words()
            self.close()
            if self._stopped_for:
                raise WorkerFailure(*self._stopped_for, words) from None
            cause = (
                error.strerror
                if isinstance(error, OSError) and error.filename
                else f"no Python answered ({type(error).__name__})"
            )
            raise WorkerFailure(
                "broken",
                f"its process could not be started: {host or python or sys.executable}: {cause}",
                words,
            ) from None

    def _open_gateway(self, place: execnet.XSpec, opened: Callable[[], None]) -> execnet.Gateway:
        """Do what execnet's ``makegateway`` does, with the process at hand before it has answered.

        It may never do so.
        """
        self._group.allocate_id(place)
        place.execmodel = self._group.remote_execmodel.backend
        # Not even the standard library is to be found in the folder where somebody happens to stand.
        marked = {**os.environ, MARK: self._mark, "PYTHONSAFEPATH": "1"}
        here = {"env": marked, "process_group": 0} if self.local else {}
        arguments = gateway_io.popen_args(place) if self.local else gateway_io.ssh_args(place)
        streams = _Streams(arguments, self._group.execmodel, stderr=self._stderr, **here)
        if not self.local:
            streams.remoteaddress = place.ssh
        self._process = streams.popen  # over ssh it is the client
        opened()
        try:
            with self._watched():
                gateway = gateway_bootstrap.bootstrap(streams, place)
        except BaseException:
            self._kill()
            with contextlib.suppress(OSError), streams.popen:  # closes its pipes and waits for its end
                pass
            raise
        gateway.spec = place
        self._group._register(gateway)
        return gateway

    @property
    def pid(self) -> int | None:
        """The process id, on this machine."""
        return self._process.pid if self._process else None

    @property
    def size(self) -> int:
        """Bytes that it holds; 0 for a process on another host."""
        return machine.resident(self._process.pid) if self.local and self._process else 0

    def exchange(self, message: Any, payload: Payload | None = None) -> Any:
        """Send a message, and a payload after it, and wait for the answer.

        Raises:
            WorkerFailure: if there is none. The process is ended then.
        """
        with self._speaking():
            self._channel.send(message)
            for chunk in payload.chunks() if payload else ():
                self._channel.send(chunk)
            return self._receive()

    def payload(self, size: int) -> Payload:
        """Return the payload that follows an answer.

        Raises:
            WorkerFailure: if it does not come. The process is ended then.
        """
        with self._speaking():
            return payload_of(size, self._receive)

    def _receive(self) -> Any:
        while not self._silent:
            with contextlib.suppress(self._channel.TimeoutError):
                return self._channel.receive(timeout=1.0)
        raise EOFError

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
        except self._channel.RemoteError as error:
            last = str(error).strip().splitlines()[-1]
            raise self._fail("out of memory" if "MemoryError" in last else "crashed", last) from None

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
        with self._closing:  # execnet's groups are not safe from two threads
            self._group.terminate(timeout=1.0)
            self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
