"""A session: a model on a device, to be loaded, run, stepped and read.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from concord.backends.bench import mean_seconds
from concord.backends.interface import LEARNING_RATE, Steps
from concord.backends.session import FrameworkSession, Observation
from concord.backends.tf import weights
from concord.backends.tf.model import Inputs
from concord.backends.tf.training import ClassificationLoss, CotangentLoss, differentiate, evaluate
from concord.spec.parameters import Weights


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


class Session(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    losses = (ClassificationLoss, CotangentLoss)

    def start(self, model: layers.Layer) -> None:
        """Take the model."""
        self.model = model

    def put(self, canonical: Weights) -> None:
        """Copy canonical weights into the model."""
        weights.load(self.model, self.request.config, canonical, self.request.part)

    def infer(self, inputs: Inputs) -> Tensor:
        """Return the logits (B, C)."""
        return evaluate(self.model, None, inputs, self.trace, {}, False)[0]

    def update(self, inputs: Inputs) -> Tensor:
        """Return the loss before an update by plain gradient descent."""
        observed = differentiate(self.model, self.loss_function, inputs, self.request.part, self.trace, {}, False)
        for variable in self.model.trainable_weights:
            variable.value.assign_sub(LEARNING_RATE * observed.gradients[variable.path])
        return observed.loss

    def traced(self, function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        """Return a function, compiled for what it is given if that is asked for."""
        return tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*given) if self.compiled else function

    @functools.cached_property
    def inferring(self) -> Callable[..., Any]:
        """What computes logits in steps."""
        return self.traced(self.infer, self.inputs)

    @functools.cached_property
    def updating(self) -> Callable[..., Any]:
        """What updates the model in steps."""
        return self.traced(self.update, self.inputs)

    def compile(self) -> None:
        """Trace ahead of the first step, which compiles."""
        with self.context():
            _ = self.updating if self.request.gradients else self.inferring

    def forward(self) -> None:
        """Start one forward pass: (B, T) to (B, C)."""
        with self.context():
            self.computed = {"logits": self.inferring(self.inputs)}

    def train_step(self) -> None:
        """Start one training step: loss, gradients, and every trained parameter less its gradient times the learning rate."""
        with self.context():
            self.computed = {"loss": self.updating(self.inputs)}

    def observe(self, zeros: dict[str, Tensor]) -> Observation:
        """Compute output, loss and every tap, and gradients if they are asked for (:meth:`concord.backends.session.FrameworkSession.observe`)."""

        def compute(inputs: Inputs, zeros: dict[str, Tensor]) -> Observation:
            if self.request.gradients:
                return differentiate(self.model, self.loss_function, inputs, self.request.part, self.trace, zeros, True)
            return Observation(*evaluate(self.model, self.loss_function, inputs, self.trace, {}, True), {})

        return self.traced(compute, self.inputs, zeros)(self.inputs, zeros)
