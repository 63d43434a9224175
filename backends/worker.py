"""The parent's side of a worker.

One process for each framework, on this machine, another environment or another host.

The parent imports NumPy and no framework. Whatever happens to the worker, a signal, a hang, too little
memory, comes back as a :class:`concord.backends.process.WorkerFailure` that says so.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from concord.backends import heaps, machine
from concord.backends.interface import Request, Run, Unsupported
from concord.backends.process import ROOT, Process
from concord.backends.process import WorkerFailure as WorkerFailure
from concord.backends.wire import (
    TRAINING,
    Payload,
    check_description,
    check_info,
    decode_run,
    encode_batches,
    encode_request,
    narrower,
    pack,
    received,
)
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import typed
from concord.spec.parameters import Weights
from concord.spec.precision import precision
from concord.spec.training.plan import StepPlan
from concord.spec.training.trajectory import Training

T = TypeVar("T")

TIME_LIMIT = 300.0
"""Seconds that one request may take unless the caller says otherwise."""

SHARE, MUCH = 8, 1 << 31
"""A worker that holds such a share of its limit, or so many bytes, holds much."""

PROFILES = ("plain", "tuned", "as shipped")
"""How a worker's environment is set: ``plain``: threads alike for all. ``tuned``: that, and the switches that
its vendors document for speed. ``as shipped``: neither."""

THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "NPROC",
)
"""What really controls threads: torch and Paddle OMP, TensorFlow its own two, JAX NPROC, NumPy OpenBLAS."""

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What the environment has to say for deterministic kernels: cuBLAS sums in another order in workspaces of
other sizes."""

APPENDED = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
"""The same for what may have a value already: XLA reads its flags once, when JAX starts."""

SWITCHES = {"MKL_DEBUG_CPU_TYPE": "5"}
"""MKL in Paddle's wheel is of a version that takes slow paths on processors that are not Intel's unless this
says AVX2."""


