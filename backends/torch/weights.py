"""Canonical weights in and out: native names and layouts."""

import numpy as np
import torch
from torch import Tensor, nn

from concord.backends.torch import library
from concord.backends.weights import NAMINGS, FrameworkWeights
from concord.spec.precision import precision


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by native name."""
    return dict(model.named_parameters())


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return those that a gradient is taken by."""
    return {name: parameter for name, parameter in named(model).items() if parameter.requires_grad}


class NativeWeights(FrameworkWeights):
    """PyTorch's: a linear weight is (out, in) (:class:`concord.backends.weights.FrameworkWeights`)."""

    naming = NAMINGS["torch"]
    named = staticmethod(named)
    trained = staticmethod(trained)
    explicit_names = staticmethod(library.explicit_names)

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        # ``copy_`` would reach float16 by way of float32.
        parameter.detach().copy_(
            torch.from_numpy(precision(str(parameter.dtype).removeprefix("torch.")).round(array))
        )

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
