"""Canonical weights in and out: native names and layouts.

Canonical linear weights are (in, out); Keras keeps them as (in, out) too.
"""

import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters

NATIVE_LEAVES = {"table": "embeddings", "positions": "embeddings", "kernel": "kernel", "bias": "bias", "gain": "gamma", "offset": "beta"}


def native_name(name: str, kind: str) -> str:
    """Return the name of a parameter in the model: the path is canonical, the last word the framework's."""
    return f"{name.rpartition('.')[0]}/{NATIVE_LEAVES[kind]}"


def to_native(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a canonical array in the native layout."""
    return array


def to_canonical(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a native array in the canonical layout."""
    return array


def load(model: layers.Layer, config: EncoderConfig, weights: Weights, part: str) -> None:
    """Copy canonical weights into a model, rounding each to the model's dtype once (SPEC PRC-2, WGT-4)."""
    named = {variable.path: variable for variable in model.weights}
    for name, parameter in parameters(config, part).items():
        array = to_native(weights[name], parameter.kind)
        variable = named[native_name(name, parameter.kind)]
        # Not tf.cast, which reaches float16 by way of float32 and flushes subnormal numbers to zero.
        variable.assign(tf.constant(array, dtype=variable.dtype))


def tensors_of(model: layers.Layer) -> dict[str, Tensor]:
    """Return the parameters of a model by native name."""
    return {variable.path: variable.value for variable in model.weights}


def export(named: dict[str, Tensor], config: EncoderConfig, part: str) -> dict[str, np.ndarray]:
    """Return tensors that bear native names, a model's parameters or their gradients, as canonical arrays."""
    found = {}
    for name, parameter in parameters(config, part).items():
        native = native_name(name, parameter.kind)
        if native in named:
            found[name] = np.ascontiguousarray(to_canonical(to_numpy(named[native]), parameter.kind))
    return found


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; the half precisions come as float32, exactly."""
    array = tensor.numpy()
    return array.astype(np.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else array
