"""What the sessions of the four frameworks share: a model and its inputs on a device, and what is read off them. No framework is called here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from concord.backends.adapter import FrameworkAdapter, Tensor
from concord.backends.interface import Request, Run, Unsupported, confirm_switches, refuse_tf32, refusing_nondeterminism
from concord.backends.packing import indices
from concord.spec.batch import Batch
from concord.spec.parameters import Weights

ASKED = ("device", "implementation", "execution", "precision", "deterministic")
"""Settings that a run repeats, so that nobody has to take them on trust (SPEC PRC-3)."""


class Observation(NamedTuple):
    """What was computed, as the framework's tensors.

    Attributes:
        gradients: of the loss by native name of a parameter, ``inputs.<name>`` and ``taps.<name>``.
    """

    output: Tensor
    loss: Tensor
    taps: dict[str, Tensor]
    gradients: dict[str, Tensor]


class FrameworkSession(ABC):
    """A session of a backend (:class:`concord.backends.interface.Session`).

    Args:
        adapter: the backend.
        request: what is computed, how, and what :meth:`read` returns.

    Attributes:
        model: the framework's model.
        losses: what computes the loss of the whole model, and of the other parts.
        inputs: by name, on the device.
        computed: what the last step computed, by name.
    """

    model: Any
    losses: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]

    def __init__(self, adapter: FrameworkAdapter, request: Request) -> None:
        self.adapter, self.request = adapter, request
        self.implementation = adapter.implementation(request)
        self.device = adapter.device(request.device)
        refuse_tf32(adapter.name, request, adapter.switches.has_tf32(self.device))
        adapter.switches.set_precision(request.precision)
        adapter.switches.set_determinism(request.deterministic)
        self.compiled = request.execution.endswith("compiled")
        self.loss_function = self.losses[request.part != "model"](request.config)
        self.trace = adapter.trace(request)
        self.computed: dict[str, Tensor] = {}
        with adapter.within(request):
            model = adapter.build(request, self.device)
            self.start(self.implementation.finish(model) if self.implementation.finish else model)
        self.feed(request.batch)

    def feed(self, batch: Batch) -> None:
        """Take other inputs, of the same shapes."""
        self.request = replace(self.request, batch=batch)
        given = {**batch.arrays(), **indices(self.request)}
        self.inputs = {name: self.adapter.tensor(array, self.request.dtype, self.device) for name, array in given.items()}

    def load(self, weights: Weights) -> None:
        """Put other weights in place of those that it has.

        Raises:
            Unsupported: where they are kept in a layout of a kernel's own.
        """
        if self.implementation.finish:
            raise Unsupported(f"{self.adapter.name} keeps weights in a layout of a kernel's own in its implementation {self.request.implementation!r}")
        self.request = replace(self.request, weights=weights)
        with self.context():
            self.put(weights)

    def step(self) -> None:
        """Start one training step where gradients are asked for, else one forward pass."""
        self.train_step() if self.request.gradients else self.forward()

    def results(self) -> dict[str, NDArray[np.floating]]:
        """Return what the last step computed: the logits (B, C), or the loss before an update."""
        return {name: self.adapter.weights.to_numpy(tensor) for name, tensor in self.computed.items()}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        return self.adapter.parameters(self.model, self.request)

    @property
    def pending(self) -> Any:
        """What the last step computes."""
        return next(iter(self.computed.values()), None)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self.adapter.synchronize(self.pending)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device that are started one after another."""
        return self.adapter.timed(self, steps)

    def read(self) -> Run:
        """Compute what the request asks for; nothing is updated."""
        adapter, request, to_numpy = self.adapter, self.request, self.adapter.weights.to_numpy
        zeros = {name: adapter.tensor(array, request.dtype, self.device) for name, array in request.zeros().items()}
        with refusing_nondeterminism(adapter.name, request), self.context():
            found = self.observe(zeros)
        gradients = {}
        if request.gradients:
            gradients = adapter.weights.export(found.gradients, request.config, request.part)
            gradients |= {name: to_numpy(gradient) for name, gradient in found.gradients.items() if name.startswith("inputs.")}
        tap_gradients = {name.removeprefix("taps."): to_numpy(gradient) for name, gradient in found.gradients.items() if name.startswith("taps.")}
        taps = {name: to_numpy(tensor) for name, tensor in found.taps.items()} if request.taps else {}
        confirm_switches(adapter.name, adapter.switches.wanted(request), adapter.switches.read_back())
        return Run(to_numpy(found.output), to_numpy(found.loss), taps, gradients, adapter.name, request.dtype, self.info(), tap_gradients=tap_gradients)

    def info(self) -> dict[str, Any]:
        """Return what a run says of itself."""
        kind = self.request.device.split(":")[0]
        said = {name: getattr(self.request, name) for name in ASKED} | self.adapter.describe()
        said["deviations"] = [*self.adapter.deviations[kind], *self.implementation.deviations.get(kind, [])]
        return said | {"undelivered_taps": list(self.implementation.undelivered)}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Do what a block does as the request and its implementation say."""
        with self.adapter.within(self.request), self.implementation.context(self.request):
            yield

    # What each framework does in its own way.

    @abstractmethod
    def start(self, model: Any) -> None:
        """Take the model."""

    @abstractmethod
    def put(self, weights: Weights) -> None:
        """Copy canonical weights into the model."""

    @abstractmethod
    def compile(self) -> None:
        """Do ahead of the first step what can be done ahead of it."""

    @abstractmethod
    def forward(self) -> None:
        """Start one forward pass: (B, T) to (B, C)."""

    @abstractmethod
    def train_step(self) -> None:
        """Start one training step: loss, gradients, and every trained parameter less its gradient times the learning rate."""

    @abstractmethod
    def observe(self, zeros: dict[str, Tensor]) -> Observation:
        """Compute output, loss and every tap, and gradients if they are asked for.

        Args:
            zeros: in the shape of each tap whose gradient is asked for; added to it, they have the same gradient.
        """
