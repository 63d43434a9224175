"""What a backend is: the protocol that the four keep, and that anyone else's may (docs/guides/joining.md)."""

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
"""``explicit``: written out as the sources write it. ``library``: out of the framework's own layers and fused
kernels."""

UNPADDED = "unpadded"

EXECUTIONS = ("eager", "compiled", UNPADDED, f"{UNPADDED}-compiled")
"""``eager``: operation by operation. ``compiled``: through the framework's compiler. ``unpadded``,
``unpadded-compiled``: the same without the rows of padded tokens
(:mod:`concord.backends.library_support`), library layers alone."""

PRECISION_MODES = ("strict", "tf32", "default")
"""How products of float32 numbers are computed. ``strict``: in full float32, whatever the framework does
unasked. ``tf32``: from factors of 11 bits, as tensor cores do (SPEC PRC-1). ``default``: as the framework
does if nobody says anything."""

WORKLOAD_KINDS = ("inference", "training")
"""``inference``: the forward pass. ``training``: forward, loss, gradients and the update of an optimizer."""


class Overruled(RuntimeError):
    """Something else has set a switch that a run had set.

    What came out was not computed as it was asked for.
    """


class Unsupported(RuntimeError):
    """The backend cannot do what was asked, and says so instead of doing something else (SPEC PRC-3)."""


@dataclass(frozen=True)
class Problem:
    """What is computed.

    Attributes:
        config: the member of the model family.
        weights: canonical name to array of any floating dtype, linear weights as (in, out); a backend rounds
            to its precision once (SPEC WGT-1, WGT-2, PRC-2).
        batch: the inputs of the part (SPEC INP-1).
        part: one of :data:`concord.spec.tensors.PARTS` (SPEC PRT-1).
    """

    config: EncoderConfig
    weights: Weights
    batch: Batch
    part: str = "model"


@dataclass(frozen=True)
class Settings:
    """How it is computed.

    Attributes:
        dtype: the precision of the run: ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"`` (SPEC
            PRC-1).
        implementation: one of :data:`IMPLEMENTATIONS`, or a name with a colon: one of the backend's own.
        execution: one of :data:`EXECUTIONS`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: one of :data:`PRECISION_MODES`. It is for float32: other precisions multiply in their own.
        deterministic: whether only kernels may run that give the same bits each time.
    """

    dtype: str = "float32"
    implementation: str = "explicit"
    execution: str = "eager"
    device: str = "cpu"
    precision: str = "strict"
    deterministic: bool = False


@dataclass(frozen=True)
class Request(Settings, Problem):
    """One run that a backend is asked for.

    A problem, how to compute it, and what to return besides output and loss.

    Attributes:
        taps: whether to return every intermediate tensor.
        gradients: whether to return the gradient of the loss for every trainable parameter.
        tap_gradients: whether to return the gradient of the loss by every tap too, beside ``gradients``.
        training: how to train the model instead, for a backend that is :class:`Trainable`.
    """

    taps: bool = True
    gradients: bool = True
    tap_gradients: bool = False
    training: Training | None = None

    def zeros(self) -> Arrays:
        """Return zeros in the shape of each tap whose gradient is asked for.

        Added to it, they have the same gradient.
        """
        if not self.tap_gradients:
            return {}
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
            where: context for the messages, for example ``"backend=torch"``.

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
    """What a backend computed: NumPy arrays in the precision of the run (SPEC PRC-2, PRC-3).

    bfloat16 and float16 come as float32 arrays that hold the same values.

    Attributes:
        output: the result of the part: logits (B, C) of the whole model, the pooled vector (B, D), (B, T, D)
            of encoder and stack, (B, Q, D) of the attention parts; of training, the last loss.
        loss: scalar, of rank 0 (SPEC LOS-2, LOS-5). Where no gradients were asked for, it may be None.
        taps: intermediate tensors by the names, and in the shapes, of :func:`concord.spec.tensors.taps`.
            Those that are left out are not judged.
        gradients: of the loss, by parameter name and in the parameter's shape, and ``inputs.<name>`` for
            given tensors (SPEC GRD-1, GRD-5).
        backend: the name of the backend.
        dtype: the precision it ran in.
        info: what it ran on: versions, device, threads, and ``precision``, ``deterministic`` and
            ``precision_switches`` as they were when it was done. ``not_exposed`` may list patterns of
            tap names that a fused implementation does not expose.
        requested: what was asked for besides output and loss; set by whoever asked, so that nothing can be
            left out unnoticed.
        tap_gradients: of the loss, by the name of the tap: of its total use, in its shape (SPEC GRD-6). Only
            taps that the loss depends on; None counts as left out.
        steps: what is reported of training, as ``steps.<step>.<name>``
            (:data:`concord.spec.training.trajectory.Observer`).
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
        """The output under the name that it has in the whole model."""
        return self.output

    def results(self, output: str) -> Arrays:
        """Return output and loss by the names of their taps.

        Args:
            output: that of the output (:func:`concord.spec.tensors.output_name`).
        """
        return {output: self.output} | ({} if self.loss is None else {"loss": self.loss})


class Steps(Protocol):
    """Something that runs many times. Steps may run on after they have started."""

    def compile(self) -> None:
        """Do ahead of the first step what can be done ahead of it."""

    def step(self) -> None:
        """Start one step."""

    def synchronize(self) -> None:
        """Wait until the device is done."""

    def results(self) -> Arrays:
        """Return what the last step computed.

        ``logits`` (B, C), the ``loss`` before an update, or a bare ``product``.
        """


class Session(Steps, Protocol):
    """A model that is built once, with its weights and inputs on a device, and stepped any number of times.

    A step is a training step where the request says how to train (:attr:`Request.training`; SPEC, section
    10), else a forward pass. A session takes its inputs from :meth:`feed`, never from the steps of training.
    """

    def feed(self, batch: Batch) -> None:
        """Take other inputs, of the same shapes and already rounded to the precision (SPEC PRC-2)."""

    def state(self) -> Mapping[str, Array]:
        """Return where training stands (:meth:`TrainingSession.state`)."""


@dataclass(frozen=True)
class Implementation:
    """One way in which a backend computes the model.

    Attributes:
        parts: what builds each part (:data:`spec.PARTS`) from a configuration.
        unsupported_reasons: says what keeps a request from being computed so, one line for each option;
            nothing: it can be.
        not_exposed: patterns of the names of taps that it does not expose.
        known_deviations: what it declares besides the backend's own (SPEC PRC-4), for each kind of device.
        context: what a request is computed within, for example the choice of a kernel.
        finish: turns a model that has its weights into what runs, for example with weights in a layout of a
            kernel's own.
    """

    parts: Mapping[str, Callable[..., Any]]
    unsupported_reasons: Callable[[Request], list[str]] = lambda request: []
    not_exposed: tuple[str, ...] = ()
    known_deviations: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    context: Callable[[Request], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[Any], Any] | None = None


def variety(implementation: str, execution: str) -> str:
    """Return the name under which a backend lists an implementation: without padding it is one of its own."""
    return implementation + (f" {UNPADDED}" if execution.startswith(UNPADDED) else "")


def refuse_tf32(backend: str, request: Request, able: bool) -> None:
    """Refuse products in TF32 where there are none: another arithmetic must not pass for it (SPEC PRC-3).

    Args:
        able: whether the device has tensor cores that compute them.

    Raises:
        Unsupported: with what is in the way.
    """
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
    """Turn a framework's report that it has no deterministic kernel into a refusal (SPEC PRC-3)."""
    try:
        yield
    except Exception as error:
        message = first_line(error)
        if not request.deterministic or "determinis" not in message.lower():
            raise
        raise Unsupported(f"{backend} has no deterministic kernel for it: {message}") from error


