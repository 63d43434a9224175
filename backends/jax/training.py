"""Loss and gradients.

Shapes: B batch, C classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from backends.jax.layers import Tap
from backends.jax.model import Inputs
from spec.config import EncoderConfig
from spec.tensors import differentiable_inputs


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
    model: nnx.Module, loss_function: Callable[..., Array], inputs: Inputs, edit: Tap, zeros: Mapping[str, Array]
) -> tuple[Array, Array, dict[str, Array]]:
    """Return output, loss and every tap, as ``edit`` makes it and with ``zeros`` of its name added (:func:`add_zeros`)."""
    taps: dict[str, Array] = OrderedDict()  # A dict would come back from JAX's transformations in alphabetical order.

    def tap(name: str, tensor: Array) -> Array:
        taps[name] = add_zeros(edit(name, tensor), zeros.get(name))
        return taps[name]

    output = model(inputs, tap)
    return output, loss_function(model, output, inputs, tap), taps


def differentiate(
    model: nnx.Module, loss_function: Callable[..., Array], inputs: Inputs, part: str, compiled: bool, edit: Tap, zeros: Mapping[str, Array]
) -> tuple[Array, Array, dict[str, Array], dict[str, Array]]:
    """Return output, loss, taps and the gradient of the loss by native name (SPEC GRD-1 to GRD-5), and by the taps that have ``zeros``."""
    graph, trainable, fixed = nnx.split(model, nnx.Param, ...)
    given = {name: inputs[name] for name in differentiable_inputs(part)}

    def loss_of(
        trainable: nnx.State, given: Inputs, zeros: Mapping[str, Array], fixed: nnx.State, inputs: Inputs
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        output, loss, taps = evaluate(nnx.merge(graph, trainable, fixed), loss_function, {**inputs, **given}, edit, zeros)
        return loss, (output, taps)

    run = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
    options = {"xla_allow_excess_precision": False}  # Allowed, XLA leaves out roundings to bfloat16 where it fuses steps.
    run = jax.jit(run, compiler_options=options) if compiled else run
    (loss, (output, taps)), (gradients, of_inputs, of_taps) = run(trainable, given, zeros, fixed, inputs)
    named = {".".join(map(str, path)): gradient[...] for path, gradient in nnx.to_flat_state(gradients)}
    named |= {f"inputs.{name}": gradient for name, gradient in of_inputs.items()}
    return output, loss, taps, named | {f"taps.{name}": of_taps[name] for name in taps if name in of_taps}
