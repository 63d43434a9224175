"""What the backends of the four frameworks share: how a request becomes a session. No framework is called here."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import (
    Implementation,
    Request,
    Run,
    Session,
    Steps,
    Trace,
    TrainingSession,
    Unsupported,
    choose,
)
from concord.backends.optimizers import Optimizer
from concord.backends.switches import FrameworkSwitches
from concord.backends.trainer import Trainer
from concord.backends.weights import FrameworkWeights, Tensor
from concord.spec.parameters import Weights
from concord.spec.training.recipe import Recipe

Device = Any
"""A device of the framework."""


class FrameworkAdapter(ABC):
    """A backend on a framework (:class:`concord.backends.interface.Backend`).

    Attributes:
        name: what reports call it.
        version: of the framework.
        dtypes: what it computes in, for each kind of device.
        thread_switches: the environment variables that say how many threads it has.
        implementations: by name.
        known_deviations: what it declares (SPEC PRC-4), for each kind of device.
        switches: how it computes products.
        weights: where it keeps weights.
        session_type: the class of its sessions.
        trainer: makes of a session what trains its model.
        optimizer: returns what updates parameters, by native name, as a recipe says, given the kind of each.
        multiply: starts a matrix product: (M, K) and (K, N) to (M, N).
        synchronize: waits until what it is given is computed.
        timed: runs so many steps on a device, and returns their seconds (:meth:`concord.backends.interface.Steps.timed`).
    """

    name: ClassVar[str]
    version: ClassVar[str]
    dtypes: ClassVar[Mapping[str, list[str]]]
    thread_switches: ClassVar[tuple[str, ...]]
    implementations: ClassVar[Mapping[str, Implementation]]
    known_deviations: ClassVar[Mapping[str, list[dict[str, Any]]]]
    switches: ClassVar[FrameworkSwitches]
    weights: ClassVar[FrameworkWeights]
    session_type: ClassVar[Callable[..., Any]]
    trainer: Callable[..., Trainer] = Trainer
    optimizer: ClassVar[staticmethod[[Recipe, Mapping[str, Any], Mapping[str, str]], Optimizer]]
    multiply: ClassVar[staticmethod[[Tensor, Tensor], Tensor]]
    synchronize: ClassVar[staticmethod[[Any], None]]
    timed: ClassVar[staticmethod[[Steps, int], list[float]]]

    def describe(self) -> dict[str, Any]:
        """Return versions, devices, dtypes, threads and precision switches."""
        return {
            "version": self.version,
            "devices": ["cpu", *(f"cuda:{i}" for i in range(self.cuda_devices()))],
            "dtypes": self.dtypes,
            "threads": self.threads(),
            "thread_switches": {name: os.environ.get(name) for name in self.thread_switches},
            "deviations": self.known_deviations,
            "implementations": list(self.implementations),
            "implementation_deviations": {
                name: dict(entry.known_deviations)
                for name, entry in self.implementations.items()
                if entry.known_deviations
            },
            "precision_switches": self.switches.read_back(),
            "precision_defaults": self.switches.at_import(),
        }

    def run(self, request: Request) -> Run:
        """Compute what is asked (:meth:`concord.backends.interface.Backend.run`)."""
        return self.session(request).read()

    def session(self, request: Request) -> Session:
        """Build what is asked for, to be run many times (:meth:`concord.backends.interface.Measurable.session`)."""
        found: Session = self.session_type(self, request)
        return found

    def train(self, request: Request) -> TrainingSession:
        """Hold training open (:meth:`concord.backends.interface.Trainable.train`)."""
        found: TrainingSession = self.session_type(self, request).trainer
        return found

    def implementation(self, request: Request) -> Implementation:
        """Return the implementation that a request asks for (:func:`concord.backends.interface.choose`)."""
        return choose(self.name, self.implementations, request)

    def trace(self, request: Request) -> Trace:
        """Return what makes of the tap that records the one that the layers call: they are the same.

        A subclass may return a function whose tap changes what it is given; compilers trace it like the model.
        """
        return lambda model, inputs, record: record

    def product(
        self, left: NDArray[np.floating], right: NDArray[np.floating], dtype: str, device: str, precision: str
    ) -> Steps:
        """Return the product of two matrices (:meth:`concord.backends.interface.Measurable.product`)."""
        place = self.device(device)
        self.switches.set_precision(precision)
        return Product(self, self.tensor(left, dtype, place), self.tensor(right, dtype, place))

    def build(self, request: Request, device: Device) -> Any:
        """Return the part of the model with the weights loaded."""
        model = self.construct(self.implementation(request).parts[request.part], request, device)
        self.weights.load(model, request.config, request.weights, request.part)
        return model

    def round_trip(self, request: Request) -> Weights:
        """Load canonical weights into a model and read them back (SPEC WGT-4)."""
        with self.within(request):
            return self.parameters(self.build(request, self.device(request.device)), request)

    def parameters(self, model: Any, request: Request) -> Weights:
        """Return the parameters of a model by canonical name."""
        found = self.weights.export(self.weights.named(model), request.config, request.part)
        return {
            name: np.array(array) for name, array in found.items()
        }  # what a framework gives may be its own memory, which the next step changes

    def device(self, name: str) -> Device:
        """Return the framework's device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index or 0) >= self.cuda_devices():
            raise Unsupported(
                f"{self.name} {self.version} sees {self.cuda_devices()} CUDA devices; {name!r} is not among them"
            )
        return self.place(kind, int(index or 0))

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Do what a block does in the place and way of a request."""
        yield

    # What each framework does in its own way.

    @abstractmethod
    def cuda_devices(self) -> int:
        """Return the number of CUDA devices that the framework sees."""

    @abstractmethod
    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""

    @abstractmethod
    def place(self, kind: str, index: int) -> Device:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""

    @abstractmethod
    def construct(self, part: Callable[..., Any], request: Request, device: Device) -> Any:
        """Return a part of the model in the dtype of a request, on a device, for weights to be loaded into it."""

    @abstractmethod
    def tensor(self, array: NDArray[Any], dtype: str, device: Device) -> Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""

    @abstractmethod
    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""


class Product:
    """A matrix product, again and again (:class:`concord.backends.interface.Steps`): (M, K) and (K, N) to (M, N)."""

    def __init__(self, adapter: FrameworkAdapter, left: Tensor, right: Tensor) -> None:
        self.adapter, self.left, self.right = adapter, left, right
        self.product: Tensor | None = None

    def compile(self) -> None:
        """Do nothing: there is nothing to compile."""

    def step(self) -> None:
        """Start one product."""
        self.product = self.adapter.multiply(self.left, self.right)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self.adapter.synchronize(self.product)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device that are started one after another."""
        return self.adapter.timed(self, steps)

    def results(self) -> dict[str, NDArray[np.floating]]:
        """Return what the last step computed."""
        return {"product": self.adapter.weights.to_numpy(self.product)}
