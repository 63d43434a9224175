"""The protocol of backends, built-in or plug-in (docs/guides/joining.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from concord.spec.arrays import Array, Arrays
from concord.spec.batch import Batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, unknown
from concord.spec.parameters import Weights, validate_weights
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import check_part, resolve, sizes_of, taps
from concord.spec.text import first_line
from concord.spec.training.trajectory import Training

IMPLEMENTATIONS = ("explicit", "library")
"""``explicit``: written out as in the sources. ``library``: the framework's own layers and fused kernels."""

UNPADDED = "unpadded"

EXECUTIONS = ("eager", "compiled", UNPADDED, f"{UNPADDED}-compiled")
"""``eager`` or ``compiled``; ``unpadded`` ones skip rows of padded tokens, with library layers only."""

PRECISION_MODES = ("strict", "tf32", "default")
"""Products of float32 matrices. ``strict``: full float32. ``tf32``: 11-bit factors (SPEC PRC-1). ``default``:
the framework's default.
"""

WORKLOAD_KINDS = ("inference", "training")
"""``inference``: the forward pass. ``training``: forward, loss, gradients and optimizer step."""


class Overruled(RuntimeError):
    """A switch was reset during a run, which invalidates the result."""


class Unsupported(RuntimeError):
    """A backend refuses a request instead of computing a different one (SPEC PRC-3)."""


@dataclass(frozen=True)
class Problem:
    """The computation to run.

    Attributes:
        weights: weights by canonical name, in any floating dtype; linear weights are (in, out) (SPEC WGT-1,
            WGT-2, PRC-2).
        batch: inputs of the part (SPEC INP-1).
        part: one of :data:`concord.spec.tensors.PARTS` (SPEC PRT-1).
    """

    config: EncoderConfig
    weights: Weights
    batch: Batch
    part: str = "model"


@dataclass(frozen=True)
class Settings:
    """Settings of a computation.

    Attributes:
        dtype: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"`` (SPEC PRC-1).
        implementation: one of :data:`IMPLEMENTATIONS`, or the backend's own, with a colon.
        execution: one of :data:`EXECUTIONS`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: one of :data:`PRECISION_MODES`.
        deterministic: allow only kernels that return identical bits each time.
    """

    dtype: str = "float32"
    implementation: str = "explicit"
    execution: str = "eager"
    device: str = "cpu"
    precision: str = "strict"
    deterministic: bool = False


@dataclass(frozen=True)
class Request(Settings, Problem):
    """A run: a problem, settings, and results besides output and loss.

    Attributes:
        taps: return every activation.
        gradients: return gradients of the loss by trainable parameter.
        tap_gradients: return gradients of the loss by tap; requires ``gradients``.
        training: train the model instead, on a :class:`Trainable` backend.
    """

    taps: bool = True
    gradients: bool = True
    tap_gradients: bool = False
    training: Training | None = None

    def zeros(self) -> Arrays:
        """Zeros shaped like each tap, if tap gradients are requested."""
        if not self.tap_gradients:
            return {}
        # Zeros added to a tap get the gradient of the tap's total use (SPEC GRD-6).
        inputs = self.batch.arrays()
        sizes = sizes_of(self.config, inputs)
        return {
            name: np.zeros(resolve(entry.shape, sizes))
            for name, entry in taps(self.config, self.part, inputs).items()
            if name != "loss"
        }

    def validate(self, where: str = "") -> None:
        """Refuse an invalid request.

        Args:
            where: prefix of messages, such as ``"backend=torch"``.

        Raises:
            UnknownNameError, WeightsError, BatchError, SpecError: naming the problem.
        """
        check_part(self.part)
        if self.tap_gradients and not self.gradients:
            raise SpecError(
                "'tap_gradients' is true but 'gradients' is false: tap gradients are returned only "
                "with the other gradients"
            )
        options = (
            ("dtype", self.dtype, tuple(PRECISIONS)),
            ("implementation", self.implementation, IMPLEMENTATIONS),
            ("execution", self.execution, EXECUTIONS),
            ("precision", self.precision, PRECISION_MODES),
        )
        for kind, name, choices in options:
            if name not in choices and not (kind == "implementation" and ":" in name):
                raise unknown(kind, name, list(choices))
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise unknown("device", self.device, ["cpu", "cuda"])
        validate_weights(self.config, self.weights, self.part, where)
        validate_batch(self.config, self.batch, self.part, where)
        for batches in self.training.steps if self.training else ():
            for batch in batches:
                validate_batch(self.config, batch, self.part, where)


@dataclass
class Run:
    """Results in the run's precision, with bfloat16 and float16 as float32 (SPEC PRC-2, PRC-3).

    Attributes:
        output: (B, C) of the whole model; (B, D), (B, T, D) or (B, Q, D) of parts; the last loss of training.
        loss: scalar (SPEC LOS-2, LOS-5); may be None without gradients.
        taps: in the shapes of :func:`concord.spec.tensors.taps`; missing taps are not judged.
        gradients: gradients of the loss by parameter and ``inputs.<name>`` (SPEC GRD-1, GRD-5).
        info: versions, device, threads, and precision and determinism after the run; ``not_exposed`` may list
            patterns of taps inside a fused implementation.
        requested: set by the caller, to detect omissions.
        tap_gradients: gradients of the loss by tap, for its total use (SPEC GRD-6).
        steps: ``steps.<step>.<name>`` of training (:data:`concord.spec.training.trajectory.Observer`).
    """

    output: Array
    loss: Array | None
    taps: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    backend: str = ""
    dtype: str = "float32"
    info: dict[str, Any] = field(default_factory=dict)
    requested: tuple[str, ...] = ("taps", "gradients")
    tap_gradients: Arrays = field(default_factory=dict)
    steps: Arrays = field(default_factory=dict)

    @property
    def logits(self) -> Array:
        """The whole model's output."""
        return self.output

    def results(self, output: str) -> Arrays:
        """Output and loss by tap name."""
        return {output: self.output} | ({} if self.loss is None else {"loss": self.loss})


