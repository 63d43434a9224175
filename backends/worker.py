"""The parent's side of a worker: one process per framework, in any environment.

Its signals, hangs and memory shortages become a :class:`concord.backends.wire.WorkerFailure`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from concord.backends.cores import available_cores
from concord.backends.interface import Request, Run, Unsupported
from concord.backends.process import Process
from concord.backends.wire import WorkerFailure, check_info
from concord.spec.batch import Batch, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights

# Seconds for one request.
TIME_LIMIT = 300.0

# A worker counts as large from this share of its memory limit, or from this many bytes.
SHARE, MUCH = 8, 1 << 31

# The effective variables: OMP for PyTorch and Paddle, two specific ones for TensorFlow, NPROC for JAX,
# OpenBLAS for NumPy.
THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "NPROC",
)

# The order of cuBLAS' sums depends on the size of its workspace.
DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# XLA reads its flags once, when JAX starts.
XLA = "--xla_gpu_deterministic_ops=true"

# The MKL in Paddle's wheel takes slow paths on processors other than Intel's, unless this selects AVX2.
SWITCHES = {"MKL_DEBUG_CPU_TYPE": "5"}

# Workers run side by side. By default, an OpenMP thread without work keeps its core busy for a while, which
# made PyTorch's CPU time tenfold.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}

# By default, XLA uses half of AVX512's registers (decision 0034).
WIDE = "--xla_cpu_prefer_vector_width=512"


def environment(
    device: str, threads: int | None, profile: str = "plain", deterministic: bool = False
) -> dict[str, str]:
    """A worker's environment variables for threads (default: one per core), device and logging."""
    # All variables are set explicitly: importing Paddle, for example, sets OMP_NUM_THREADS=1 for all children
    # (decision 0001).
    tuned = profile == "tuned"
    # The user's own values stay, and the last of two flags counts.
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    on_gpu = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    xla = " ".join(filter(None, (WIDE * tuned, os.environ.get("XLA_FLAGS"), XLA * deterministic)))
    return {
        **dict.fromkeys(THREADS, str(threads or available_cores())),
        **{name: os.environ.get(name, value) for name, value in (SWITCHES if tuned else WAITING).items()},
        **({"XLA_FLAGS": xla} if xla else {}),
        **(on_cpu if device == "cpu" else on_gpu),
        **(DETERMINISM if deterministic else {}),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GLOG_minloglevel": "2",
        "KERAS_BACKEND": "tensorflow",
        "JAX_ENABLE_X64": "1",
    }


class Worker(Process):
    """A backend in its own process, in a ``with`` block or until :meth:`close`.

    Args:
        target: ``"package.module:Class"``.
        python: another environment's interpreter, with numpy, scipy, safetensors and the framework.
        opened: called once the process exists, to allow closing while it starts.
        profile: ``"plain"``, or ``"tuned"`` with vendors' documented speed switches.

    Raises:
        WorkerFailure: if the process does not start or the framework cannot be imported.
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
        self.name, self.device, self.deterministic, self.settled = name, device, deterministic, 0
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
        """Whether its memory has grown much since its first run."""
        # Some frameworks keep all compiled programs.
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
        """Compute or train a part of the model.

        Args:
            asked: other fields of :class:`concord.backends.interface.Request`.

        Raises:
            SpecError: for invalid input, before anything is sent.
            Unsupported: if the backend cannot compute it, or does not confirm the settings.
            WorkerFailure: if the worker does not answer.
        """
        asked |= {"device": self.device, "deterministic": self.deterministic}
        request = Request(config, weights, batch, part, dtype, implementation, **asked)
        run: Run = self.call(0, "run", self._fitting(request))
        self._confirm(request, run.info)
        self.settled = self.settled or self.size
        # Set here instead of by the backend: a backend that omits a result must not pass.
        run.backend, run.dtype = self.name, request.dtype
        fields = ("steps",) if request.training else ("taps", "gradients")
        run.requested = tuple(name for name in fields if getattr(request, name, True))
        return run

    def _confirm(self, request: Request, info: Mapping[str, Any]) -> None:
        try:
            check_info(info)
        except SpecError as error:
            raise WorkerFailure("error", f"its info cannot be read: {error}") from None
        # TF32 and determinism must be confirmed: a plug-in that ignores them must not pass (SPEC PRC-3).
        tf32 = (request.precision, request.dtype) == ("tf32", "float32")
        promised: list[tuple[str, Any, bool]] = [("precision", request.precision, tf32)]
        promised += [("deterministic", True, True)] if request.deterministic else []
        for name, expected, needed in promised:
            actual = info.get(name)
            if actual not in (None, expected):
                raise WorkerFailure(
                    "error",
                    f"its run reports {name} = {actual!r} but {expected!r} was requested [clause=PRC-3]",
                )
            if actual is None and needed:
                raise Unsupported(
                    f"{self.name} does not confirm that its run had {name} = {expected!r}: its info has no "
                    f"{name!r}"
                )

    def bench(self, operation: str, **asked: Any) -> Any:
        """Call an operation of :class:`concord.backends.bench.Bench`.

        Raises:
            Unsupported: if the backend cannot be measured.
            SpecError: for an invalid configuration or size.
            WorkerFailure: if the worker does not answer.
        """
        return self.call(0, f"bench.{operation}", **asked)

    def train(self, request: Request) -> Remote:
        """Open a training session.

        Args:
            request: a request with ``training``, whose steps may be empty.

        Raises:
            SpecError, Unsupported, WorkerFailure: as :meth:`run`.
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
        request.validate(where=f"backend={self.name}")
        # Rounded once, here: a framework's own conversion from float64 may round twice.
        weights, batch = round_inputs(request.weights, request.batch, request.dtype)
        if request.dtype == "float64":
            # Sent unchanged: float32 values in float64 would double the message.
            weights = dict(request.weights)
        return dataclasses.replace(request, weights=weights, batch=batch)


class Remote:
    """Proxy of an object in a worker, valid within a ``with`` block or until ``close``.

    Without an answer, methods raise :class:`concord.backends.wire.WorkerFailure`, and the object is lost.
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
        if error[0] is None:  # otherwise the worker may be gone, which would hide the error
            self.close()
