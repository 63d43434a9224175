"""Canonical weights in and out: native names and layouts."""

import jax
import numpy as np
from flax import nnx
from jax import Array

from concord.backends.weights import NAMINGS, FrameworkWeights


def named(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return the parameters of a model by native name."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    }


def trained(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return those that a gradient is taken by."""
    return {name: parameter for name, parameter in named(model).items() if isinstance(parameter, nnx.Param)}


class NativeWeights(FrameworkWeights):
    """Flax': a linear weight is (in, out) (:class:`concord.backends.weights.FrameworkWeights`)."""

    naming = NAMINGS["jax"]
    named = staticmethod(named)
    trained = staticmethod(trained)

    def assign(self, parameter: nnx.Variable, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        with np.errstate(over="ignore"):  # What float16 cannot hold becomes infinite.
            parameter.set_value(jax.device_put(array.astype(parameter.dtype), parameter.sharding))

    def to_numpy(self, tensor: Array | nnx.Variable) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        array = np.asarray(tensor[...])
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array
