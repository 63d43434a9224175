"""Loss and gradients.

Shapes: B batch, C classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.interface import Trace
from concord.backends.jax.layers import Tap
from concord.backends.jax.model import Inputs
from concord.backends.session import Observation
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def softmax_losses(logits: Array, labels: Array, tap: Tap) -> Array:
    log_probabilities = tap("log_probabilities", jax.nn.log_softmax(logits, axis=-1))  # (B, C)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]


def sigmoid_losses(logits: Array, labels: Array, tap: Tap) -> Array:
    return -jax.nn.log_sigmoid(jnp.where(labels == 1, logits[:, 0], -logits[:, 0]))


class ClassificationLoss:
    """Mean cross-entropy plus the L2 term of the classifier (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = sigmoid_losses if config.num_classes == 1 else softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def __call__(self, model: nnx.Module, logits: Array, inputs: Inputs, tap: Tap) -> Array:
        labels = inputs["labels"]
        losses = tap("losses", self.losses(logits, labels, tap))  # (B,)
        if self.ignore_label is None:
            loss = jnp.mean(losses)
        else:
            counted = labels != self.ignore_label
            loss = jnp.sum(jnp.where(counted, losses, jnp.zeros_like(losses))) / jnp.sum(counted).astype(losses.dtype)
        if self.l2_weight:
            weight, bias = model.classifier.kernel[...], model.classifier.bias[...]
            loss = loss + 0.5 * self.l2_weight * (jnp.sum(weight * weight) + jnp.sum(bias * bias))
        return tap("loss", loss)


class CotangentLoss:
    """Sum of the output times a given cotangent, for the parts without a head (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: nnx.Module, output: Array, inputs: Inputs, tap: Tap) -> Array:
        return tap("loss", jnp.sum(output * inputs["cotangent"]))


def add_zeros(tensor: Array, zeros: Array | None) -> Array:
    """Add what has the tensor's own gradient; a tensor of another shape, which only a faulty model has, stays alone."""
    return tensor if zeros is None or zeros.shape != tensor.shape else tensor + zeros


def evaluate(
    model: nnx.Module, loss_function: Callable[..., Array] | None, inputs: Inputs, trace: Trace, zeros: Mapping[str, Array], recorded: bool
) -> tuple[Array, Array | None, dict[str, Array]]:
    """Return output, the loss if there is a function for it, and if they are recorded all taps.

    Args:
        trace: makes of the tap that records the one that the model calls.
        zeros: by tap; what has the gradient that the tap has, for it is added to it (:func:`add_zeros`).
    """
    taps: dict[str, Array] = OrderedDict()  # A dict would come back from JAX's transformations in alphabetical order.

    def record(name: str, tensor: Array) -> Array:
        tensor = add_zeros(tensor, zeros.get(name))
        if recorded:
            taps[name] = tensor
        return tensor

    tap = trace(model, inputs, record)
    output = model(inputs, tap)
    return output, None if loss_function is None else loss_function(model, output, inputs, tap), taps


def differentiate(
    graph: nnx.GraphDef, state: nnx.State, fixed: nnx.State, loss_function: Callable[..., Array], inputs: Inputs, part: str, trace: Trace, zeros: Mapping[str, Array], recorded: bool
) -> Observation:
    """Return what :func:`evaluate` computes, with the gradients of the loss (SPEC GRD-1 to GRD-5): by trained parameters, by given tensors, and by the taps that have ``zeros``."""
    given = {name: inputs[name] for name in differentiable_inputs(part)}

    def loss_of(state: nnx.State, given: Inputs, zeros: Mapping[str, Array]) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        output, loss, taps = evaluate(nnx.merge(graph, state, fixed), loss_function, {**inputs, **given}, trace, zeros, recorded)
        return loss, (output, taps)

    (loss, (output, taps)), gradients = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)(state, given, zeros)
    return Observation(output, loss, taps, gradients)