class Backend(Protocol):
    """A backend, as it lives in its worker process. It is constructed without arguments.

    Attributes:
        name: what reports call it.
    """

    name: str

    def describe(self) -> dict[str, Any]:
        """Return JSON data about it: ``version``, ``devices``, ``dtypes``, ``threads`` and what else matters.

        ``precision_defaults`` are the switches as they were when the framework was imported; ``products``
        among them says for each kind of device whether float32 products are then in ``"float32"`` or
        ``"tf32"``.
        """

    def run(self, request: Request) -> Run:
        """Compute what is asked.

        Raises:
            Unsupported: if it cannot, with the reason. It must never compute something else instead.
        """


class TrainingSession(Protocol):
    """A model, and what its optimizer keeps, while it is trained step by step (SPEC, section 10)."""

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Go on from where training stood after so many steps, with the bits that going on would have had.

        Args:
            state: ``parameters.<canonical name>`` of all that is trained, and ``<moment>.<canonical name>``
                (:func:`concord.spec.training.reference_optimizer.moments`) in shapes of the
                parameters; those that are missing are as at the start. It may come in the dtype that is
                stored or in a wider one.
        """

    def step(self, batches: Sequence[Batch], report: bool = False) -> Mapping[str, Array]:
        """Make the next step from batches, of any shapes.

        Nothing is built or compiled anew for shapes that were there before.

        Returns:
            ``losses.<number>`` of each batch, and ``norm``, if there is one, by which gradients were clipped.
            To ``report`` is to return all that :data:`concord.spec.training.trajectory.Observer` names.
        """

    def predict(self, batch: Batch) -> Array:
        """Return the output for a batch, logits (B, C), without dropout; its labels mean nothing."""

    def state(self) -> Mapping[str, Array]:
        """Return a copy of where training stands, as :meth:`load` takes it."""

    def info(self) -> dict[str, Any]:
        """Return what a run would say of itself (:attr:`Run.info`)."""


class Trainable(Backend, Protocol):
    """A backend that holds training open."""

    def train(self, request: Request) -> TrainingSession:
        """Begin what ``request.training`` says, at the request's weights; its steps are of no account.

        Raises:
            Unsupported: as :meth:`Backend.run` does.
        """


Trace = Callable[[Any, Mapping[str, Any], Callable[[str, Any], Any]], Callable[[str, Any], Any]]
"""Takes a model, its inputs and the tap that records; returns the tap that the layers call."""


class Measurable(Backend, Protocol):
    """A backend that holds a model in a session, so that its speed can be measured too."""

    def session(self, request: Request) -> Session:
        """Build what is asked for, to be run many times.

        Raises:
            Unsupported: as :meth:`Backend.run` does.
        """

    def product(self, left: Array, right: Array, dtype: str, device: str, precision: str) -> Steps:
        """Return the bare product of two matrices, (M, K) and (K, N), to measure the machine by.

        Args:
            precision: one of :data:`PRECISION_MODES`.
        """

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes that the framework knows to have been held on a device.

        Args:
            reset: whether to forget it, where that can be.
        """

    def event(self) -> Any:
        """Return an event of the device's clock; None if the framework does not give it away.

        It has ``record()``, and ``elapsed_time(later)`` in milliseconds.
        """
