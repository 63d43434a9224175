"""What the sessions of the four frameworks share.

A model and its inputs on a device, and what is read off them. No framework is called here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import (
    UNPADDED,
    Overruled,
    Request,
    Run,
    Unsupported,
    refuse_tf32,
    refusing_nondeterminism,
)
from concord.backends.library_support import indices
from concord.backends.taps import DROPOUT, TARGETS, Observation, Tensor, attach
from concord.backends.trainer import Prepared, Trainer
from concord.backends.wire import split_gradients
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch
from concord.spec.parameters import Weights
from concord.spec.tensors import taps

ASKED = ("device", "implementation", "execution", "precision", "deterministic")
"""Settings that a run repeats, so that nobody has to take them on trust (SPEC PRC-3)."""


class FrameworkSession:
    """A session of a backend (:class:`concord.backends.interface.Session`).

    Args:
        adapter: the backend.
        request: what is computed, how, and what :meth:`read` returns.

    Attributes:
        model: the framework's model.
        inputs: by name, on the device.
        step_inputs: what a training step is given of them, once one has been made.
        computed: what the last step computed, by name.
        captured: whether kernels of a step are captured as a graph.
    """

    model: Any
    captured = False
    step_inputs: Prepared | None

    def __init__(self, adapter: FrameworkAdapter, request: Request) -> None:
        self.adapter, self.request = adapter, request
        self.implementation = adapter.implementation(request)
        self.device = adapter.device(request.device)
        refuse_tf32(adapter.name, request, adapter.has_tf32(self.device))
        adapter.set_precision(request.precision)
        adapter.set_determinism(request.deterministic)
        self.compiled = request.execution.endswith("compiled")
        training = adapter.training
        loss = training.ClassificationLoss if request.part == "model" else training.CotangentLoss
        self.loss_function = loss(request.config)
        self.trace = adapter.trace(request)
        self.hidden = {  # without padding they have other shapes
            name
            for name in taps(request.config, request.part)
            if request.execution.startswith(UNPADDED)
            and any(fnmatchcase(name, pattern) for pattern in self.implementation.not_exposed)
        }
        self.computed: dict[str, Tensor] = {}
        with adapter.within(request):
            model = adapter.build(request, self.device)
            self.model = self.implementation.finish(model) if self.implementation.finish else model
            self.prepare()
        self.feed(request.batch)
        if request.training:
            _ = self.trainer  # a part of what is built

    def feed(self, batch: Batch) -> None:
        """Take other inputs, of the same shapes."""
        self.request = replace(self.request, batch=batch)
        self.inputs, self.step_inputs = self.fed(batch), None

    def fed(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the model and its loss are given of a batch, on the device."""
        arrays = {**batch.arrays(), **indices(replace(self.request, batch=batch))}
        return {name: self.tensor(array) for name, array in arrays.items()}

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array on the device, numbers in the precision of the run."""
        return self.adapter.tensor(array, self.request.dtype, self.device)

    def fill(self, weights: Weights) -> None:
        """Put other weights in place of those that it has.

        Raises:
            Unsupported: where they are kept in a layout of a kernel's own.
        """
        if self.implementation.finish:
            raise Unsupported(
                f"{self.adapter.name} keeps weights in a layout of a kernel's own in its implementation "
                f"{self.request.implementation!r}"
            )
        self.request = replace(self.request, weights=weights)
        with self.context():
            model = self.model
            self.adapter.load(model, self.request.config, weights, self.request.part)
            self.model = model

    def step(self) -> None:
        """Start one training step where the request says how to train, else one forward pass."""
        with self.context():
            if self.request.training:
                self.computed = {"loss": self.trainer.start(self.prepared())["losses.0"]}
            else:
                self.computed = {"logits": self.inferring(*self.operands)}

    def results(self) -> Arrays:
        """Return what the last step computed: the logits (B, C), or the loss before an update."""
        return {name: self.adapter.to_numpy(tensor) for name, tensor in self.computed.items()}

    def state(self) -> Arrays:
        """Return where training stands."""
        return self.trainer.state()

    def compile(self) -> None:
        """Do ahead of the first step what can be done ahead of it."""
        with self.context():
            _ = self.trainer.ready(self.prepared()) if self.request.training else self.inferring

    def prepared(self) -> Prepared:
        """Return what a training step is given of the inputs.

        Made when they are new, and where each step drops other elements.
        """
        if self.step_inputs is None or self.trainer.sites:
            self.step_inputs = self.trainer.prepared([self.request.batch])
        return self.step_inputs

    @cached_property
    def inferring(self) -> Callable[..., Any]:
        """What computes logits in steps."""
        return self.traced(self.infer, *self.operands)

    @property
    def operands(self) -> tuple[Any, ...]:
        """What a step is given."""
        return (*self.held, self.inputs)

    @property
    def held(self) -> tuple[Any, Any]:
        """What a step of training is given of the model, its parameters and the rest.

        Where it does not hold them itself.
        """
        return (), ()

    def model_of(self, state: Any, fixed: Any) -> Any:
        """Return the model of what a step is given."""
        return self.model

    def held_by(self, model: Any) -> Any:
        """Return what a step leaves of the model, where that does not hold its parameters itself."""
        return ()

    def hold(self, state: Any) -> None:
        """Take what a step left of the model."""

    def number(self, value: float) -> Any:
        """Return a number that a step is given: a tensor, where whole steps are compiled."""
        return value

    def forget(self) -> None:
        """Let go of what was compiled and is not used any more, where a framework keeps it."""

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self.adapter.synchronize(next(iter(self.computed.values()), None))

    def read(self) -> Run:
        """Compute what the request asks for; nothing is updated."""
        adapter, request, to_numpy = self.adapter, self.request, self.adapter.to_numpy
        zeros = {name: self.tensor(array) for name, array in request.zeros().items()}
        with self.context():
            observed = self.traced(self.observe, *self.operands, zeros)(*self.operands, zeros)
        gradients, tap_gradients = split_gradients(
            {
                name: to_numpy(gradient)
                for name, gradient in observed.gradients.items()
                if name.startswith(("inputs.", "taps."))
            }
        )
        gradients = adapter.export(observed.gradients, request.config, request.part) | gradients
        taps = {name: to_numpy(tensor) for name, tensor in observed.taps.items()} if request.taps else {}
        self.confirm()
        return Run(
            to_numpy(observed.output),
            to_numpy(observed.loss),
            taps,
            gradients,
            adapter.name,
            request.dtype,
            self.info(),
            tap_gradients=tap_gradients,
        )

    def confirm(self) -> None:
        """Make sure that nothing has reset a switch meanwhile (SPEC PRC-3).

        Raises:
            Overruled: naming every switch that is not as it was set.
        """
        switches = self.adapter.read_switches()
        changed = [
            f"{name} is {switches.get(name)!r} but was set to {value!r}"
            for name, value in self.adapter.wanted(self.request).items()
            if switches.get(name) != value
        ]
        if changed:
            raise Overruled(
                f"{self.adapter.name} did not compute as it was asked to: after the run "
                f"{'; '.join(changed)} [clause=PRC-3]"
            )

    def evaluate(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        zeros: Mapping[str, Tensor],
        recorded: bool,
        with_loss: bool = True,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return output, the loss if it is asked for, and if they are recorded all activations.

        Compilers may trace it.

        Args:
            zeros: by activation; what has its gradient, for it is added to it.
        """
        # JAX's transformations would return a dict in alphabetical order.
        activations: dict[str, Tensor] = OrderedDict()

        def record(name: str, tensor: Tensor) -> Tensor:
            # What only a faulty model has is of another shape, and stays alone.
            if name in zeros and zeros[name].shape == tensor.shape:
                tensor = tensor + zeros[name]
            if recorded:
                activations[name] = tensor
            return tensor

        tapped = [*self.adapter.layers(model), ("", self.loss_function)]
        attach(tapped, self.trace(model, inputs, record), self.hidden)
        arguments = {
            name: tensor
            for name, tensor in inputs.items()
            if name not in TARGETS and not name.startswith(DROPOUT)
        }
        output = self.adapter.call(model, arguments)
        loss = self.loss_function(model, output, inputs) if with_loss else None
        attach(tapped, lambda name, tensor: tensor)  # what was recorded is let go
        return output, loss, activations

    @cached_property
    def trainer(self) -> Trainer:
        """What trains the model as the request says."""
        return self.adapter.trainer(self)

    def info(self) -> dict[str, Any]:
        """Return what a run says of itself."""
        kind = self.request.device.split(":")[0]
        about = {name: getattr(self.request, name) for name in ASKED} | self.adapter.describe()
        about["deviations"] = [
            *self.adapter.known_deviations[kind],
            *self.implementation.known_deviations.get(kind, []),
        ]
        return about | {"not_exposed": list(self.implementation.not_exposed)}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Do what a block does as the request and its implementation say."""
        with (
            refusing_nondeterminism(self.adapter.name, self.request),
            self.adapter.within(self.request),
            self.implementation.context(self.request),
        ):
            yield

    def prepare(self) -> None:
        """Do once what a framework needs before it compiles."""

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step, compiled for its operands if that is asked for and the framework compiles steps.

        Args:
            replaced: which of what it is given is not used any more afterwards: results may take its place.
        """
        return function

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return what evaluates the model.

        (:meth:`evaluate`), compiled if that is asked for and the framework does not compile whole steps.
        """
        return self.evaluate

    @cached_property
    def evaluating(self) -> Callable[..., Any]:
        """What evaluates the model in steps."""
        return self.evaluation(self.captured)

    def infer(self, held: Any, fixed: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, C)."""
        with self.adapter.without_gradients():
            return self.evaluating(self.model_of(held, fixed), inputs, {}, False, False)[0]

    def observe(
        self, held: Any, fixed: Any, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]
    ) -> Observation:
        """Return output, loss and every activation, and gradients if they are asked for.

        Args:
            zeros: in the shape of each activation whose gradient is asked for; added to it, they have the
                same gradient.
        """
        model, evaluate = self.model_of(held, fixed), self.evaluation(captured=False)
        if self.request.gradients:
            observed: Observation = self.adapter.training.differentiate(
                evaluate, model, self.request.part, inputs, zeros, True
            )
            return observed
        with self.adapter.without_gradients():
            output, loss, recorded = evaluate(model, inputs, {}, True)
        return Observation(output, loss, recorded, {})
