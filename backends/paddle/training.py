"""Loss and gradients. Shapes: B batch, C classes."""

from collections.abc import Callable, Mapping

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from concord.backends.paddle.layers import scalar
from concord.backends.paddle.model import TextClassifier
from concord.backends.taps import Observation, Tapped
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def named(model: nn.Layer) -> dict[str, Tensor]:
    return dict(model.named_parameters())


class ClassificationLoss(Tapped):
    """Mean cross-entropy plus the classifier's L2 term (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = self.sigmoid_losses if config.num_classes == 1 else self.softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def softmax_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Not the logarithm of the softmax, which may be 0 (ALG-4).
        log_probabilities = self.tap("log_probabilities", F.log_softmax(logits, axis=-1))  # (B, C)
        return -paddle.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]

    def sigmoid_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels.astype(logits.dtype), reduction="none")

    def __call__(self, model: TextClassifier, logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        labels = inputs["labels"]
        losses = self.tap("losses", self.losses(logits, labels))  # (B,)
        if self.ignore_label is None:
            loss = paddle.mean(losses)
        else:
            # Ignored samples do not enter the sum or the count (LOS-3).
            mask = labels != self.ignore_label
            loss = paddle.sum(paddle.where(mask, losses, paddle.zeros_like(losses))) / paddle.sum(
                mask, dtype=losses.dtype
            )
        if self.l2_weight:
            weight, bias = model.classifier.weight, model.classifier.bias
            loss = loss + scalar(0.5 * self.l2_weight, loss) * (
                paddle.sum(weight * weight) + paddle.sum(bias * bias)
            )
        return self.tap("loss", loss)


class CotangentLoss(Tapped):
    """Sum of output times cotangent, for parts without a classifier (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: nn.Layer, output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.tap("loss", paddle.sum(output * inputs["cotangent"]))


def differentiate(
    evaluate: Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]],
    model: nn.Layer,
    part: str,
    inputs: Mapping[str, Tensor],
    zeros: Mapping[str, Tensor],
    recorded: bool,
) -> Observation:
    """Evaluate with gradients of the loss (SPEC GRD-1 to GRD-6)."""
    sources = {name: parameter for name, parameter in named(model).items() if not parameter.stop_gradient}
    sources |= {f"inputs.{name}": inputs[name] for name in differentiable_inputs(part)}
    # A zero added to a tap gets the gradient of the tap's total use (GRD-6).
    of_taps = {f"taps.{name}": zero for name, zero in zeros.items()}
    for tensor in (*sources.values(), *of_taps.values()):
        tensor.stop_gradient = False
        tensor.clear_gradient(set_to_zero=False)
    output, loss, taps = evaluate(model, inputs, zeros, recorded)
    if sources:
        loss.backward()
    sources |= {name: zero for name, zero in of_taps.items() if name.removeprefix("taps.") in taps}
    return Observation(
        output,
        loss,
        taps,
        {
            name: paddle.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in sources.items()
        },
    )
