"""Loss and gradients. Shapes: B batch, C classes."""

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf
from tensorflow import Tensor

from concord.backends.taps import Observation, Tapped
from concord.backends.tf.model import TextClassifier
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def named(model: keras.Model) -> dict[str, keras.Variable]:
    return {variable.path.partition("/")[2].replace("/", "."): variable for variable in model.weights}


class ClassificationLoss(Tapped):
    """Mean cross-entropy plus the classifier's L2 term (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = self.sigmoid_losses if config.num_classes == 1 else self.softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def softmax_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Not the logarithm of the softmax, which may be 0 (ALG-4).
        log_probabilities = self.tap("log_probabilities", tf.nn.log_softmax(logits, axis=-1))  # (B, C)
        return -tf.gather(log_probabilities, labels[:, None], axis=1, batch_dims=1)[:, 0]

    def sigmoid_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.cast(labels, logits.dtype), logits=logits[:, 0]
        )

    def __call__(self, model: TextClassifier, logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        labels = inputs["labels"]
        losses = self.tap("losses", self.losses(logits, labels))  # (B,)
        if self.ignore_label is None:
            loss = tf.reduce_mean(losses, axis=0)
        else:
            # Ignored samples do not enter the sum or the count (LOS-3).
            mask = labels != self.ignore_label
            count = tf.cast(tf.math.count_nonzero(mask, axis=0, dtype=tf.int64), losses.dtype)
            loss = tf.reduce_sum(tf.where(mask, losses, tf.zeros_like(losses)), axis=0) / count
        if self.l2_weight:
            weight, bias = model.classifier.kernel.value, model.classifier.bias.value
            loss = loss + 0.5 * self.l2_weight * (
                tf.reduce_sum(weight * weight, axis=None) + tf.reduce_sum(bias * bias, axis=None)
            )
        return self.tap("loss", loss)


class CotangentLoss(Tapped):
    """Sum of output times cotangent, for parts without a classifier (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: keras.Model, output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.tap("loss", tf.reduce_sum(output * inputs["cotangent"], axis=None))


def differentiate(
    evaluate: Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]],
    model: keras.Model,
    part: str,
    inputs: Mapping[str, Tensor],
    zeros: Mapping[str, Tensor],
    recorded: bool,
) -> Observation:
    """Evaluate with gradients of the loss (SPEC GRD-1 to GRD-6)."""
    sources = {name: variable.value for name, variable in named(model).items() if variable.trainable}
    sources |= {f"inputs.{name}": inputs[name] for name in differentiable_inputs(part)}
    # A zero added to a tap gets the gradient of the tap's total use (GRD-6).
    of_taps = {f"taps.{name}": zero for name, zero in zeros.items()}
    with tf.GradientTape(persistent=False, watch_accessed_variables=False) as tape:
        tape.watch([*sources.values(), *of_taps.values()])
        output, loss, taps = evaluate(model, inputs, zeros, recorded)
    sources |= {name: zero for name, zero in of_taps.items() if name.removeprefix("taps.") in taps}
    gradients = tape.gradient(loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    # A table's gradient consists of looked-up rows; the conversion sums them into the table's shape.
    return Observation(
        output, loss, taps, {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}
    )
