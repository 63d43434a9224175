"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import Tensor, nn

from concord.backends.bench import seconds_by_events
from concord.backends.interface import Steps
from concord.backends.paddle.training import ClassificationLoss, CotangentLoss, differentiate
from concord.backends.session import FrameworkSession
from concord.backends.taps import Observation


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

    def prepare(self) -> None:
        """Do once what a framework needs before it compiles."""
        # Static programs overwrite tensors that they return, if allowed to compute in place.
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        # Every static program that ran stays in memory until this cache is cleared.
        paddle.base.core.clear_executor_cache()

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step as it is: PaddlePaddle compiles what evaluates the model, when the first step runs."""
        return function

    def layers(self, model: nn.Layer) -> Iterable[tuple[str, nn.Layer]]:
        """Return all layers of a model with their paths (:meth:`concord.backends.session.FrameworkSession.layers`)."""
        return model.named_sublayers(include_self=True)

    def evaluation(self) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for."""
        if not self.compiled:
            return self.evaluate

        def evaluate(
            model: nn.Layer,
            inputs: Mapping[str, Tensor],
            zeros: Mapping[str, Tensor],
            recorded: bool,
            with_loss: bool = True,
        ) -> Any:
            return self.evaluate(model, inputs, zeros, recorded, with_loss)

        plain = paddle.jit.not_to_static(evaluate)  # traced as it stands: no branch depends on a value
        return paddle.jit.to_static(plain, full_graph=True, backend=None)

    @cached_property
    def evaluating(self) -> Callable[..., Any]:
        """What evaluates the model in steps."""
        return self.evaluation()

    def forget(self) -> None:
        """Let go of what was compiled: PaddlePaddle keeps every static program that ran."""
        paddle.base.core.clear_executor_cache()

    def infer(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, C)."""
        with paddle.no_grad():
            return self.evaluating(self.model, inputs, {}, False, False)[0]

    def differentiated(
        self, model: nn.Layer, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]
    ) -> Observation:
        """Return what a step of training needs (:meth:`concord.backends.session.FrameworkSession.differentiated`)."""
        return differentiate(self.evaluating, model, self.request.part, inputs, zeros, bool(zeros))

    def seeded(self, words: NDArray[np.uint32]) -> None:
        """Have dropout begin anew (:meth:`concord.backends.session.FrameworkSession.seeded`)."""
        paddle.seed(int(words[0]) | int(words[1] >> 1) << 32)

    def dropped(self, tensor: Tensor, rate: float, seed: Tensor | None, place: int) -> Tensor:
        """Return a tensor with elements dropped (:meth:`concord.backends.session.FrameworkSession.dropped`)."""
        return F.dropout(tensor, p=rate, training=True, mode="upscale_in_train")

    def observe(self, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]) -> Observation:
        """Return output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        evaluate = self.evaluation()
        if self.request.gradients:
            return differentiate(evaluate, self.model, self.request.part, inputs, zeros, True)
        with paddle.no_grad():
            output, loss, taps = evaluate(self.model, inputs, {}, True)
            return Observation(output, loss, taps, {})
