"""Canonical weights in and out: native names and layouts.

Canonical linear weights are (in, out); Flax NNX keeps them so too.
"""

import jax
import numpy as np
from flax import nnx
from jax import Array

from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters

NATIVE_LEAVES = {"table": "embedding", "positions": "embedding", "kernel": "kernel", "bias": "bias", "gain": "scale", "offset": "bias"}


def native_name(name: str, kind: str) -> str:
    """Return the name of a parameter in the model: the path is canonical, the last word the framework's."""
    return f"{name.rpartition('.')[0]}.{NATIVE_LEAVES[kind]}"


def to_native(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a canonical array in the native layout."""
    return array


def to_canonical(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a native array in the canonical layout."""
    return array


def load(model: nnx.Module, config: EncoderConfig, weights: Weights, part: str) -> None:
    """Copy canonical weights into a model, rounding each to the model's dtype once (SPEC PRC-2, WGT-4)."""
    state = nnx.state(model)
    named = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    for name, parameter in parameters(config, part).items():
        array = to_native(weights[name], parameter.kind)
        variable = named[native_name(name, parameter.kind)]
        with np.errstate(over="ignore"):  # What float16 cannot hold becomes infinite.
            variable.set_value(jax.device_put(array.astype(variable.dtype), variable.sharding))
    nnx.update(model, state)


def tensors_of(model: nnx.Module) -> dict[str, Array]:
    """Return the parameters of a model by native name."""
    return {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}


def export(named: dict[str, Array], config: EncoderConfig, part: str) -> dict[str, np.ndarray]:
    """Return tensors that bear native names, a model's parameters or their gradients, as canonical arrays."""
    found = {}
    for name, parameter in parameters(config, part).items():
        native = native_name(name, parameter.kind)
        if native in named:
            found[name] = np.ascontiguousarray(to_canonical(to_numpy(named[native]), parameter.kind))
    return found


def to_numpy(tensor: Array) -> np.ndarray:
    """Return a tensor as an array; the half precisions come as float32, exactly."""
    array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
