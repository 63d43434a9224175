"""Base class of the four backends, without framework calls."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
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
    variety,
)
from concord.backends.taps import Tensor
from concord.backends.trainer import Trainer
from concord.backends.weights import NAMINGS
from concord.spec.arrays import Array, Arrays
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters
from concord.spec.precision import PRECISIONS

Device = Any


class FrameworkAdapter(ABC):
    """A backend on a framework (:class:`concord.backends.interface.Backend`).

    Attributes:
        dtypes: supported dtypes by kind of device.
        thread_switches: environment variables for the number of threads.
        known_deviations: declarations by kind of device (SPEC PRC-4).
        precisions: switches of ``strict`` and ``tf32``, matrix products first.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    dtypes: ClassVar[Mapping[str, list[str]]] = {kind: list(PRECISIONS) for kind in ("cpu", "cuda")}
    thread_switches: ClassVar[tuple[str, ...]]
    implementations: ClassVar[Mapping[str, Implementation]]
    known_deviations: ClassVar[Mapping[str, list[dict[str, Any]]]]
    precisions: ClassVar[Mapping[str, Mapping[str, Any]]]
    determinism: ClassVar[Mapping[str, Any]]
    session_type: ClassVar[Callable[..., Any]]
    trainer: Callable[..., Trainer] = Trainer
    training: ModuleType
    optimizers: ModuleType

    def __init__(self) -> None:
        # Recorded before any switch is set: later, the framework's defaults cannot be read.
        self.naming, self.defaults = NAMINGS[self.name], self.read_switches()

    def describe(self) -> dict[str, Any]:
        """Describe versions, devices, threads and switches."""
        products, full = next(iter(self.precisions["strict"].items()))
        on_gpus = "float32" if self.defaults[products] == full else "tf32"
        devices = ["cpu", *(f"cuda:{i}" for i in range(self.cuda_devices()))]
        return {
            "version": self.version,
            "devices": devices,
            "dtypes": self.dtypes if len(devices) > 1 else {"cpu": self.dtypes["cpu"]},
            "threads": self.threads(),
            "thread_switches": {name: os.environ.get(name) for name in self.thread_switches},
            "deviations": self.known_deviations,
            "implementations": list(self.implementations),
            "implementation_deviations": {
                name: dict(entry.known_deviations)
                for name, entry in self.implementations.items()
                if entry.known_deviations
            },
            "precision_switches": self.read_switches(),
            "precision_defaults": {**self.defaults, "products": {"cpu": "float32", "cuda": on_gpus}},
        }

    def run(self, request: Request) -> Run:
        """See :meth:`concord.backends.interface.Backend.run`."""
        run: Run = self.session_type(self, request).read()
        return run

    def session(self, request: Request) -> Session:
        """See :meth:`concord.backends.interface.Measurable.session`."""
        session: Session = self.session_type(self, request)
        return session

    def train(self, request: Request) -> TrainingSession:
        """See :meth:`concord.backends.interface.Trainable.train`."""
        session: TrainingSession = self.session_type(self, request).trainer
        return session

    def implementation(self, request: Request) -> Implementation:
        """The implementation for a request.

        Raises:
            Unsupported: if there is none, or listing the reasons against the request.
        """
        label = f"implementation {request.implementation!r}"
        if request.implementation not in self.implementations:
            raise Unsupported(f"{self.name} has no {label}")
        name = variety(request.implementation, request.execution)
        if name not in self.implementations:
            raise Unsupported(
                f"{self.name} computes padding rows in its {label}; 'library' can leave them out"
            )
        implementation = self.implementations[name]
        if reasons := implementation.unsupported_reasons(request):
            raise Unsupported(
                f"{self.name} cannot express this with its library layers: {'; '.join(reasons)}"
            )
        if request.part not in implementation.parts:
            raise Unsupported(f"{self.name} has no part {request.part!r} in its {label}")
        return implementation

    def trace(self, request: Request) -> Trace:
        """Return a function that makes the layers' tap from the recording one; compilers trace it, mutants
        override it.
        """
        return lambda model, inputs, record: record

    def product(self, left: Array, right: Array, dtype: str, device: str, precision: str) -> Steps:
        """See :meth:`concord.backends.interface.Measurable.product`."""
        place = self.device(device)
        self.set_precision(precision)
        return Product(self, self.tensor(left, dtype, place), self.tensor(right, dtype, place))

    def build(self, request: Request, device: Device) -> Any:
        """Build a part with its weights."""
        model = self.construct(self.implementation(request).parts[request.part], request, device)
        self.load(model, request.config, request.weights, request.part)
        return model

    def parameters(self, model: Any, request: Request) -> Weights:
        """Parameters by canonical name."""
        exported = self.export(self.training.named(model), request.config, request.part)
        return {
            # Copies, since the next step may change an array in the framework's own memory.
            name: np.array(array)
            for name, array in exported.items()
        }

    def device(self, name: str) -> Device:
        """Return a device by name.

        Raises:
            Unsupported: if there is none.
        """
        kind, _, index = name.partition(":")
        if kind == "cuda" and int(index or 0) >= self.cuda_devices():
            raise Unsupported(
                f"{self.name} {self.version} sees {self.cuda_devices()} CUDA devices; {name!r} is not among "
                "them"
            )
        return self.place(kind, int(index or 0))

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Enter a request's context, such as its device."""
        yield

    def precision(self, mode: str) -> dict[str, Any]:
        """Switches of a precision mode."""
        return (
            {name: self.defaults[name] for name in self.precisions["strict"]}
            if mode == "default"
            else dict(self.precisions[mode])
        )

    def set_precision(self, mode: str) -> None:
        """Set a mode of :data:`concord.backends.interface.PRECISION_MODES`."""
        self.put_switches(self.precision(mode))

    def wanted(self, request: Request) -> dict[str, Any]:
        """Switch values required throughout a run (SPEC PRC-3)."""
        return {**self.precision(request.precision), **(self.determinism if request.deterministic else {})}

    def relaid(self, array: NDArray[Any], kind: str) -> NDArray[Any]:
        """Convert between canonical and native layout, in either direction."""
        return array.T if self.naming.transposed and kind == "kernel" else array

    def load(self, model: Any, config: EncoderConfig, weights: Weights, part: str) -> None:
        """Copy canonical weights into a model, rounded once (SPEC PRC-2, WGT-4)."""
        variables = self.training.named(model)
        for name, parameter in parameters(config, part).items():
            self.assign(
                variables[self.naming.native_name(name, parameter.kind)],
                np.ascontiguousarray(self.relaid(weights[name], parameter.kind)),
            )

    def export(self, named: Mapping[str, Tensor], config: EncoderConfig, part: str) -> Arrays:
        """Convert native parameters or gradients to canonical arrays."""
        arrays = {}
        for name, parameter in parameters(config, part).items():
            native = self.naming.native_name(name, parameter.kind)
            if native in named:
                arrays[name] = np.ascontiguousarray(self.relaid(self.to_numpy(named[native]), parameter.kind))
        return arrays

    def call(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Call a model with inputs by name."""
        return model(**inputs)

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context without gradients."""
        return nullcontext()

    # Framework calls.

    @abstractmethod
    def cuda_devices(self) -> int:
        """Count visible CUDA devices."""

    @abstractmethod
    def threads(self) -> int:
        """Count CPU threads."""

    @abstractmethod
    def place(self, kind: str, index: int) -> Device:
        """Return a device of kind ``"cpu"`` or ``"cuda"``."""

    @abstractmethod
    def construct(self, part: Callable[..., Any], request: Request, device: Device) -> Any:
        """Build a part in the request's dtype, without weights."""

    @abstractmethod
    def tensor(self, array: NDArray[Any], dtype: str, device: Device) -> Tensor:
        """Return an input tensor: floats in ``dtype``, ids in int64, masks in bool."""

    @abstractmethod
    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """See :meth:`concord.backends.interface.Measurable.peak_memory`."""

    @abstractmethod
    def event(self) -> Any:
        """See :meth:`concord.backends.interface.Measurable.event`."""

    @abstractmethod
    def layers(self, model: Any) -> Iterable[tuple[str, Any]]:
        """Return a model and its layers by paths such as ``layers.0.attention``."""

    @abstractmethod
    def synchronize(self, computed: Any) -> None:
        """Wait for tensors."""

    @abstractmethod
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Start a product of (M, K) and (K, N)."""

    @abstractmethod
    def read_switches(self) -> dict[str, Any]:
        """Read every switch, including environment variables."""

    @abstractmethod
    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        """Set the switches of a precision."""

    @abstractmethod
    def set_determinism(self, on: bool) -> None:
        """Allow only deterministic kernels, or all."""

    @abstractmethod
    def has_tf32(self, device: Any) -> bool:
        """Whether a device has TF32 tensor cores."""

    @abstractmethod
    def assign(self, parameter: Tensor, array: NDArray[Any]) -> None:
        """Copy a native array into a parameter, rounding once."""

    @abstractmethod
    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Convert to NumPy, and half precisions exactly to float32."""


class Product:
    """A product of (M, K) and (K, N) (:class:`concord.backends.interface.Steps`)."""

    def __init__(self, adapter: FrameworkAdapter, left: Tensor, right: Tensor) -> None:
        self.adapter, self.left, self.right = adapter, left, right
        self.product: Tensor | None = None

    def step(self) -> None:
        """Start one product."""
        self.product = self.adapter.multiply(self.left, self.right)

    def synchronize(self) -> None:
        """Wait for the device."""
        self.adapter.synchronize(self.product)
