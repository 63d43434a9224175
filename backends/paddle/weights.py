"""Canonical weights in and out: native names and layouts."""

import numpy as np
import paddle
from paddle import Tensor, nn

from concord.backends.paddle import library
from concord.backends.weights import NAMINGS, FrameworkWeights


def named(model: nn.Layer) -> dict[str, Tensor]:
    """Return the parameters of a model by native name."""
    return dict(model.named_parameters())


def trained(model: nn.Layer) -> dict[str, Tensor]:
    """Return those that a gradient is taken by."""
    return {name: parameter for name, parameter in named(model).items() if not parameter.stop_gradient}


class NativeWeights(FrameworkWeights):
    """PaddlePaddle's: a linear weight is (in, out) (:class:`concord.backends.weights.FrameworkWeights`)."""

    naming = NAMINGS["paddle"]
    named = staticmethod(named)
    trained = staticmethod(trained)
    explicit_names = staticmethod(library.explicit_names)

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        with paddle.no_grad():
            parameter.set_value(paddle.to_tensor(array, place=parameter.place).astype(parameter.dtype))

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        tensor = tensor.detach().cpu()
        return (
            tensor.astype(paddle.float32) if tensor.dtype in (paddle.bfloat16, paddle.float16) else tensor
        ).numpy()
