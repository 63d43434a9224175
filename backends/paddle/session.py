"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor, nn

from concord.backends.bench import seconds_by_events
from concord.backends.interface import LEARNING_RATE, Steps
from concord.backends.paddle import weights
from concord.backends.paddle.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from concord.backends.session import FrameworkSession, Observation
from concord.spec.parameters import Weights


def synchronize(computed: Tensor | None) -> None:
    """Wait until the device of a tensor is done."""
    if computed is not None and computed.place.is_gpu_place():
        paddle.device.synchronize()


def timed(steps: Steps, count: int) -> list[float]:
    """Return the seconds of steps that are started one after another, by the device's clock."""
    return seconds_by_events(steps, [paddle.device.Event(enable_timing=True) for _ in range(count + 1)])


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Start a matrix product: (M, K) and (K, N) to (M, N)."""
    return paddle.matmul(left, right, transpose_x=False, transpose_y=False)


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)

    def start(self, model: nn.Layer) -> None:
        """Take the model."""
        self.model = model
        # Static programs overwrite tensors that they return, if allowed to compute in place.
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        # Every static program that ran stays in memory until this cache is cleared.
        paddle.base.core.clear_executor_cache()

    def put(self, canonical: Weights) -> None:
        """Copy canonical weights into the model."""
        weights.load(self.model, self.request.config, canonical, self.request.part)

    @functools.cached_property
    def optimizer(self) -> paddle.optimizer.Optimizer:
        """Plain gradient descent."""
        trained = [parameter for parameter in self.model.parameters() if not parameter.stop_gradient]
        return paddle.optimizer.SGD(learning_rate=LEARNING_RATE, parameters=trained, weight_decay=None)

    def evaluation(self) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for."""
        return paddle.jit.to_static(evaluate, full_graph=True, backend=None) if self.compiled else evaluate

    @functools.cached_property
    def stepping(self) -> Callable[..., Any]:
        """What evaluates the model in steps."""
        return self.evaluation()

    def compile(self) -> None:
        """Do nothing: PaddlePaddle compiles when the first step runs."""

    def forward(self) -> None:
        """Start one forward pass: (B, T) to (B, C)."""
        with self.context(), paddle.no_grad():
            output, _, _ = self.stepping(self.model, None, self.inputs, self.trace, {}, False)
        self.computed = {"logits": output}

    def train_step(self) -> None:
        """Start one training step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        with self.context():
            observed = differentiate(self.stepping, self.model, self.loss_function, self.inputs, self.request.part, self.trace, {}, False)
            self.optimizer.step()
        self.computed = {"loss": observed.loss}

    def observe(self, zeros: dict[str, Tensor]) -> Observation:
        """Compute output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        run = self.evaluation()
        if self.request.gradients:
            return differentiate(run, self.model, self.loss_function, self.inputs, self.request.part, self.trace, zeros, True)
        with paddle.no_grad():
            return Observation(*run(self.model, self.loss_function, self.inputs, self.trace, {}, True), {})
