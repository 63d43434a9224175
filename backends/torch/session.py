"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from concord.backends.bench import seconds_by_events
from concord.backends.interface import LEARNING_RATE, Steps
from concord.backends.session import FrameworkSession, Observation
from concord.backends.torch import weights
from concord.backends.torch.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from concord.spec.parameters import Weights

MODES = {False: "default", True: "reduce-overhead"}
"""Of the compiler, by whether kernels are captured as a graph, which a GPU launches at once."""


def synchronize(computed: Tensor | None) -> None:
    """Wait until the device of a tensor is done."""
    if computed is not None and computed.is_cuda:
        torch.cuda.synchronize(computed.device)


def timed(steps: Steps, count: int) -> list[float]:
    """Return the seconds of steps that are started one after another, by the device's clock."""
    return seconds_by_events(steps, [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)])


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Start a matrix product: (M, K) and (K, N) to (M, N)."""
    return torch.mm(left, right)


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)

    def start(self, model: nn.Module) -> None:
        """Take the model."""
        self.model = model
        self.captured = self.compiled and self.device.type == "cuda"
        if self.compiled:
            # A worker compiles a model for each session; what earlier ones left counts towards a limit.
            torch.compiler.reset()

    def put(self, canonical: Weights) -> None:
        """Copy canonical weights into the model."""
        weights.load(self.model, self.request.config, canonical, self.request.part)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.0, weight_decay=0.0, foreach=True)

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for."""
        return torch.compile(evaluate, fullgraph=True, dynamic=False, mode=MODES[captured]) if self.compiled else evaluate

    @functools.cached_property
    def stepping(self) -> Callable[..., Any]:
        """What evaluates the model in steps."""
        return self.evaluation(self.captured)

    def compile(self) -> None:
        """Do nothing: PyTorch compiles when the first step runs."""

    def forward(self) -> None:
        """Start one forward pass: (B, T) to (B, C)."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        with self.context(), torch.inference_mode():
            output, _, _ = self.stepping(self.model, None, self.inputs, self.trace, {}, False)
        self.computed = {"logits": output}

    def train_step(self) -> None:
        """Start one training step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        with self.context():
            observed = differentiate(self.stepping, self.model, self.loss_function, self.inputs, self.request.part, self.trace, {}, False)
            self.optimizer.step()
        self.computed = {"loss": observed.loss}

    def observe(self, zeros: dict[str, Tensor]) -> Observation:
        """Compute output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        run = self.evaluation(captured=False)
        if self.request.gradients:
            return differentiate(run, self.model, self.loss_function, self.inputs, self.request.part, self.trace, zeros, True)
        with torch.no_grad():
            return Observation(*run(self.model, self.loss_function, self.inputs, self.trace, {}, True), {})
