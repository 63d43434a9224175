"""Canonical weights in and out: native names and layouts."""

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from concord.backends.weights import NAMINGS, FrameworkWeights


def named(model: keras.Model) -> dict[str, keras.Variable]:
    """Return the parameters of a model by native name."""
    return {variable.path.partition("/")[2].replace("/", "."): variable for variable in model.weights}


def trained(model: keras.Model) -> dict[str, keras.Variable]:
    """Return those that a gradient is taken by."""
    return {name: parameter for name, parameter in named(model).items() if parameter.trainable}


class NativeWeights(FrameworkWeights):
    """Keras': a linear weight is (in, out) (:class:`concord.backends.weights.FrameworkWeights`)."""

    naming = NAMINGS["tf"]
    named = staticmethod(named)
    trained = staticmethod(trained)

    def assign(self, parameter: keras.Variable, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        # Not tf.cast, which reaches float16 by way of float32 and flushes subnormal numbers to zero.
        parameter.assign(tf.constant(array, dtype=parameter.dtype))

    def to_numpy(self, tensor: Tensor | keras.Variable) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        array = tf.convert_to_tensor(tensor).numpy()
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array
