"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from concord.backends.bench import seconds_by_events
from concord.backends.interface import Steps
from concord.backends.session import FrameworkSession
from concord.backends.taps import Observation
from concord.backends.torch.training import ClassificationLoss, CotangentLoss, differentiate
from concord.backends.trainer import MOST

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

    def prepare(self) -> None:
        """Do once what a framework needs before it compiles."""
        training = self.request.training
        # Gradients of a batch that are added up later would be overwritten.
        self.captured = (
            self.compiled
            and self.device.type == "cuda"
            and (training is None or training.recipe.accumulation == 1)
        )
        if self.compiled:
            # A worker compiles a model for each session; what earlier ones left counts towards a limit.
            torch.compiler.reset()
            torch.compiler.config.recompile_limit = 2 * MOST

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step as it is: PyTorch compiles what evaluates the model, when the first step runs."""
        return function

    def layers(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return all layers of a model with their paths (:meth:`concord.backends.session.FrameworkSession.layers`)."""
        return model.named_modules()

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for."""
        if not self.compiled:
            return self.evaluate
        return torch.compile(self.evaluate, fullgraph=True, dynamic=False, mode=MODES[captured])

    @cached_property
    def evaluating(self) -> Callable[..., Any]:
        """What evaluates the model in steps."""
        return self.evaluation(self.captured)

    def forget(self) -> None:
        """Let go of what was compiled: PyTorch keeps all that it has compiled until it is told otherwise."""
        torch.compiler.reset()

    def infer(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, C)."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            return self.evaluating(self.model, inputs, {}, False, False)[0]

    def differentiated(
        self, model: nn.Module, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]
    ) -> Observation:
        """Return what a step of training needs (:meth:`concord.backends.session.FrameworkSession.differentiated`)."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()
        return differentiate(self.evaluating, model, self.request.part, inputs, zeros, bool(zeros))

    def seeded(self, words: NDArray[np.uint32]) -> None:
        """Have dropout begin anew (:meth:`concord.backends.session.FrameworkSession.seeded`)."""
        torch.manual_seed(int(words[0]) | int(words[1]) << 32)

    def dropped(self, tensor: Tensor, rate: float, seed: Tensor | None, place: int) -> Tensor:
        """Return a tensor with elements dropped (:meth:`concord.backends.session.FrameworkSession.dropped`)."""
        return F.dropout(tensor, p=rate, training=True)

    def observe(self, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]) -> Observation:
        """Return output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        evaluate = self.evaluation(captured=False)
        if self.request.gradients:
            return differentiate(evaluate, self.model, self.request.part, inputs, zeros, True)
        with torch.no_grad():
            output, loss, taps = evaluate(self.model, inputs, {}, True)
            return Observation(output, loss, taps, {})
