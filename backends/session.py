"""Base class of the four frameworks' sessions, without framework calls."""

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

# Settings that a run reports, for the caller to check (SPEC PRC-3).
ASKED = ("device", "implementation", "execution", "precision", "deterministic")


class FrameworkSession:
    """A :class:`concord.backends.interface.Session`.

    Attributes:
        captured: whether a step's kernels are captured as a graph.
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
        self.hidden = {  # their shapes differ without padding
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
            _ = self.trainer  # build it now, as part of the model

    def feed(self, batch: Batch) -> None:
        """Set inputs of the same shapes."""
        self.request = replace(self.request, batch=batch)
        self.inputs, self.step_inputs = self.fed(batch), None

    def fed(self, batch: Batch) -> dict[str, Tensor]:
        """Move a batch to the device, with indices of unpadded rows."""
        arrays = {**batch.arrays(), **indices(replace(self.request, batch=batch))}
        return {name: self.tensor(array) for name, array in arrays.items()}

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Move an array to the device, with floats in the run's precision."""
        return self.adapter.tensor(array, self.request.dtype, self.device)

    def fill(self, weights: Weights) -> None:
        """Replace the weights.

        Raises:
            Unsupported: if a kernel keeps them in its own layout.
        """
        if self.implementation.finish:
            raise Unsupported(
                f"{self.adapter.name} keeps weights in a kernel-specific layout in its implementation "
                f"{self.request.implementation!r}"
            )
        self.request = replace(self.request, weights=weights)
        with self.context():
            # Read and set again, since in JAX the model is a copy of the session's variables.
            model = self.model
            self.adapter.load(model, self.request.config, weights, self.request.part)
            self.model = model

    def step(self) -> None:
        """Start a training step or a forward pass."""
        with self.context():
            if self.request.training:
                self.computed = {"loss": self.trainer.start(self.prepared())["losses.0"]}
            else:
                self.computed = {"logits": self.inferring(*self.operands)}

    def results(self) -> Arrays:
        """Logits (B, C), or the loss before the update."""
        return {name: self.adapter.to_numpy(tensor) for name, tensor in self.computed.items()}

    def state(self) -> Arrays:
        """State of training."""
        return self.trainer.state()

    def compile(self) -> None:
        """Compile before the first step."""
        with self.context():
            _ = self.trainer.ready(self.prepared()) if self.request.training else self.inferring

    def prepared(self) -> Prepared:
        """Inputs of a training step."""
        # With dropout, every step has its own masks.
        if self.step_inputs is None or self.trainer.sites:
            self.step_inputs = self.trainer.prepared([self.request.batch])
        return self.step_inputs

    @cached_property
    def inferring(self) -> Callable[..., Any]:
        """The program that computes logits."""
        return self.traced(self.infer, *self.operands)

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of a step."""
        return (*self.held, self.inputs)

    @property
    def held(self) -> tuple[Any, Any]:
        """Parameters and other state, if steps take them as operands."""
        return (), ()

    def model_of(self, state: Any, fixed: Any) -> Any:
        """The model for the operands of a step."""
        return self.model

    def held_by(self, model: Any) -> Any:
        """Parameters, if steps return them."""
        return ()

    def hold(self, state: Any) -> None:
        """Store the parameters that a step returned."""

    def number(self, value: float) -> Any:
        """Return a value as an operand: a tensor, if whole steps are compiled."""
        # Overridden where a compiler would embed a constant in the program.
        return value

    def forget(self) -> None:
        """Free compiled programs, if the framework keeps them."""

    def synchronize(self) -> None:
        """Wait for the device."""
        self.adapter.synchronize(next(iter(self.computed.values()), None))

    def read(self) -> Run:
        """Compute all requested results, without an update."""
        adapter, request, to_numpy = self.adapter, self.request, self.adapter.to_numpy
        zeros = {name: self.tensor(array) for name, array in request.zeros().items()}
        with self.context():
            observation = self.traced(self.observe, *self.operands, zeros)(*self.operands, zeros)
        gradients, tap_gradients = split_gradients(
            {
                name: to_numpy(gradient)
                for name, gradient in observation.gradients.items()
                if name.startswith(("inputs.", "taps."))
            }
        )
        gradients = adapter.export(observation.gradients, request.config, request.part) | gradients
        taps = {name: to_numpy(tensor) for name, tensor in observation.taps.items()} if request.taps else {}
        self.confirm()
        return Run(
            to_numpy(observation.output),
            to_numpy(observation.loss),
            taps,
            gradients,
            adapter.name,
            request.dtype,
            self.info(),
            tap_gradients=tap_gradients,
        )

    def confirm(self) -> None:
        """Check that no switch was reset (SPEC PRC-3).

        Raises:
            Overruled: naming every changed switch.
        """
        switches = self.adapter.read_switches()
        problems = [
            f"{name} is {switches.get(name)!r} but was set to {value!r}"
            for name, value in self.adapter.wanted(self.request).items()
            if switches.get(name) != value
        ]
        if problems:
            raise Overruled(
                f"{self.adapter.name} did not compute as requested: after the run {'; '.join(problems)} "
                "[clause=PRC-3]"
            )

    def evaluate(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        zeros: Mapping[str, Tensor],
        recorded: bool,
        with_loss: bool = True,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Output, loss and activations; compilers trace this.

        Args:
            zeros: zeros added to activations, to receive their gradients.
        """
        # JAX's transformations return a dict in alphabetical order.
        activations: dict[str, Tensor] = OrderedDict()

        def record(name: str, tensor: Tensor) -> Tensor:
            # An injected bug may change an activation's shape, so that zeros no longer fit it.
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
        attach(tapped, lambda name, tensor: tensor)  # the closure refers to every activation
        return output, loss, activations

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer of the request."""
        return self.adapter.trainer(self)

    def info(self) -> dict[str, Any]:
        """See :attr:`concord.backends.interface.Run.info`."""
        kind = self.request.device.split(":")[0]
        info = {name: getattr(self.request, name) for name in ASKED} | self.adapter.describe()
        info["deviations"] = [
            *self.adapter.known_deviations[kind],
            *self.implementation.known_deviations.get(kind, []),
        ]
        return info | {"not_exposed": list(self.implementation.not_exposed)}

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the contexts of the request and its implementation."""
        with (
            refusing_nondeterminism(self.adapter.name, self.request),
            self.adapter.within(self.request),
            self.implementation.context(self.request),
        ):
            yield

    def prepare(self) -> None:
        """Set up the framework before it compiles."""

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Compile a step, if requested and the framework compiles whole steps.

        Args:
            replaced: indices of the operands whose memory the results may reuse.
        """
        return function

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return :meth:`evaluate`, compiled if requested, unless whole steps are compiled."""
        return self.evaluate

    @cached_property
    def evaluating(self) -> Callable[..., Any]:
        """The :meth:`evaluation` of training and inference steps."""
        return self.evaluation(self.captured)

    def infer(self, weights: Any, fixed: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits (B, C)."""
        with self.adapter.without_gradients():
            return self.evaluating(self.model_of(weights, fixed), inputs, {}, False, False)[0]

    def observe(
        self, weights: Any, fixed: Any, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]
    ) -> Observation:
        """Output, loss, all activations, and gradients if requested."""
        model, evaluate = self.model_of(weights, fixed), self.evaluation(captured=False)
        if self.request.gradients:
            observation: Observation = self.adapter.training.differentiate(
                evaluate, model, self.request.part, inputs, zeros, True
            )
            return observation
        with self.adapter.without_gradients():
            output, loss, activations = evaluate(model, inputs, {}, True)
        return Observation(output, loss, activations, {})
