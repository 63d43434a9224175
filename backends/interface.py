"""The protocol of a backend: the four of this repository, and any other (docs/guides/joining.md)."""

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
"""``explicit``: written out as the sources write it. ``library``: the framework's own layers and fused
kernels.
"""

UNPADDED = "unpadded"

EXECUTIONS = ("eager", "compiled", UNPADDED, f"{UNPADDED}-compiled")
"""``eager``, or ``compiled`` by the framework. ``unpadded`` and ``unpadded-compiled`` leave out the rows of
padded tokens (:mod:`concord.backends.library_support`); library layers only.
"""

PRECISION_MODES = ("strict", "tf32", "default")
"""How to multiply float32 matrices. ``strict``: full float32. ``tf32``: factors of 11 bits (SPEC PRC-1).
``default``: as the framework does unless told otherwise.
"""

WORKLOAD_KINDS = ("inference", "training")
"""``inference``: the forward pass. ``training``: forward, loss, gradients and optimizer step."""


class Overruled(RuntimeError):
    """Something reset a switch during a run, which therefore was not computed as requested."""


class Unsupported(RuntimeError):
    """The backend refuses a request that it cannot compute, instead of computing another one (SPEC PRC-3)."""


@dataclass(frozen=True)
class Problem:
    """What to compute.

    Attributes:
        weights: canonical names, any floating dtype, linear weights as (in, out); rounded once (SPEC WGT-1,
            WGT-2, PRC-2).
        batch: the inputs of the part (SPEC INP-1).
        part: one of :data:`concord.spec.tensors.PARTS` (SPEC PRT-1).
    """

    config: EncoderConfig
    weights: Weights
    batch: Batch
    part: str = "model"


@dataclass(frozen=True)
class Settings:
    """How to compute it.

    Attributes:
        dtype: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"`` (SPEC PRC-1).
        implementation: one of :data:`IMPLEMENTATIONS`, or one of the backend's own, with a colon.
        execution: one of :data:`EXECUTIONS`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: one of :data:`PRECISION_MODES`, for float32 products.
        deterministic: whether to allow only kernels that give the same bits each time.
    """

    dtype: str = "float32"
    implementation: str = "explicit"
    execution: str = "eager"
    device: str = "cpu"
    precision: str = "strict"
    deterministic: bool = False


@dataclass(frozen=True)
class Request(Settings, Problem):
    """One run: a problem, settings, and what to return besides output and loss.

    Attributes:
        taps: every intermediate tensor.
        gradients: of the loss, by every trainable parameter.
        tap_gradients: of the loss, by every tap; needs ``gradients``.
        training: how to train the model instead, for a :class:`Trainable` backend.
    """

    taps: bool = True
    gradients: bool = True
    tap_gradients: bool = False
    training: Training | None = None

    def zeros(self) -> Arrays:
        """Return zeros in the shape of each tap whose gradient is wanted."""
        if not self.tap_gradients:
            return {}
        # Added to a tap, zeros have the gradient of its total use (SPEC GRD-6).
        inputs = self.batch.arrays()
        sizes = sizes_of(self.config, inputs)
        return {
            name: np.zeros(resolve(entry.shape, sizes))
            for name, entry in taps(self.config, self.part, inputs).items()
            if name != "loss"
        }

    def validate(self, where: str = "") -> None:
        """Refuse a request that no backend could answer.

        Args:
            where: context of the messages, for example ``"backend=torch"``.

        Raises:
            UnknownNameError, WeightsError, BatchError, SpecError: naming what is wrong.
        """
        check_part(self.part)
        if self.tap_gradients and not self.gradients:
            raise SpecError(
                "'tap_gradients' is true but 'gradients' is false: those of taps come beside the others"
            )
        named = (
            ("dtype", self.dtype, tuple(PRECISIONS)),
            ("implementation", self.implementation, IMPLEMENTATIONS),
            ("execution", self.execution, EXECUTIONS),
            ("precision", self.precision, PRECISION_MODES),
        )
        for kind, name, known in named:
            if name not in known and not (kind == "implementation" and ":" in name):
                raise unknown(kind, name, list(known))
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise unknown("device", self.device, ["cpu", "cuda"])
        validate_weights(self.config, self.weights, self.part, where)
        validate_batch(self.config, self.batch, self.part, where)
        for batches in self.training.steps if self.training else ():
            for batch in batches:
                validate_batch(self.config, batch, self.part, where)


@dataclass
class Run:
    """The results of a backend: NumPy arrays in the run's precision (SPEC PRC-2, PRC-3).

    bfloat16 and float16 come as float32 arrays with the same values.

    Attributes:
        output: (B, C) of the whole model, (B, D), (B, T, D) or (B, Q, D) of parts; the last loss of training.
        loss: scalar (SPEC LOS-2, LOS-5); may be None without gradients.
        taps: by name and in the shapes of :func:`concord.spec.tensors.taps`; missing ones are not judged.
        gradients: of the loss, by parameter and ``inputs.<name>`` (SPEC GRD-1, GRD-5).
        info: versions, device, threads, and precision and determinism as they were after the run;
            ``not_exposed`` may list patterns of taps that a fused implementation hides.
        requested: what the caller asked for, set by the caller so that an omission is noticed.
        tap_gradients: of the loss, by tap, for its total use (SPEC GRD-6); None counts as missing.
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
        """The output, by its name in the whole model."""
        return self.output

    def results(self, output: str) -> Arrays:
        """Return output and loss by tap name."""
        return {output: self.output} | ({} if self.loss is None else {"loss": self.loss})


class Steps(Protocol):
    """A computation that runs many times; a step may still run after it was started."""

    def compile(self) -> None:
        """Do ahead of the first step what can be done ahead."""

    def step(self) -> None:
        """Start one step."""

    def synchronize(self) -> None:
        """Wait until the device is done."""

    def results(self) -> Arrays:
        """Return the last step's ``logits`` (B, C), the ``loss`` before an update, or ``product``."""


