"""Loss and gradients.

Shapes: B batch, C classes.
"""

from collections.abc import Callable

import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from backends.tf.layers import Tap
from backends.tf.model import Inputs
from spec.config import EncoderConfig
from spec.tensors import differentiable_inputs


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


def evaluate(model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output, loss and every tap."""
    taps: dict[str, Tensor] = {}

    def tap(name: str, tensor: Tensor) -> Tensor:
        taps[name] = tensor
        return tensor

    output = model(inputs, tap=tap)
    return output, loss_function(model, output, inputs, tap), taps


def differentiate(
    model: layers.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, part: str, compiled: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return output, loss, taps and the gradient of the loss by native name (SPEC GRD-1 to GRD-5)."""

    def record(inputs: Inputs) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        wanted = {variable.path: variable.value for variable in model.trainable_weights}
        wanted |= {f"inputs.{name}": inputs[name] for name in differentiable_inputs(part)}
        with tf.GradientTape(persistent=False, watch_accessed_variables=False) as tape:
            tape.watch(list(wanted.values()))
            output, loss, taps = evaluate(model, loss_function, inputs)
        gradients = tape.gradient(loss, wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # The gradient of a table comes as the rows that were looked up; it is made an array of the table's shape.
        return output, loss, taps, {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}

    run = tf.function(record, autograph=False, jit_compile=True).get_concrete_function(inputs) if compiled else record
    return run(inputs)
