"""Loss and gradients.

Shapes: B batch, C classes.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from concord.backends.interface import Trace
from concord.backends.session import Observation
from concord.backends.tf.layers import Tap
from concord.backends.tf.model import Inputs
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def softmax_losses(logits: Tensor, labels: Tensor, tap: Tap) -> Tensor:
    log_probabilities = tap("log_probabilities", tf.nn.log_softmax(logits, axis=-1))  # (B, C)
    return -tf.gather(log_probabilities, labels[:, None], axis=1, batch_dims=1)[:, 0]


def sigmoid_losses(logits: Tensor, labels: Tensor, tap: Tap) -> Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, logits.dtype), logits=logits[:, 0])


class ClassificationLoss:
    """Mean cross-entropy plus the L2 term of the classifier (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = sigmoid_losses if config.num_classes == 1 else softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def __call__(self, model: layers.Layer, logits: Tensor, inputs: Inputs, tap: Tap) -> Tensor:
        labels = inputs["labels"]
        losses = tap("losses", self.losses(logits, labels, tap))  # (B,)
        if self.ignore_label is None:
            loss = tf.reduce_mean(losses, axis=0)
        else:
            counted = labels != self.ignore_label
            count = tf.cast(tf.math.count_nonzero(counted, axis=0, dtype=tf.int64), losses.dtype)
            loss = tf.reduce_sum(tf.where(counted, losses, tf.zeros_like(losses)), axis=0) / count
        if self.l2_weight:
            weight, bias = model.classifier.kernel.value, model.classifier.bias.value
            loss = loss + 0.5 * self.l2_weight * (tf.reduce_sum(weight * weight, axis=None) + tf.reduce_sum(bias * bias, axis=None))
        return tap("loss", loss)


class CotangentLoss:
    """Sum of the output times a given cotangent, for the parts without a head (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: layers.Layer, output: Tensor, inputs: Inputs, tap: Tap) -> Tensor:
        return tap("loss", tf.reduce_sum(output * inputs["cotangent"], axis=None))


def add_zeros(tensor: Tensor, zeros: Tensor | None) -> Tensor:
    """Add what has the tensor's own gradient; a tensor of another shape, which only a faulty model has, stays alone."""
    return tensor if zeros is None or zeros.shape != tensor.shape else tensor + zeros


def evaluate(
    model: layers.Layer, loss_function: Callable[..., Tensor] | None, inputs: Inputs, trace: Trace, zeros: Mapping[str, Tensor], recorded: bool
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return output, the loss if there is a function for it, and if they are recorded all taps.

    Args:
        trace: makes of the tap that records the one that the model calls.
        zeros: by tap; what has the gradient that the tap has, for it is added to it (:func:`add_zeros`).
    """
    taps: dict[str, Tensor] = {}

    def record(name: str, tensor: Tensor) -> Tensor:
        tensor = add_zeros(tensor, zeros.get(name))
        if recorded:
            taps[name] = tensor
        return tensor

    tap = trace(model, inputs, record)
    output = model(inputs, tap=tap)
    return output, None if loss_function is None else loss_function(model, output, inputs, tap), taps


def differentiate(
    model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, part: str, trace: Trace, zeros: Mapping[str, Tensor], recorded: bool
) -> Observation:
    """Return what :func:`evaluate` computes, with the gradient of the loss by native name (SPEC GRD-1 to GRD-5), and by the taps that have ``zeros``."""
    wanted = {variable.path: variable.value for variable in model.trainable_weights}
    wanted |= {f"inputs.{name}": inputs[name] for name in differentiable_inputs(part)}
    of_taps = {f"taps.{name}": zero for name, zero in zeros.items()}
    with tf.GradientTape(persistent=False, watch_accessed_variables=False) as tape:
        tape.watch([*wanted.values(), *of_taps.values()])
        output, loss, taps = evaluate(model, loss_function, inputs, trace, zeros, recorded)
    wanted |= {name: zero for name, zero in of_taps.items() if name.removeprefix("taps.") in taps}
    gradients = tape.gradient(loss, wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    # The gradient of a table comes as the rows that were looked up; it is made an array of the table's shape, in which they are added up.
    return Observation(output, loss, taps, {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()})