def environment(
    device: str, threads: int | None, profile: str = "plain", deterministic: bool = False
) -> dict[str, str]:
    """Return the environment that a worker gets on top of the parent's.

    Threads, device and logging, all explicit.

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
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GLOG_minloglevel": "2",
        "KERAS_BACKEND": "tensorflow",
        "JAX_ENABLE_X64": "1",
    }
    return {
        **explicit,
        **tuned,
        **(on_cpu if device == "cpu" else on_gpu),
        **(DETERMINISM if deterministic else {}),
        **quiet,
    }


class Worker(Process):
    """A backend in a process of its own. Use it in a ``with`` block, or call :meth:`close`.

    Args:
        name: what to call the backend.
        target: its class, ``"package.module:Class"``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        python: the interpreter of another environment to run it in; it needs numpy, scipy, safetensors and
            the framework.
        ssh: ``"host"`` or ``"host:/path/to/checkout"`` to run it there.
        time_limit: seconds that one request may take.
        memory_limit: bytes that it may hold, with all that it has started; by default four fifths of the
            machine's.
        threads: computing threads; by default as many as there are cores.
        opened: called with the worker as soon as it has a process, so that it can be closed while it still
            starts.
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
        super().__init__(ssh is None, time_limit, memory_limit)
        self.profile, self.deterministic = profile, deterministic
        self.name, self.device, self.settled = name, device, 0
        host, _, folder = (ssh or "").partition(":")
        started = time.perf_counter()
        self.start(python, host, lambda: opened(self))
        status, payload, _ = self.exchange(
            {
                "root": (folder or ".") if ssh else str(ROOT),
                "environment": environment(device, threads, profile, deterministic),
                "appended": APPENDED if deterministic else {},
                "target": target,
            }
        )
        self.description, self.import_seconds = self._introduced(status, payload)
        self.start_seconds = time.perf_counter() - started

    def _introduced(self, status: str, payload: str) -> tuple[dict[str, Any], float]:
        """Return what a backend says of itself, and how long its import took."""
        try:
            answer = received(payload)
            if status == "ok":
                check_description(answer["describe"])
                return answer["describe"], answer["import_seconds"]
            raise WorkerFailure(status, answer["describe"]["message"], self._last_words())
        except WorkerFailure:
            self.close()
            raise
        except Exception as error:
            words = self._last_words()
            self.close()
            raise WorkerFailure(
                "broken", f"what it says of itself cannot be read: {said(error)}", words
            ) from None

    @property
    def grown(self) -> bool:
        """Whether it has come to hold much, and far more than after its first run.

        Some keep all that they have compiled.
        """
        return self.settled > 0 and self.size > max(min(self.memory_limit // SHARE, MUCH), 2 * self.settled)

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
        training: Training | None = None,
    ) -> Run:
        """Compute a part of the model in the backend.

        The arguments are those of :class:`concord.backends.interface.Request`.

        Raises:
            SpecError: for input that does not fit, before anything is sent.
            Unsupported: if the backend cannot do what was asked, or does not say that it did.
            WorkerFailure: if the worker gave no result.
        """
        settings = (dtype, implementation, execution, self.device, precision, self.deterministic)
        request = Request(
            config,
            weights,
            batch,
            part,
            *settings,
            taps=taps,
            gradients=gradients,
            tap_gradients=tap_gradients,
            training=training,
        )
        message = self._ask("run", request)
        run = self.read(lambda: decode_run(message))
        self.settled = self.settled or self.size
        self._confirm(request, run)
        # What was asked for is the asker's to say: a backend that leaves something out must not pass.
        run.backend, run.dtype = self.name, dtype
        run.requested = (
            ("steps",)
            if training
            else tuple(name for name, wanted in (("taps", taps), ("gradients", gradients)) if wanted)
        )
        return run

    def _confirm(self, request: Request, run: Run) -> None:
        """Refuse a run that was made otherwise than asked, or does not say how it was (SPEC PRC-3)."""
        if request.training and not run.steps:
            raise Unsupported(f"{self.name} does not train: its run reports no steps")
        told = (request.precision, request.dtype) == ("tf32", "float32")
        promised = [
            ("precision", request.precision, told),
            *([("deterministic", True, True)] if request.deterministic else []),
        ]
        for name, asked, needed in promised:
            said = run.info.get(name)
            if said not in (None, asked):
                raise WorkerFailure(
                    "error",
                    f"its run says that {name} was {said!r} but it was asked for {asked!r} [clause=PRC-3]",
                )
            if said is None and needed:
                raise Unsupported(
                    f"{self.name} does not say that its run had {name} = {asked!r}: its info has no {name!r}"
                )

    def round_trip(
        self,
        config: EncoderConfig,
        weights: Weights,
        batch: Batch,
        part: str = "model",
        dtype: str = "float32",
        implementation: str = "explicit",
    ) -> dict[str, NDArray[np.floating]]:
        """Load weights into the framework's model and read them back (SPEC WGT-4)."""
        arrays = self._ask(
            "round_trip", Request(config, weights, batch, part, dtype, implementation, device=self.device)
        )[1]
        return self.read(lambda: load(arrays))

    def bench(self, operation: str, **asked: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Have a session opened, stepped or let go.

        An operation of :class:`concord.backends.bench.Bench`, with what it is asked.

        Raises:
            Unsupported: if the backend cannot be measured, or not in this way.
            SpecError: for a configuration or sizes that do not fit.
            WorkerFailure: if the worker gave no answer.
        """
        header, arrays = self._send(operation, json.dumps(asked), Payload(b""))
        return self.read(lambda: (received(header), load(arrays)))

    def train(self, request: Request) -> RemoteSession:
        """Have training held open, that goes on step by step.

        :class:`concord.backends.interface.TrainingSession`.

        Args:
            request: with ``training``, whose steps may be empty. Device and determinism are those of the
                worker.

        Raises:
            SpecError: for input that does not fit, before anything is sent.
            Unsupported: if the backend cannot do what was asked, or holds no training.
            WorkerFailure: if the worker gave no answer.
        """
        if request.training is None:
            raise SpecError("'training' is missing but is required [clause=OPT-1]")
        request = dataclasses.replace(
            request, device=self.device, deterministic=self.deterministic, taps=False
        )
        return RemoteSession(self, request)

    def arrays(self, operation: str, header: str, arrays: bytes) -> tuple[str, bytes]:
        """Exchange messages, and make sure that the answer's arrays can be read."""
        answer = self._send(operation, header, Payload(arrays))
        self.read(lambda: (received(answer[0]), load(answer[1])))
        return answer

    def _ask(self, operation: str, request: Request) -> tuple[str, bytes]:
        if self.dead:
            raise self.dead
        header, arrays = self.message(request)
        payload = Payload(arrays)
        del arrays  # they are gone once they are sent
        return self._send(operation, header, payload)

    def message(self, request: Request) -> tuple[str, bytes]:
        """Return a request as a message."""
        request.validate(where=f"backend={self.name}")
        # Rounded once, here (SPEC PRC-2): no framework's own conversion from float64 can round twice.
        exact, others = narrower(request.weights, request.dtype)
        rounded, batch = round_inputs(others, request.batch, request.dtype)
        return encode_request(dataclasses.replace(request, weights={**exact, **rounded}, batch=batch))

    def _send(self, operation: str, header: str, payload: Payload) -> tuple[str, bytes]:
        status, header, size = self.exchange((operation, header, payload.size), payload)
        answer = self.payload(size)
        if max(payload.size, size) > heaps.LARGE:
            heaps.give_back()
        if status == "ok":
            return header, answer.take()
        message = self.read(lambda: received(header)["message"])
        if status == "unsupported":
            raise Unsupported(message)
        if status == "refused":
            raise SpecError(message.split("\n"))
        raise WorkerFailure(status, message, self._last_words())

    def read(self, parse: Callable[[], T]) -> T:
        """Return what an answer is read as; whatever cannot be read is an error of the backend."""
        try:
            return parse()
        except Exception as error:  # for example arrays of a type that NumPy has not
            raise WorkerFailure(
                "error", f"its answer cannot be read: {said(error)}", self._last_words()
            ) from None


class RemoteSession:
    """Training that a worker holds open (:class:`concord.backends.interface.TrainingSession`).

    Use it in a ``with`` block, or call :meth:`close`.

    Every method raises :class:`concord.backends.process.WorkerFailure` if the worker gives no answer, for it
    died, hangs or takes too much; the session is gone with the worker.

    Attributes:
        info: what the session says of itself, as a run does: versions, threads, ``deviations``.
    """

    def __init__(self, worker: Worker, request: Request) -> None:
        self.request, self._worker = request, worker
        opened = received(worker.arrays(f"{TRAINING}open", *worker.message(request))[0])
        self.info: dict[str, Any] = opened["info"]
        self._number = opened["session"]
        worker.read(lambda: check_info(self.info))

    def _message(
        self, operation: str, arrays: Mapping[str, NDArray[Any]] | None = None, **said: Any
    ) -> tuple[str, bytes]:
        header = json.dumps({"session": self._number, **said})
        return self._worker.arrays(f"{TRAINING}{operation}", header, pack(arrays or {}))

    def _ask(self, *asked: Any, **said: Any) -> dict[str, NDArray[Any]]:
        return load(self._message(*asked, **said)[1])

    def load(self, state: Mapping[str, NDArray[np.floating]], step: int) -> None:
        """Go on from a state after so many steps.

        Args:
            state: as :meth:`state` returns it. float64 is rounded to the precision of the run, once.

        Raises:
            SpecError: listing all that is wrong with it.
        """
        self.request.check_state(state, step)
        target = precision(self.request.dtype)
        self._ask(
            "load",
            {
                name: target.round(array) if array.dtype == np.float64 else array
                for name, array in state.items()
            },
            step=step,
        )

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, NDArray[Any]]:
        """Make the next step.

        Args:
            batches: the batches whose gradients it accumulates.
            report: whether to return all that :data:`concord.spec.training.trajectory.Observer` gets of a
                step, not losses and norm alone.

        Raises:
            BatchError: listing what is wrong with a batch.
            Unsupported: if the backend cannot compute it.
        """
        assert self.request.training is not None
        most = self.request.training.recipe.accumulation
        if not 1 <= len(batches) <= most:
            raise SpecError(
                f"a step has {len(batches)} batches but must have from 1 to {most} [clause=OPT-10]"
            )
        return self._ask(
            "step", encode_batches([self._fit(batch) for batch in batches]), report=report, size=len(batches)
        )

    def predict(self, batch: Batch) -> NDArray[np.floating]:
        """Return the logits (B, C) of a batch, labelled or not, without dropout.

        Raises:
            BatchError: listing what is wrong with the batch.
        """
        if batch.labels is None and batch.input_ids is not None:
            batch = dataclasses.replace(batch, labels=np.zeros(len(batch.input_ids), np.int64))
        return self._ask("predict", encode_batches([self._fit(batch)]), size=1)["output"]

    def state(self) -> dict[str, NDArray[np.floating]]:
        """Return where training stands: ``parameters.<name>`` of all parameters, and ``<slot>.<name>``."""
        return self._ask("state")

    def plan(self, steps: Sequence[Sequence[Batch]]) -> StepPlan:
        """Return the backend's plan for these batches from the first step on; nothing is trained.

        Raises:
            SpecError: listing what of it is of another type.
        """
        fitting = [self._fit(batch) for batches in steps for batch in batches]
        sizes = [len(batches) for batches in steps]
        found = received(self._message("plan", encode_batches(fitting), sizes=sizes)[0])
        return typed(StepPlan, json.dumps(found))

    def close(self) -> None:
        """Let the session go; the worker lives on."""
        self._ask("close")

    def _fit(self, batch: Batch) -> Batch:
        validate_batch(self.request.config, batch, self.request.part, f"backend={self._worker.name}")
        return round_inputs({}, batch, self.request.dtype)[1]

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # else the worker may be gone, and what it says of that would hide the error
            self.close()


def said(error: Exception) -> str:
    """Return in one line what is wrong with an answer."""
    return (
        "; ".join(error.problems)
        if isinstance(error, SpecError)
        else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    )
