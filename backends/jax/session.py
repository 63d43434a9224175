"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.bench import mean_seconds
from concord.backends.interface import LEARNING_RATE, Steps
from concord.backends.jax import weights
from concord.backends.jax.model import Inputs
from concord.backends.jax.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from concord.backends.session import FrameworkSession, Observation
from concord.spec.parameters import Weights

OPTIONS = {"xla_allow_excess_precision": False}
"""Of the compiler: allowed, XLA leaves out roundings to bfloat16 where it fuses steps."""


def synchronize(computed: Any) -> None:
    """Wait until tensors are computed."""
    jax.block_until_ready(computed)


def timed(steps: Steps, count: int) -> list[float]:
    """Return the mean seconds of steps that are started one after another, by the clock of the host: JAX does not give the device's away."""
    return mean_seconds(steps, count)


def multiply(left: Array, right: Array) -> Array:
    """Start a matrix product: (M, K) and (K, N) to (M, N)."""
    return jnp.matmul(left, right)


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)

    def start(self, model: nnx.Module) -> None:
        """Take the model."""
        self.graph, self.state, self.fixed = nnx.split(model, nnx.Param, ...)

    @property
    def model(self) -> nnx.Module:
        """The model as it is now."""
        return nnx.merge(self.graph, self.state, self.fixed)

    @property
    def pending(self) -> Any:
        """What the last step computes."""
        return self.computed, self.state

    def put(self, canonical: Weights) -> None:
        """Copy canonical weights into the model."""
        model = self.model
        weights.load(model, self.request.config, canonical, self.request.part)
        self.start(model)

    def infer(self, state: nnx.State, fixed: nnx.State, inputs: Inputs) -> Array:
        """Return the logits (B, C)."""
        return evaluate(nnx.merge(self.graph, state, fixed), None, inputs, self.trace, {}, False)[0]

    def update(self, state: nnx.State, fixed: nnx.State, inputs: Inputs) -> tuple[Array, nnx.State]:
        """Return the loss before an update by plain gradient descent, and the state after it."""
        _, loss, _, (gradients, _, _) = differentiate(self.graph, state, fixed, self.loss_function, inputs, self.request.part, self.trace, {}, False)
        return loss, jax.tree.map(lambda parameter, gradient: parameter - LEARNING_RATE * gradient, state, gradients)

    def traced(self, function: Callable[..., Any], *given: Any, donated: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Return a function, compiled for what it is given if that is asked for."""
        if not self.compiled:
            return function
        return jax.jit(function, donate_argnums=donated).lower(*given).compile(compiler_options=OPTIONS)

    @functools.cached_property
    def inferring(self) -> Callable[..., Any]:
        """What computes logits in steps."""
        return self.traced(self.infer, self.state, self.fixed, self.inputs)

    @functools.cached_property
    def updating(self) -> Callable[..., Any]:
        """What updates the model in steps."""
        return self.traced(self.update, self.state, self.fixed, self.inputs, donated=(0,))

    def compile(self) -> None:
        """Compile ahead of the first step."""
        with self.context():
            _ = self.updating if self.request.gradients else self.inferring

    def forward(self) -> None:
        """Start one forward pass: (B, T) to (B, C)."""
        with self.context():
            self.computed = {"logits": self.inferring(self.state, self.fixed, self.inputs)}

    def train_step(self) -> None:
        """Start one training step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        with self.context():
            loss, self.state = self.updating(self.state, self.fixed, self.inputs)
        self.computed = {"loss": loss}

    def observe(self, zeros: dict[str, Array]) -> Observation:
        """Compute output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""

        def compute(state: nnx.State, fixed: nnx.State, inputs: Inputs, zeros: dict[str, Array]) -> Observation:
            if self.request.gradients:
                return differentiate(self.graph, state, fixed, self.loss_function, inputs, self.request.part, self.trace, zeros, True)
            return Observation(*evaluate(nnx.merge(self.graph, state, fixed), self.loss_function, inputs, self.trace, {}, True), ())

        given = (self.state, self.fixed, self.inputs, zeros)
        observed = self.traced(compute, *given)(*given)
        return observed._replace(gradients=_named(observed) if self.request.gradients else {})


def _named(observed: Observation) -> dict[str, Array]:
    """Return gradients by native name, and of the taps that were computed."""
    gradients, of_inputs, of_taps = observed.gradients
    named = {".".join(map(str, path)): gradient[...] for path, gradient in nnx.to_flat_state(gradients)}
    named |= {f"inputs.{name}": gradient for name, gradient in of_inputs.items()}
    return named | {f"taps.{name}": of_taps[name] for name in observed.taps if name in of_taps}
