"""Loss and gradients.

Shapes: B batch, C classes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from concord.backends.interface import Trace
from concord.backends.paddle.layers import Tap, _scalar
from concord.backends.paddle.model import Inputs
from concord.backends.session import Observation
from concord.spec.config import EncoderConfig
from concord.spec.tensors import differentiable_inputs


def softmax_losses(logits: Tensor, labels: Tensor, tap: Tap) -> Tensor:
    log_probabilities = tap("log_probabilities", F.log_softmax(logits, axis=-1))  # (B, C)
    return -paddle.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]


def sigmoid_losses(logits: Tensor, labels: Tensor, tap: Tap) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits[:, 0], labels.astype(logits.dtype), reduction="none")


class ClassificationLoss:
    """Mean cross-entropy plus the L2 term of the classifier (SPEC LOS-1 to LOS-4): (B, C) to a scalar."""

    def __init__(self, config: EncoderConfig) -> None:
        self.losses = sigmoid_losses if config.num_classes == 1 else softmax_losses
        self.ignore_label = config.ignore_label
        self.l2_weight = config.l2_weight

    def __call__(self, model: nn.Layer, logits: Tensor, inputs: Inputs, tap: Tap) -> Tensor:
        labels = inputs["labels"]
        losses = tap("losses", self.losses(logits, labels, tap))  # (B,)
        if self.ignore_label is None:
            loss = paddle.mean(losses)
        else:
            counted = labels != self.ignore_label
            loss = paddle.sum(paddle.where(counted, losses, paddle.zeros_like(losses))) / paddle.sum(counted, dtype=losses.dtype)
        if self.l2_weight:
            weight, bias = model.classifier.weight, model.classifier.bias
            loss = loss + _scalar(0.5 * self.l2_weight, loss) * (paddle.sum(weight * weight) + paddle.sum(bias * bias))
        return tap("loss", loss)


class CotangentLoss:
    """Sum of the output times a given cotangent, for the parts without a head (SPEC LOS-5)."""

    def __init__(self, config: EncoderConfig) -> None:
        pass

    def __call__(self, model: nn.Layer, output: Tensor, inputs: Inputs, tap: Tap) -> Tensor:
        return tap("loss", paddle.sum(output * inputs["cotangent"]))


def add_zeros(tensor: Tensor, zeros: Tensor | None) -> Tensor:
    """Add what has the tensor's own gradient; a tensor of another shape, which only a faulty model has, stays alone."""
    return tensor if zeros is None or zeros.shape != tensor.shape else tensor + zeros


@paddle.jit.not_to_static  # traced as it stands: no branch depends on a value
def evaluate(
    model: nn.Layer, loss_function: Callable[..., Tensor] | None, inputs: Inputs, trace: Trace, zeros: Mapping[str, Tensor], recorded: bool
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
    output = model(inputs, tap)
    return output, None if loss_function is None else loss_function(model, output, inputs, tap), taps


def differentiate(
    run: Callable[..., Any], model: nn.Layer, loss_function: Callable[..., Tensor], inputs: Inputs, part: str, trace: Trace, zeros: Mapping[str, Tensor], recorded: bool
) -> Observation:
    """Return what :func:`evaluate`, perhaps compiled, computes, with the gradient of the loss by native name (SPEC GRD-1 to GRD-5), and by the taps that have ``zeros``."""
    wanted = {name: parameter for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    wanted |= {f"inputs.{name}": inputs[name] for name in differentiable_inputs(part)}
    of_taps = {f"taps.{name}": zero for name, zero in zeros.items()}
    for tensor in (*wanted.values(), *of_taps.values()):
        tensor.stop_gradient = False
        tensor.clear_gradient(set_to_zero=False)
    output, loss, taps = run(model, loss_function, inputs, trace, zeros, recorded)
    if wanted:
        loss.backward()
    wanted |= {name: zero for name, zero in of_taps.items() if name.removeprefix("taps.") in taps}
    return Observation(output, loss, taps, {name: paddle.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in wanted.items()})
