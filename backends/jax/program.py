"""Programs: a model that is built once and run many times, and a bare matrix product to measure it by.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from backends.interface import LEARNING_RATE, Program
from backends.jax import weights
from backends.jax.layers import silent
from backends.jax.model import Inputs
from backends.programs import mean_seconds
from spec.config import EncoderConfig
from spec.parameters import Weights

OPTIONS = {"xla_allow_excess_precision": False}

Context = Callable[[], AbstractContextManager[None]]


def predict(model: nnx.Module, inputs: Inputs) -> Array:
    return model(inputs, silent)


def evaluate(model: nnx.Module, loss_function: Callable[..., Array], inputs: Inputs) -> Array:
    return loss_function(model, model(inputs, silent), inputs, silent)


def timed(program: Program, steps: int) -> list[float]:
    """Return the mean seconds of steps that are started one after another: JAX does not give the device's clock away."""
    return mean_seconds(program, steps)


class Inference:
    """The forward pass, again and again (:class:`backends.interface.Program`): (B, T) to (B, C)."""

    def __init__(
        self, model: nnx.Module, loss_function: Callable[..., Array], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.graph, self.state = nnx.split(model)
        self.inputs = inputs
        self.config = config
        self.context = context
        self.output: Array | None = None
        self.compiled = compiled
        self.forward: Callable[..., Array] = self.infer

    def infer(self, state: nnx.State, inputs: Inputs) -> Array:
        return predict(nnx.merge(self.graph, state), inputs)

    def compile(self) -> None:
        """Compile ahead of the first step."""
        if self.compiled:
            with self.context():
                self.forward = jax.jit(self.infer).lower(self.state, self.inputs).compile(compiler_options=OPTIONS)

    def step(self) -> None:
        """Start one forward pass."""
        with self.context():
            self.output = self.forward(self.state, self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        jax.block_until_ready(self.output)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the logits (B, C)."""
        return {"logits": weights.to_numpy(self.output)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        named = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(self.state)}
        return weights.export(named, self.config, "model")


class Training:
    """Training steps by gradient descent, one after another (:class:`backends.interface.Program`): (B, T) to a scalar."""

    def __init__(
        self, model: nnx.Module, loss_function: Callable[..., Array], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.graph, self.state, self.fixed = nnx.split(model, nnx.Param, ...)
        self.loss_function = loss_function
        self.inputs = inputs
        self.config = config
        self.context = context
        self.loss: Array | None = None
        self.compiled = compiled
        self.forward: Callable[..., tuple[Array, nnx.State]] = self.update

    def update(self, state: nnx.State, fixed: nnx.State, inputs: Inputs) -> tuple[Array, nnx.State]:
        def loss_of(state: nnx.State) -> Array:
            return evaluate(nnx.merge(self.graph, state, fixed), self.loss_function, inputs)

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return loss, jax.tree.map(lambda parameter, gradient: parameter - LEARNING_RATE * gradient, state, gradients)

    def compile(self) -> None:
        """Compile ahead of the first step."""
        if self.compiled:
            with self.context():
                lowered = jax.jit(self.update, donate_argnums=0).lower(self.state, self.fixed, self.inputs)
                self.forward = lowered.compile(compiler_options=OPTIONS)

    def step(self) -> None:
        """Start one step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        with self.context():
            self.loss, self.state = self.forward(self.state, self.fixed, self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        jax.block_until_ready((self.loss, self.state))

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the loss before its update."""
        return {"loss": weights.to_numpy(self.loss)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        state = nnx.merge_state(self.state, self.fixed)
        named = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}
        return weights.export(named, self.config, "model")


class Product:
    """A matrix product, again and again (:class:`backends.interface.Program`): (M, K) and (K, N) to (M, N)."""

    def __init__(self, left: Array, right: Array) -> None:
        self.left = left
        self.right = right
        self.product: Array | None = None

    def compile(self) -> None:
        """Do nothing: there is nothing to compile."""

    def step(self) -> None:
        """Start one product."""
        self.product = jnp.matmul(self.left, self.right)

    def wait(self) -> None:
        """Wait until the device is done."""
        jax.block_until_ready(self.product)

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed."""
        return {"product": weights.to_numpy(self.product)}

    def parameters(self) -> Weights:
        """Return nothing: there are no parameters."""
        return {}


PROGRAMS = {"inference": Inference, "training": Training}
