"""The parent's side of a worker: one process for each framework, on this machine, another environment or another host.

The parent imports NumPy and no framework. Whatever happens to the worker, a signal, a hang, too little memory, comes
back as a :class:`WorkerFailure` that says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import execnet
import numpy as np
from execnet import gateway_bootstrap, gateway_io
from numpy.typing import NDArray
from safetensors.numpy import load

import concord
from concord.backends import machine
from concord.backends.interface import Request, Run, Unsupported
from concord.backends.wire import check_description, decode_run, encode_request, legible, received
from concord.spec.batch import Batch, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights

ROOT = Path(concord.__file__).resolve().parent.parent
"""The folder that a worker imports this package from: a checkout, or where it is installed."""

TIME_LIMIT = 300.0
"""Seconds that one request may take unless the caller says otherwise."""

LAST_WORDS = 1 << 16
"""Bytes of the end of what a process has written to standard error that are looked at."""

_BOOTSTRAP = """
import os, select, sys, warnings
if hasattr(os, "fork"):
    os.setpgrp()  # Ctrl-C is the parent's to handle, and what this process starts ends with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the thread that receives; nothing of it is used
        watching = os.fork() == 0
    if watching:
        # A process of its own, for a framework may keep every thread of this one from running. It has nothing but the pipe
        # of which the parent has the other end: that is hung up once the parent is gone, however it ended.
        os.dup2(channel.gateway._io.infile.fileno(), 0)
        os.closerange(1, 256)
        pipe = select.poll()
        pipe.register(0, getattr(select, "POLLRDHUP", 0))
        pipe.poll()
        os.killpg(0, 9)
settings = channel.receive()
os.environ.update(settings["environment"])
for name, value in settings["appended"].items():
    os.environ[name] = " ".join(filter(None, (os.environ.get(name), value)))
