"""Loss and gradients. Shapes: B batch, C classes."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.jax.model import TextClassifier
from concord.backends.taps import Observation, Tapped
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def named(model: nnx.Module) -> dict[str, nnx.Variable]:
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    }


class ClassificationLoss(Tapped):
    """Mean cross-entropy plus the classifier's L2 term (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = self.sigmoid_losses if config.num_classes == 1 else self.softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def softmax_losses(self, logits: Array, labels: Array) -> Array:
        # Not the logarithm of the softmax, which may be 0 (ALG-4).
        log_probabilities = self.tap("log_probabilities", jax.nn.log_softmax(logits, axis=-1))  # (B, C)
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]

    def sigmoid_losses(self, logits: Array, labels: Array) -> Array:
        return -jax.nn.log_sigmoid(jnp.where(labels == 1, logits[:, 0], -logits[:, 0]))

    def __call__(self, model: TextClassifier, logits: Array, inputs: Mapping[str, Array]) -> Array:
        labels = inputs["labels"]
        losses = self.tap("losses", self.losses(logits, labels))  # (B,)
        if self.ignore_label is None:
            loss = jnp.mean(losses)
        else:
            # Ignored samples do not enter the sum or the count (LOS-3).
            mask = labels != self.ignore_label
            loss = jnp.sum(jnp.where(mask, losses, jnp.zeros_like(losses))) / jnp.sum(mask).astype(
                losses.dtype
            )
        if self.l2_weight:
            weight, bias = model.classifier.kernel[...], model.classifier.bias[...]  # type: ignore[index]
            loss = loss + 0.5 * self.l2_weight * (jnp.sum(weight * weight) + jnp.sum(bias * bias))
        return self.tap("loss", loss)


class CotangentLoss(Tapped):
    """Sum of output times cotangent, for parts without a classifier (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: nnx.Module, output: Array, inputs: Mapping[str, Array]) -> Array:
        return self.tap("loss", jnp.sum(output * inputs["cotangent"]))


def differentiate(
    evaluate: Callable[..., tuple[Array, Array, dict[str, Array]]],
    model: nnx.Module,
    part: str,
    inputs: Mapping[str, Array],
    zeros: Mapping[str, Array],
    recorded: bool,
) -> Observation:
    """Evaluate with gradients of the loss (SPEC GRD-1 to GRD-6)."""
    sources = {name: inputs[name] for name in differentiable_inputs(part)}

    def loss_of(
        model: nnx.Module, sources: Mapping[str, Array], zeros: Mapping[str, Array]
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        output, loss, taps = evaluate(model, {**inputs, **sources}, zeros, recorded)
        return loss, (output, taps)

    argnums = (nnx.DiffState(0, nnx.Param), 1, 2)
    (loss, (output, taps)), (of_model, sources, of_taps) = nnx.value_and_grad(
        loss_of, argnums=argnums, has_aux=True
    )(model, sources, zeros)
    sources = {f"inputs.{name}": gradient for name, gradient in sources.items()}
    # A zero added to a tap gets the gradient of the tap's total use (GRD-6).
    of_taps = {f"taps.{name}": zero for name, zero in of_taps.items() if name in taps}
    gradients = {".".join(map(str, path)): gradient[...] for path, gradient in nnx.to_flat_state(of_model)}
    return Observation(output, loss, taps, gradients | sources | of_taps)
