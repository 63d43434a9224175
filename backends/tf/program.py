"""Programs: a model that is built once and run many times, and a bare matrix product to measure it by.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from backends.interface import LEARNING_RATE, Program
from backends.programs import mean_seconds
from backends.tf import weights
from backends.tf.layers import silent
from backends.tf.model import Inputs
from spec.config import EncoderConfig
from spec.parameters import Weights

Context = Callable[[], AbstractContextManager[None]]


def predict(model: layers.Layer, inputs: Inputs) -> Tensor:
    return model(inputs, tap=silent)


def evaluate(model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return loss_function(model, model(inputs, tap=silent), inputs, silent)


def timed(program: Program, steps: int) -> list[float]:
    """Return the mean seconds of steps that are started one after another: TensorFlow does not give the device's clock away."""
    return mean_seconds(program, steps)


class Inference:
    """The forward pass, again and again (:class:`backends.interface.Program`): (B, T) to (B, C)."""

    def __init__(
        self, model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.config = config
        self.context = context
        self.output: Tensor | None = None
        self.compiled = compiled
        self.forward: Callable[[Inputs], Tensor] = self.infer

    def infer(self, inputs: Inputs) -> Tensor:
        return predict(self.model, inputs)

    def compile(self) -> None:
        """Trace ahead of the first step, which compiles."""
        if self.compiled:
            with self.context():
                self.forward = tf.function(self.infer, autograph=False, jit_compile=True).get_concrete_function(self.inputs)

    def step(self) -> None:
        """Start one forward pass."""
        with self.context():
            self.output = self.forward(self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        tf.experimental.async_wait() if self.output is None else self.output.numpy()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the logits (B, C)."""
        return {"logits": weights.to_numpy(self.output)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        return weights.export({variable.path: variable.value for variable in self.model.weights}, self.config, "model")


class Training:
    """Training steps by gradient descent, one after another (:class:`backends.interface.Program`): (B, T) to a scalar."""

    def __init__(
        self, model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model
        self.loss_function = loss_function
        self.inputs = inputs
        self.config = config
        self.context = context
        self.loss: Tensor | None = None
        self.compiled = compiled
        self.forward: Callable[[Inputs], Tensor] = self.update

    def update(self, inputs: Inputs) -> Tensor:
        trained = [variable.value for variable in self.model.trainable_weights]
        with tf.GradientTape(persistent=False, watch_accessed_variables=False) as tape:
            tape.watch(trained)
            loss = evaluate(self.model, self.loss_function, inputs)
        gradients = tape.gradient(loss, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for variable, gradient in zip(trained, gradients, strict=True):
            # The gradient of a table comes as the rows that were looked up. Made an array, it adds up before it is subtracted.
            variable.assign_sub(LEARNING_RATE * tf.convert_to_tensor(gradient))
        return loss

    def compile(self) -> None:
        """Trace ahead of the first step, which compiles."""
        if self.compiled:
            with self.context():
                self.forward = tf.function(self.update, autograph=False, jit_compile=True).get_concrete_function(self.inputs)

    def step(self) -> None:
        """Start one step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        with self.context():
            self.loss = self.forward(self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        tf.experimental.async_wait() if self.loss is None else self.loss.numpy()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the loss before its update."""
        return {"loss": weights.to_numpy(self.loss)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        return weights.export({variable.path: variable.value for variable in self.model.weights}, self.config, "model")


class Product:
    """A matrix product, again and again (:class:`backends.interface.Program`): (M, K) and (K, N) to (M, N)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.right = right
        self.product: Tensor | None = None

    def compile(self) -> None:
        """Do nothing: there is nothing to compile."""

    def step(self) -> None:
        """Start one product."""
        with tf.device(self.left.device):  # or another GPU would get copies of both
            self.product = tf.matmul(self.left, self.right)

    def wait(self) -> None:
        """Wait until the device is done."""
        tf.experimental.async_wait() if self.product is None else self.product[0, 0].numpy()

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