root = os.path.realpath(os.path.expanduser(settings["root"]))
# A folder whose subfolders bear the frameworks' names must never be searched for imports.
shadowing = os.path.join(root, "backends")
searched = [os.path.abspath(entry or os.getcwd()) if os.path.exists(entry or ".") else entry for entry in sys.path]
others = [entry for entry in searched if os.path.realpath(entry) not in (shadowing, root)]
# What is installed beside this package is for the parent's interpreter: another one takes its own first.
installed = os.path.isdir(os.path.join(root, "concord", "backends"))
sys.path[:] = [*others, root] if installed else [root, *others]
if settings["stderr"]:
    os.dup2(os.open(settings["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, this process goes first
except OSError:
    pass
from concord.backends.remote import serve
serve(channel, settings["target"])
"""


class WorkerFailure(RuntimeError):
    """A worker that gave no result.

    Attributes:
        status: ``"absent"`` (not installed), ``"broken"`` (installed, cannot be imported), ``"crashed"``,
            ``"timed out"``, ``"out of memory"``, or ``"error"`` (the backend raised an exception and lives on).
        detail: one line that says what happened.
        stderr: the last lines that the worker wrote.
    """

    def __init__(self, status: str, detail: str, stderr: str = "") -> None:
        self.status, self.detail, self.stderr = status, detail, stderr
        super().__init__(f"{status}: {detail}")


PROFILES = ("plain", "tuned", "as shipped")
"""How a worker's environment is set: ``plain``: threads alike for all. ``tuned``: that, and the switches that its vendors
document for speed. ``as shipped``: neither."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")
"""What really controls threads: torch and Paddle OMP, TensorFlow its own two, JAX NPROC, NumPy OpenBLAS."""

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What the environment has to say for deterministic kernels: cuBLAS sums in another order in workspaces of other sizes."""

APPENDED = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
"""The same for what may have a value already: XLA reads its flags once, when JAX starts."""

SWITCHES = {"MKL_DEBUG_CPU_TYPE": "5"}
"""MKL in Paddle's wheel is of a version that takes slow paths on processors that are not Intel's unless this says AVX2."""


def environment(device: str, threads: int | None, profile: str = "plain", deterministic: bool = False) -> dict[str, str]:
    """Return the environment that a worker gets on top of the parent's: threads, device and logging, all explicit.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        threads: for every framework alike; by default as many as this machine has cores.
        profile: one of :data:`PROFILES`.
        deterministic: whether only deterministic kernels may run; :data:`APPENDED` is added besides.
    """
    count = str(threads or os.cpu_count() or 1)
    explicit = {} if profile == "as shipped" else dict.fromkeys(THREADS, count)
    tuned = SWITCHES if profile == "tuned" else {}
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    on_gpu = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "GLOG_minloglevel": "2", "KERAS_BACKEND": "tensorflow", "JAX_ENABLE_X64": "1"}
    return {**explicit, **tuned, **(on_cpu if device == "cpu" else on_gpu), **(DETERMINISM if deterministic else {}), **quiet}


class Worker:
    """A backend in a process of its own. Use it in a ``with`` block, or call :meth:`close`.

    Args:
        name: what to call the backend.
        target: its class, ``"package.module:Class"``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        python: the interpreter of another environment to run it in; it needs numpy, safetensors and the framework.
        ssh: ``"host"`` or ``"host:/path/to/checkout"`` to run it there.
        time_limit: seconds that one request may take.
        memory_limit: bytes that the process may hold; by default four fifths of the machine's.
        threads: computing threads; by default as many as there are cores.
        opened: called with the worker as soon as it has a process, so that it can be closed while it still starts.
        profile: one of :data:`PROFILES`.
        deterministic: whether only kernels may run, in all its runs, that give the same bits each time.

    Raises:
        WorkerFailure: if the process cannot be started or the framework cannot be imported.
    """

    def __init__(
        self,
        name: str,
        target: str,
        device: str = "cpu",
        python: str | None = None,
        ssh: str | None = None,
        time_limit: float = TIME_LIMIT,
        memory_limit: int | None = None,
        threads: int | None = None,
        opened: Callable[[Worker], None] = lambda worker: None,
        profile: str = "plain",
        deterministic: bool = False,
    ) -> None:
        if ssh is not None and (wrong := machine.wrong_host(ssh)):
            raise SpecError(wrong)
        self.profile, self.deterministic = profile, deterministic
        self.name, self.device, self.time_limit = name, device, time_limit
        self.memory_limit = memory_limit or int(0.8 * machine.memory()[0])
        self.local = ssh is None
        self.peak_memory = 0
        self.dead: WorkerFailure | None = None
        self._stderr = tempfile.NamedTemporaryFile(prefix="concord-") if self.local else None  # noqa: SIM115 - lives as long as the worker
        self._group = execnet.Group()
        self._closing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_for: tuple[str, str] | None = None
        self._leads = self._silent = False
        started = time.perf_counter()
        try:
            settings = self._start(target, python, ssh, threads, opened)
            status, payload, _ = self._exchange(settings)
            self._leads = self.local and hasattr(os, "killpg")  # a group of its own, which may outlive it
        except WorkerFailure:
            self.close()
            raise
        except Exception as error:  # execnet cannot start the interpreter, reaches no host, or hears no Python there
            self.close()
            if self._stopped_for:
                raise WorkerFailure(*self._stopped_for) from None
            cause = error.strerror if isinstance(error, OSError) and error.filename else f"no Python answered ({type(error).__name__})"
            raise WorkerFailure("broken", f"its process could not be started: {ssh or python or sys.executable}: {cause}") from None
        answer = received(payload)
        self.description: dict[str, Any] = answer["describe"]
        self.import_seconds: float = answer["import_seconds"]
        self.start_seconds = time.perf_counter() - started
        if status != "ok":
            failure = WorkerFailure(status, self.description["message"], self._last_words())
            self.close()
            raise failure
        try:
            check_description(self.description)
        except SpecError as error:
            self.close()
            raise WorkerFailure("broken", error.problems[0]) from None

    def _start(
        self, target: str, python: str | None, ssh: str | None, threads: int | None, opened: Callable[[Worker], None]
    ) -> dict[str, Any]:
        """Start the process, and return the settings that it waits for."""
        host, _, folder = (ssh or "").partition(":")
        where = f"ssh={host}" if ssh else "popen"
        if python:
            # "//" would end the path in execnet's notation, and a local path is split as a shell would.
            path = re.sub("/+", "/", python if ssh else shlex.quote(os.path.expanduser(python)))
            where += f"//python={path}"
        self._channel = self._open_gateway(where, opened).remote_exec(_BOOTSTRAP)
        return {
            "root": (folder or ".") if ssh else str(ROOT),
            "environment": environment(self.device, threads, self.profile, self.deterministic),
            "appended": APPENDED if self.deterministic else {},
            "stderr": self._stderr.name if self._stderr else None,
            "target": target,
        }

    def _open_gateway(self, where: str, opened: Callable[[Worker], None]) -> execnet.Gateway:
        """Do what execnet's ``makegateway`` does, with the process at hand before it has answered: it may never do so."""
        place = execnet.XSpec(where)
        self._group.allocate_id(place)
        place.execmodel = self._group.remote_execmodel.backend
        streams = gateway_io.create_io(place, execmodel=self._group.execmodel)
        self._process = streams.popen  # over ssh it is the client
        opened(self)
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

    def run(
        self,
        config: EncoderConfig,
        weights: Weights,
        batch: Batch,
        part: str = "model",
        dtype: str = "float32",
        implementation: str = "explicit",
        execution: str = "eager",
        taps: bool = True,
        gradients: bool = True,
        precision: str = "strict",
        tap_gradients: bool = False,
    ) -> Run:
        """Compute a part of the model in the backend; the arguments are those of :class:`concord.backends.interface.Request`.

        Raises:
            SpecError: for input that does not fit, before anything is sent.
            Unsupported: if the backend cannot do what was asked, or does not say that it did.
            WorkerFailure: if the worker gave no result.
        """
        settings = (dtype, implementation, execution, self.device, precision, self.deterministic)
        request = Request(config, weights, batch, part, *settings, taps=taps, gradients=gradients, tap_gradients=tap_gradients)
        message = self._ask("run", request)
        try:
            run = decode_run(message)
        except SpecError as error:
            raise WorkerFailure("error", f"its answer cannot be read: {error}") from None
        except Exception as error:  # for example arrays of a type that NumPy has not
            raise WorkerFailure("error", f"its answer cannot be read: {type(error).__name__}: {error}") from None
        self._confirm(request, run)
        # What was asked for is the asker's to say: a backend that leaves something out must not pass.
        run.backend, run.dtype = self.name, dtype
        run.requested = tuple(name for name, wanted in (("taps", taps), ("gradients", gradients)) if wanted)
        return run

    def _confirm(self, request: Request, run: Run) -> None:
        """Refuse a run that was made otherwise than asked, or does not say so where only the backend can know (SPEC PRC-3)."""
        told = (request.precision, request.dtype) == ("tf32", "float32")
        promised = [("precision", request.precision, told), *([("deterministic", True, True)] if request.deterministic else [])]
        for name, asked, needed in promised:
            said = run.info.get(name)
            if said not in (None, asked):
                raise WorkerFailure("error", f"its run says that {name} was {said!r} but it was asked for {asked!r} [clause=PRC-3]")
            if said is None and needed:
                raise Unsupported(f"{self.name} does not say that its run had {name} = {asked!r}: its info has no {name!r}")

    def round_trip(
        self, config: EncoderConfig, weights: Weights, batch: Batch, part: str = "model", dtype: str = "float32", implementation: str = "explicit"
    ) -> dict[str, NDArray[np.floating]]:
        """Load weights into the framework's model and read them back (SPEC WGT-4)."""
        return load(self._ask("round_trip", Request(config, weights, batch, part, dtype, implementation, device=self.device))[1])

    def bench(self, operation: str, **asked: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Have a session opened, stepped or let go: an operation of :class:`concord.backends.bench.Bench`, with what it is asked.

        Raises:
            Unsupported: if the backend cannot be measured, or not in this way.
            SpecError: for a configuration or sizes that do not fit.
            WorkerFailure: if the worker gave no answer.
        """
        header, arrays = self._send(operation, json.dumps(asked), b"")
        return received(header), load(arrays)

    def _ask(self, operation: str, request: Request) -> tuple[str, bytes]:
        if self.dead:
            raise self.dead
        request.validate(where=f"backend={self.name}")
        # Rounded once, here (SPEC PRC-2): no framework's own conversion from float64 can round twice.
        weights, batch = round_inputs(request.weights, request.batch, request.dtype)
        return self._send(operation, *encode_request(dataclasses.replace(request, weights=weights, batch=batch)))

    def _send(self, operation: str, header: str, arrays: bytes) -> tuple[str, bytes]:
        if self.dead:
            raise self.dead
        status, header, arrays = self._exchange((operation, header, arrays))
        if status == "ok":
            return header, arrays
        message = received(header)["message"]
        if status == "unsupported":
            raise Unsupported(message)
        if status == "refused":
            raise SpecError(message.split("\n"))
        raise WorkerFailure(status, message, self._last_words())

    def _exchange(self, message: Any) -> Any:
        """Send a message and wait for the answer."""
        try:
            with self._watched():
                self._channel.send(message)
                while not self._silent:
                    with contextlib.suppress(self._channel.TimeoutError):
                        return self._channel.receive(timeout=1.0)
                raise EOFError
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

    def _watch(self, done: threading.Event) -> None:
        """Kill the process when it takes too long or too much, and what it has left when it ends; the exchange ends by that."""
        deadline = time.monotonic() + self.time_limit
        while not done.wait(0.05):
            used = self._resident()
            self.peak_memory = max(self.peak_memory, used)
            if used > self.memory_limit:
                held, limit = used / 2**20, self.memory_limit / 2**20
                self._stopped_for = "out of memory", f"it held {held:,.0f} MiB, over its limit of {limit:,.0f} MiB, and was stopped"
            elif time.monotonic() > deadline:
                self._stopped_for = "timed out", f"no answer within {self.time_limit:g} s; it was stopped"
            ended = self._process is not None and self._process.poll() is not None
            if ended and not self._stopped_for:
                done.wait(1.0)  # for its last answer
            if ended or self._stopped_for:
                self._kill()
                # A process that it has started, outside its group, may hold the pipe for ever.
                self._silent = not done.wait(1.0)
                return

    def _resident(self) -> int:
        """Return the resident size in bytes; 0 for a process on another host."""
        return machine.resident(self._process.pid) if self.local and self._process else 0

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
        """Kill the process, and what it has started."""
        if self._process:
            with contextlib.suppress(OSError):  # there is no such group any more, or not yet
                if self.local and (self._leads or os.getpgid(self._process.pid) == self._process.pid):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # does nothing to one that has ended

    def _last_words(self, lines: int = 10) -> str:
        if self._stderr is None or self._stderr.closed:
            return ""
        try:
            with Path(self._stderr.name).open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LAST_WORDS, 0))
                text = legible(file.read().decode(errors="replace")).rstrip()
        except OSError:  # closed meanwhile, by another thread
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """End the process, at once if it is busy. Any thread may."""
        self._kill()
        with self._closing:  # execnet's groups are not safe from two threads
            self._group.terminate(timeout=1.0)
            if self._stderr is not None:
                self._stderr.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