class Steps(Protocol):
    """A repeatable computation with asynchronous steps."""

    def step(self) -> None:
        """Start one step."""

    def synchronize(self) -> None:
        """Wait for the device."""


class Session(Steps, Protocol):
    """A model on a device, built once and stepped many times.

    Steps train if the request has ``training``, and otherwise are forward passes. Inputs come from the
    request's batch or :meth:`feed`.
    """

    def compile(self) -> None:
        """Compile before the first step, if possible."""

    def results(self) -> Arrays:
        """The last step's ``logits`` (B, C), or ``loss`` before the update."""

    def feed(self, batch: Batch) -> None:
        """Set inputs of the same shapes, already rounded to the precision (SPEC PRC-2)."""

    def state(self) -> Mapping[str, Array]:
        """State of training (:meth:`TrainingSession.state`)."""


@dataclass(frozen=True)
class Implementation:
    """One way for a backend to compute the model.

    Attributes:
        parts: builders by part (:data:`concord.spec.tensors.PARTS`), called with a configuration.
        unsupported_reasons: returns one line per option that rules out a request.
        not_exposed: patterns of hidden taps.
        known_deviations: further declarations by kind of device (SPEC PRC-4).
        context: context of a request, such as a choice of kernel.
        finish: converts a loaded model, for example to a kernel's weight layout.
    """

    parts: Mapping[str, Callable[..., Any]]
    unsupported_reasons: Callable[[Request], list[str]] = lambda request: []
    not_exposed: tuple[str, ...] = ()
    known_deviations: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    context: Callable[[Request], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[Any], Any] | None = None


def variety(implementation: str, execution: str) -> str:
    """An implementation's name in a backend's list, where unpadded variants have their own."""
    return implementation + (f" {UNPADDED}" if execution.startswith(UNPADDED) else "")


def refuse_tf32(backend: str, request: Request, able: bool) -> None:
    """Refuse TF32 products if the device lacks them (SPEC PRC-3)."""
    if request.precision != "tf32" or request.dtype != "float32":
        return
    if not able:
        raise Unsupported(
            f"{backend} has no TF32 products on {request.device}: only tensor cores of NVIDIA GPUs with "
            "compute capability 8.0 or higher compute them"
        )
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise Unsupported(
            f"{backend} has no TF32 products here: NVIDIA_TF32_OVERRIDE=0 in its environment switches them "
            "off"
        )


@contextmanager
def refusing_nondeterminism(backend: str, request: Request) -> Iterator[None]:
    """Convert an error about a missing deterministic kernel into a refusal (SPEC PRC-3)."""
    try:
        yield
    except Exception as error:
        message = first_line(error)
        if not request.deterministic or "determinis" not in message.lower():
            raise
        raise Unsupported(f"{backend} has no deterministic kernel for this run: {message}") from error


class Backend(Protocol):
    """A backend in its worker process, constructed without arguments."""

    name: str

    def describe(self) -> dict[str, Any]:
        """JSON data: ``version``, ``devices``, ``dtypes``, ``threads`` and more.

        ``precision_defaults`` has the switches at import, with ``products``: ``"float32"`` or ``"tf32"`` by
        kind of device.
        """

    def run(self, request: Request) -> Run:
        """Compute a request.

        Raises:
            Unsupported: if the backend cannot; it must never compute anything else.
        """


class TrainingSession(Protocol):
    """A model with optimizer state, trained step by step (SPEC, section 10)."""

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Resume after ``step`` steps, bitwise identical to uninterrupted training.

        Args:
            state: ``parameters.<canonical name>`` and ``<moment>.<canonical name>``
                (:func:`concord.spec.training.reference_optimizer.moments`), in the stored dtype or wider;
                missing entries keep their initial values.
        """

    def step(self, batches: Sequence[Batch], report: bool = False) -> Mapping[str, Array]:
        """Train one step on batches of any shapes; known shapes are not recompiled.

        Returns:
            ``losses.<number>`` of each batch, and the clipping ``norm``, if any; with ``report``, all names
                of :data:`concord.spec.training.trajectory.Observer`.
        """

    def predict(self, batch: Batch) -> Array:
        """Output (B, C) without dropout, ignoring labels."""

    def state(self) -> Mapping[str, Array]:
        """Return a copy of the state, as input for :meth:`load`."""

    def info(self) -> dict[str, Any]:
        """The session's description (:attr:`Run.info`)."""


class Trainable(Backend, Protocol):
    """A backend that can train."""

    def train(self, request: Request) -> TrainingSession:
        """Open a session with the request's weights, ignoring its training steps."""


Trace = Callable[[Any, Mapping[str, Any], Callable[[str, Any], Any]], Callable[[str, Any], Any]]
"""Wraps the recording tap of a model and its inputs; layers call the result."""


class Measurable(Backend, Protocol):
    """A backend whose speed can be measured."""

    def session(self, request: Request) -> Session:
        """Build a request's model for repeated runs."""

    def product(self, left: Array, right: Array, dtype: str, device: str, precision: str) -> Steps:
        """Return a product of (M, K) and (K, N) that measures the machine."""

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """The framework's peak bytes on a device.

        Args:
            reset: start a new peak, if possible.
        """

    def event(self) -> Any:
        """Return a device event with ``record()`` and ``elapsed_time(later)`` in ms, or None."""
