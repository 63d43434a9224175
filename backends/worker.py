"""The parent's side of a worker.

One process for each framework, in this environment or another.

The parent imports NumPy and no framework. Whatever happens to the worker, a signal, a hang, too little
memory, comes back as a :class:`concord.backends.wire.WorkerFailure` that says so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from concord.backends.interface import Request, Run, Unsupported
from concord.backends.process import Process
from concord.backends.wire import WorkerFailure, check_info
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights

TIME_LIMIT = 300.0
"""Seconds that one request may take unless the caller says otherwise."""

SHARE, MUCH = 8, 1 << 31
"""A worker that holds such a share of its limit, or so many bytes, holds much."""

PROFILES = ("plain", "tuned")
"""How a worker's environment is set: threads alike for all; ``tuned``: with the switches that its vendors
document for speed."""

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

XLA = "--xla_gpu_deterministic_ops=true"
"""The same for XLA, which reads its flags once, when JAX starts; others may be set already."""

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
        deterministic: whether only deterministic kernels may run.
    """
    count = str(threads or os.cpu_count() or 1)
    explicit = dict.fromkeys(THREADS, count)
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
        **(DETERMINISM | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {XLA}"} if deterministic else {}),
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
        time_limit: seconds that one request may take.
        memory_limit: bytes that it may hold; by default four fifths of the machine's.
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
        time_limit: float = TIME_LIMIT,
        memory_limit: int | None = None,
        threads: int | None = None,
        opened: Callable[[Worker], None] = lambda worker: None,
        profile: str = "plain",
        deterministic: bool = False,
    ) -> None:
        super().__init__(time_limit, memory_limit)
        self.profile, self.deterministic = profile, deterministic
        self.name, self.device, self.settled = name, device, 0
        self.start(
            "concord.backends.remote:Service",
            environment(device, threads, profile, deterministic),
            python,
            lambda: opened(self),
        )
        self.description: dict[str, Any]
        try:
            self.description, self.import_seconds = self.call(0, "introduce", target)
        except BaseException:
            self.close()
            raise

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
        **asked: Any,
    ) -> Run:
        """Compute a part of the model in the backend, or train it.

        Args:
            asked: other fields of :class:`concord.backends.interface.Request`. Device and determinism are
                those of the worker.

        Raises:
            SpecError: for input that does not fit, before anything is sent.
            Unsupported: if the backend cannot do what was asked, or does not say that it did.
            WorkerFailure: if the worker gave no result.
        """
        asked |= {"device": self.device, "deterministic": self.deterministic}
        request = Request(config, weights, batch, part, dtype, implementation, **asked)
        run: Run = self.call(0, "run", self._fitting(request))
        self._confirm(request, run.info)
        self.settled = self.settled or self.size
        # What was asked for is the asker's to say: a backend that leaves something out must not pass.
        run.backend, run.dtype = self.name, request.dtype
        wanted = ("steps",) if request.training else ("taps", "gradients")
        run.requested = tuple(name for name in wanted if getattr(request, name, True))
        return run

    def _confirm(self, request: Request, info: Mapping[str, Any]) -> None:
        """Refuse a run that was made otherwise than asked, or does not say how it was (SPEC PRC-3)."""
        try:
            check_info(info)
        except SpecError as error:
            raise WorkerFailure("error", f"its info cannot be understood: {error}") from None
        tf32 = (request.precision, request.dtype) == ("tf32", "float32")
        promised: list[tuple[str, Any, bool]] = [("precision", request.precision, tf32)]
        promised += [("deterministic", True, True)] if request.deterministic else []
        for name, asked, needed in promised:
            actual = info.get(name)
            if actual not in (None, asked):
                raise WorkerFailure(
                    "error",
                    f"its run says that {name} was {actual!r} but it was asked for {asked!r} [clause=PRC-3]",
                )
            if actual is None and needed:
                raise Unsupported(
                    f"{self.name} does not say that its run had {name} = {asked!r}: its info has no {name!r}"
                )

    def bench(self, operation: str, **asked: Any) -> tuple[dict[str, Any], Arrays]:
        """Have a session opened, stepped or let go.

        An operation of :class:`concord.backends.bench.Bench`, with what it is asked.

        Raises:
            Unsupported: if the backend cannot be measured, or not in this way.
            SpecError: for a configuration or sizes that do not fit.
            WorkerFailure: if the worker gave no answer.
        """
        about, arrays = self.call(0, f"bench.{operation}", **asked)
        return about, arrays

    def train(self, request: Request) -> Remote:
        """Have training held open, that goes on step by step.

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
        session = Remote(self, self.call(0, "train", self._fitting(request)))
        self._confirm(request, session.info())
        return session

    def _fitting(self, request: Request) -> Request:
        """Return a request as it is sent: valid, and rounded once (SPEC PRC-2).

        No framework's own conversion from float64 can round twice then. Weights of a run in float64 are sent
        in the bytes that they have.
        """
        request.validate(where=f"backend={self.name}")
        weights, batch = round_inputs(request.weights, request.batch, request.dtype)
        if request.dtype == "float64":
            weights = dict(request.weights)
        return dataclasses.replace(request, weights=weights, batch=batch)


class Remote:
    """An object that a worker holds: a method called here is called there.

    Use it in a ``with`` block, or call its method ``close``. Every method raises
    :class:`concord.backends.wire.WorkerFailure` if the worker gives no answer, for it died, hangs or takes
    too much; the object is gone with the worker.
    """

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker, self._number = worker, number

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._worker.call, self._number, method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # else the worker may be gone, and what it says of that would hide the error
            self.close()
