"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow import Tensor

from concord.backends.bench import mean_seconds
from concord.backends.interface import Steps
from concord.backends.session import FrameworkSession
from concord.backends.taps import Observation
from concord.backends.tf.training import ClassificationLoss, CotangentLoss, differentiate


def synchronize(computed: Tensor | None) -> None:
    """Wait until a tensor is computed."""
    tf.experimental.async_wait() if computed is None else computed[(0,) * computed.shape.rank].numpy()


def timed(steps: Steps, count: int) -> list[float]:
    """Return the mean seconds of steps that are started one after another, by the clock of the host: TensorFlow does not give the device's away."""
    return mean_seconds(steps, count)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Start a matrix product: (M, K) and (K, N) to (M, N)."""
    with tf.device(left.device):  # or another GPU would get copies of both
        return tf.matmul(left, right)


def _named_layers(layer: keras.Layer, path: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Yield a layer and all within it, with their paths."""
    yield path, layer
    for child in layer._flatten_layers(include_self=False, recursive=False):
        yield from _named_layers(child, f"{path}.{child.name}".removeprefix("."))


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)

    def call(self, model: keras.Model, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the output of a model that takes its inputs in one argument."""
        return model(inputs)

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Return a step, compiled for what it is given if that is asked for."""
        return (
            tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*given)
            if self.compiled
            else function
        )

    def layers(self, model: keras.Model) -> Iterable[tuple[str, keras.Layer]]:
        """Return all layers of a model with their paths (:meth:`concord.backends.session.FrameworkSession.layers`)."""
        return _named_layers(model)

    def number(self, value: float) -> Tensor:
        """Return a number that a step is given as a tensor: whole steps are compiled."""
        return tf.constant(value, dtype=self.request.dtype)

    def infer(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (B, C)."""
        return self.evaluate(self.model, inputs, {}, False, False)[0]

    def differentiated(
        self, model: keras.Model, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]
    ) -> Observation:
        """Return what a step of training needs (:meth:`concord.backends.session.FrameworkSession.differentiated`)."""
        return differentiate(self.evaluate, model, self.request.part, inputs, zeros, bool(zeros))

    def seeded(self, words: NDArray[np.uint32]) -> Tensor:
        """Have dropout begin anew (:meth:`concord.backends.session.FrameworkSession.seeded`)."""
        return tf.constant(words.view(np.int32))

    def dropped(self, tensor: Tensor, rate: float, seed: Tensor, place: int) -> Tensor:
        """Return a tensor with elements dropped (:meth:`concord.backends.session.FrameworkSession.dropped`)."""
        return tf.nn.experimental.stateless_dropout(
            tensor, rate=rate, seed=seed + tf.constant([0, place]), rng_alg="philox"
        )

    def observe(self, inputs: Mapping[str, Tensor], zeros: Mapping[str, Tensor]) -> Observation:
        """Return output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""
        if self.request.gradients:
            return differentiate(self.evaluate, self.model, self.request.part, inputs, zeros, True)
        output, loss, taps = self.evaluate(self.model, inputs, {}, True)
        return Observation(output, loss, taps, {})