class Session(Steps, Protocol):
    """A model that is built once on a device and stepped many times.

    A step is a training step if the request has :attr:`Request.training`, otherwise a forward pass. Inputs
    come from :meth:`feed`, never from the steps of training.
    """

    def feed(self, batch: Batch) -> None:
        """Take other inputs of the same shapes, already rounded to the precision (SPEC PRC-2)."""

    def state(self) -> Mapping[str, Array]:
        """Return the state of training (:meth:`TrainingSession.state`)."""


@dataclass(frozen=True)
class Implementation:
    """One way in which a backend computes the model.

    Attributes:
        parts: builds each part (:data:`concord.spec.tensors.PARTS`) from a configuration.
        unsupported_reasons: returns a line for each option that prevents a request.
        not_exposed: patterns of taps that it does not expose.
        known_deviations: declarations besides the backend's own, by kind of device (SPEC PRC-4).
        context: the context to compute a request in, for example the choice of a kernel.
        finish: turns a model with weights into the one that runs, for example with weights in a kernel's own
            layout.
    """

    parts: Mapping[str, Callable[..., Any]]
    unsupported_reasons: Callable[[Request], list[str]] = lambda request: []
    not_exposed: tuple[str, ...] = ()
    known_deviations: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    context: Callable[[Request], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[Any], Any] | None = None


def variety(implementation: str, execution: str) -> str:
    """Return the name under which a backend lists an implementation; unpadded ones have their own."""
    return implementation + (f" {UNPADDED}" if execution.startswith(UNPADDED) else "")


def refuse_tf32(backend: str, request: Request, able: bool) -> None:
    """Refuse TF32 products where the device has none (SPEC PRC-3)."""
    if request.precision != "tf32" or request.dtype != "float32":
        return
    if not able:
        raise Unsupported(
            f"{backend} has no TF32 products on {request.device}: tensor cores of NVIDIA GPUs from compute "
            "capability 8.0 on compute them"
        )
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise Unsupported(
            f"{backend} has no TF32 products here: NVIDIA_TF32_OVERRIDE=0 in its environment switches them "
            "off"
        )


@contextmanager
def refusing_nondeterminism(backend: str, request: Request) -> Iterator[None]:
    """Turn a framework's report of a missing deterministic kernel into a refusal (SPEC PRC-3)."""
    try:
        yield
    except Exception as error:
        message = first_line(error)
        if not request.deterministic or "determinis" not in message.lower():
            raise
        raise Unsupported(f"{backend} has no deterministic kernel for it: {message}") from error


class Backend(Protocol):
    """A backend in its worker process, constructed without arguments."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Return JSON data about itself: ``version``, ``devices``, ``dtypes``, ``threads`` and more.

        ``precision_defaults`` are the switches at import; its ``products`` says for each kind of device
        whether float32 products are then ``"float32"`` or ``"tf32"``.
        """

    def run(self, request: Request) -> Run:
        """Compute a request.

        Raises:
            Unsupported: if it cannot; it must never compute something else.
        """


class TrainingSession(Protocol):
    """A model and its optimizer state, trained step by step (SPEC, section 10)."""

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Resume after a number of steps, with the bits of uninterrupted training.

        Args:
            state: ``parameters.<canonical name>`` and ``<moment>.<canonical name>``
                (:func:`concord.spec.training.reference_optimizer.moments`), in the stored dtype or a wider
                one; missing ones are as at the start.
        """

    def step(self, batches: Sequence[Batch], report: bool = False) -> Mapping[str, Array]:
        """Make the next step from batches of any shapes.

        Known shapes cause no new compilation.

        Returns:
            ``losses.<number>`` of each batch, and the clipping ``norm``, if any; with ``report``, all names
                of :data:`concord.spec.training.trajectory.Observer`.
        """

    def predict(self, batch: Batch) -> Array:
        """Return the output (B, C) without dropout; labels are ignored."""

    def state(self) -> Mapping[str, Array]:
        """Return a copy of the state, as :meth:`load` takes it."""

    def info(self) -> dict[str, Any]:
        """Return the session's description (:attr:`Run.info`)."""


class Trainable(Backend, Protocol):
    """A backend with training sessions."""

    def train(self, request: Request) -> TrainingSession:
        """Start training from the request's weights; the steps in ``request.training`` are ignored."""


Trace = Callable[[Any, Mapping[str, Any], Callable[[str, Any], Any]], Callable[[str, Any], Any]]
"""From a model, its inputs and the recording tap to the tap that the layers call."""


class Measurable(Backend, Protocol):
    """A backend with sessions, whose speed can be measured."""

    def session(self, request: Request) -> Session:
        """Build a request's model, to run it many times."""

    def product(self, left: Array, right: Array, dtype: str, device: str, precision: str) -> Steps:
        """Return the product of matrices (M, K) and (K, N), which measures the machine."""

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the most bytes that the framework has held on a device.

        Args:
            reset: whether to start over, if possible.
        """

    def event(self) -> Any:
        """Return a device event with ``record()`` and ``elapsed_time(later)`` in ms, or None."""
