"""Programs: a model that is built once and run many times, and a bare matrix product to measure it by.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from backends.interface import LEARNING_RATE, Program
from backends.programs import seconds_by_events
from backends.torch import weights
from backends.torch.layers import silent
from backends.torch.model import Inputs
from spec.config import EncoderConfig
from spec.parameters import Weights

MODES = {False: "default", True: "reduce-overhead"}
"""Of the compiler, by whether kernels are captured as a graph, which a GPU launches at once."""

Context = Callable[[], AbstractContextManager[None]]


def predict(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs, silent)


def evaluate(model: nn.Module, loss_function: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return loss_function(model, model(inputs, silent), inputs, silent)


def timed(program: Program, steps: int) -> list[float]:
    """Return the seconds of steps that are started one after another, by the device's clock."""
    return seconds_by_events(program, [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)])


class Inference:
    """The forward pass, again and again (:class:`backends.interface.Program`): (B, T) to (B, C)."""

    def __init__(
        self, model: nn.Module, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model.requires_grad_(False)
        self.inputs = inputs
        self.config = config
        self.context = context
        self.output: Tensor | None = None
        self.captured = compiled and any(tensor.is_cuda for tensor in inputs.values())
        self.forward = torch.compile(predict, fullgraph=True, dynamic=False, mode=MODES[self.captured]) if compiled else predict

    def compile(self) -> None:
        """Do nothing: PyTorch compiles when the first step runs."""

    def step(self) -> None:
        """Start one forward pass."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        with self.context(), torch.inference_mode():
            self.output = self.forward(self.model, self.inputs)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.output is not None and self.output.is_cuda:
            torch.cuda.synchronize(self.output.device)

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
        self, model: nn.Module, loss_function: Callable[..., Tensor], inputs: Inputs, config: EncoderConfig, compiled: bool, context: Context
    ) -> None:
        self.model = model
        self.loss_function = loss_function
        self.inputs = inputs
        self.config = config
        self.context = context
        self.loss: Tensor | None = None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.0, weight_decay=0.0, foreach=True)
        self.captured = compiled and any(tensor.is_cuda for tensor in inputs.values())
        self.forward = torch.compile(evaluate, fullgraph=True, dynamic=False, mode=MODES[self.captured]) if compiled else evaluate

    def compile(self) -> None:
        """Do nothing: PyTorch compiles when the first step runs."""

    def step(self) -> None:
        """Start one step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        with self.context():
            self.loss = self.forward(self.model, self.loss_function, self.inputs)
            self.loss.backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.loss is not None and self.loss.is_cuda:
            torch.cuda.synchronize(self.loss.device)

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
        self.product = torch.mm(self.left, self.right)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.left.is_cuda:
            torch.cuda.synchronize(self.left.device)

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
