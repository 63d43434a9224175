"""Programs: a model that is built once and run many times, and a bare matrix product to measure it by.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle import Tensor, nn

from backends.interface import LEARNING_RATE, Program
from backends.paddle import weights
from backends.paddle.layers import silent
from backends.paddle.model import Inputs
from backends.programs import seconds_by_events
from spec.config import EncoderConfig
from spec.parameters import Weights

Context = Callable[[], AbstractContextManager[None]]


@paddle.jit.not_to_static  # traced as they stand: no branch depends on a value
def predict(model: nn.Layer, inputs: Inputs) -> Tensor:
    return model(inputs, silent)


@paddle.jit.not_to_static
def evaluate(model: nn.Layer, loss_function: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return loss_function(model, model(inputs, silent), inputs, silent)


def timed(program: Program, steps: int) -> list[float]:
    """Return the seconds of steps that are started one after another, by the device's clock."""
    return seconds_by_events(program, [paddle.device.Event(enable_timing=True) for _ in range(steps + 1)])


class Inference:
    """The forward pass, again and again (:class:`backends.interface.Program`): (B, T) to (B, C)."""

    def __init__(
        self, model: nn.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.config = config
        self.context = context
        self.output: Tensor | None = None
        self.forward = paddle.jit.to_static(predict, full_graph=True, backend=None) if compiled else predict

    def compile(self) -> None:
        """Do nothing: PaddlePaddle compiles when the first step runs."""

    def step(self) -> None:
        """Start one forward pass."""
        with self.context(), paddle.no_grad():
            self.output = self.forward(self.model, self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.output is not None and self.output.place.is_gpu_place():
            paddle.device.synchronize()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the logits (B, C)."""
        return {"logits": weights.to_numpy(self.output)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        return weights.export(dict(self.model.named_parameters()), self.config, "model")


class Training:
    """Training steps by gradient descent, one after another (:class:`backends.interface.Program`): (B, T) to a scalar."""

    def __init__(
        self, model: nn.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model
        self.loss_function = loss_function
        self.inputs = inputs
        self.config = config
        self.context = context
        self.loss: Tensor | None = None
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        self.optimizer = paddle.optimizer.SGD(learning_rate=LEARNING_RATE, parameters=trained, weight_decay=None)
        self.forward = paddle.jit.to_static(evaluate, full_graph=True, backend=None) if compiled else evaluate

    def compile(self) -> None:
        """Do nothing: PaddlePaddle compiles when the first step runs."""

    def step(self) -> None:
        """Start one step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        self.optimizer.clear_grad(set_to_zero=False)
        with self.context():
            self.loss = self.forward(self.model, self.loss_function, self.inputs)
            self.loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.loss is not None and self.loss.place.is_gpu_place():
            paddle.device.synchronize()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of steps on a device (:func:`timed`)."""
        return timed(self, steps)

    def results(self) -> dict[str, np.ndarray]:
        """Return what the last step computed: the loss before its update."""
        return {"loss": weights.to_numpy(self.loss)}

    def parameters(self) -> Weights:
        """Return the parameters as they are now, by canonical name."""
        return weights.export(dict(self.model.named_parameters()), self.config, "model")


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
        self.product = paddle.matmul(self.left, self.right, transpose_x=False, transpose_y=False)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.left.place.is_gpu_place():
            paddle.device.synchronize()

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
