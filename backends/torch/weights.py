"""Canonical weights in and out: native names and layouts.

Canonical linear weights are (in, out); PyTorch keeps them as (out, in).
"""

import functools

import numpy as np
import torch
from torch import Tensor, nn

from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters
from concord.spec.precision import precision

NATIVE_LEAVES = {"table": "weight", "positions": "weight", "kernel": "weight", "bias": "bias", "gain": "weight", "offset": "bias"}


def native_name(name: str, kind: str) -> str:
    """Return the name of a parameter in the model: the path is canonical, the last word the framework's."""
    return f"{name.rpartition('.')[0]}.{NATIVE_LEAVES[kind]}"


def to_native(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a canonical array in the native layout."""
    return array.T if kind == "kernel" else array


def to_canonical(array: np.ndarray, kind: str) -> np.ndarray:
    """Return a native array in the canonical layout."""
    return array.T if kind == "kernel" else array


LAYER_NAMES = {".self_attn.out_proj.": ".attention.output.", ".linear1.": ".feed_forward.inner.", ".linear2.": ".feed_forward.outer."}


def explicit_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by native name, those of the framework's encoder layer by the names that the explicit one has."""
    found = {}
    for name, tensor in named.items():
        layer, stacked, leaf = name.rpartition(".self_attn.in_proj_")
        if stacked:  # (3 D, D) or (3 D,): query, key and value below each other
            found |= {f"{layer}.attention.{role}.{leaf}": rows for role, rows in zip(("query", "key", "value"), torch.chunk(tensor, 3, dim=0), strict=True)}
            continue
        found[functools.reduce(lambda path, names: path.replace(*names), LAYER_NAMES.items(), name)] = tensor
    return found


def load(model: nn.Module, config: EncoderConfig, weights: Weights, part: str) -> None:
    """Copy canonical weights into a model, rounding each to the model's dtype once (SPEC PRC-2, WGT-4)."""
    with torch.no_grad():
        named = explicit_names(dict(model.named_parameters()))
        for name, parameter in parameters(config, part).items():
            native = named[native_name(name, parameter.kind)]
            # ``copy_`` would reach float16 by way of float32.
            array = precision(str(native.dtype).removeprefix("torch.")).round(to_native(weights[name], parameter.kind))
            native.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by native name."""
    return dict(model.named_parameters())


def export(named: dict[str, Tensor], config: EncoderConfig, part: str) -> dict[str, np.ndarray]:
    """Return tensors that bear native names, a model's parameters or their gradients, as canonical arrays."""
    found, named = {}, explicit_names(named)
    for name, parameter in parameters(config, part).items():
        native = native_name(name, parameter.kind)
        if native in named:
            found[name] = np.ascontiguousarray(to_canonical(to_numpy(named[native]), parameter.kind))
    return found


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; the half precisions come as float32, exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
