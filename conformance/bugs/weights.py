"""Bugs of conversion: a weight is wrong (SPEC WGT-1 to WGT-4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Edits, weight, weights
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights
from concord.spec.precision import precision

NAME = "layers.0.attention"


def exchanged(r: Request, first: str, second: str) -> Request:
    """Exchange two words in the names of weights."""

    def partner(name: str) -> str:
        return name.replace(first, second) if first in name else name.replace(second, first)

    given = r.weights
    return weights(r, {name: given[partner(name)] for name in given if first in name or second in name})


def weight_heads_permuted(r: Request) -> Request:
    """Give each head the query of another."""
    names = [f"{NAME}.query.{leaf}" for leaf in ("weight", "bias")]
    return weights(r, {name: np.roll(r.weights[name], r.config.head_dim, axis=-1) for name in names})


def cut_from_fused(config: EncoderConfig, given: Weights, prefix: str, role: str, leaf: str) -> Array:
    """Return the third of a fused weight, which holds query, key and value for each head, that a role
    would get.
    """
    roles = ("query", "key", "value")
    parts = [given[f"{prefix}.{one}.{leaf}"] for one in roles]
    split = [part.reshape(*part.shape[:-1], config.num_heads, config.head_dim) for part in parts]
    fused = np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], 3 * config.d_model)
    return np.split(fused, 3, axis=-1)[roles.index(role)]


def weight_fused_by_head(r: Request) -> Request:
    """Cut a fused weight that holds query, key and value for each head into thirds."""
    new = {
        f"{NAME}.{role}.{leaf}": cut_from_fused(r.config, r.weights, NAME, role, leaf)
        for role in ("query", "key", "value")
        for leaf in ("weight", "bias")
    }
    return weights(r, new)


def weight_of_flattened_features_first(r: Request) -> Request:
    """Take the rows of the flattening head's weight for (D, T) where they are (T, D)."""
    array = r.weights["classifier.weight"]
    apart = array.reshape(r.config.max_positions, r.config.d_model, -1)
    return weights(r, {"classifier.weight": apart.swapaxes(0, 1).reshape(array.shape)})


def weight_norm_not_loaded(r: Request) -> Request:
    norm, width = "layers.0.norm1", r.config.d_model
    return weights(r, {f"{norm}.weight": np.ones(width), f"{norm}.bias": np.zeros(width)})


def element(r: Request, name: str, change: Callable[[Array], Array]) -> Request:
    """Change a single element, one of middling size."""

    def changed(array: Array) -> Array:
        flat = array.reshape(-1)
        place = int(np.argsort(abs(flat))[len(flat) // 2])
        flat[place] = change(flat[place : place + 1])[0]
        return array

    return weight(r, name, changed)


def zeroed(r: Request, name: str) -> Request:
    return weight(r, name, np.zeros_like)


def transposed(r: Request, name: str) -> Request:
    return weight(r, name, np.transpose)


EDITS: Edits = {
    "weight_column_major": lambda r: weight(
        r,
        "layers.0.feed_forward.inner.weight",
        lambda array: array.reshape(-1).reshape(array.shape, order="F"),
    ),
    "weight_rows_swapped": lambda r: weight(
        r, f"{NAME}.value.weight", lambda array: array[[1, 0, *range(2, len(array))]]
    ),
    "weight_element_off": lambda r: element(r, f"{NAME}.output.weight", lambda x: x * 1.01),
    "weight_element_in_bfloat16": lambda r: element(r, f"{NAME}.output.weight", precision("bfloat16").round),
    "weight_sign_lost": lambda r: element(r, "classifier.weight", np.negative),
    "weight_stale_layer": lambda r: weights(
        r, {name: r.weights[name.replace("layers.1.", "layers.0.")] for name in r.weights}
    ),
    "weight_classes_permuted": lambda r: weight(r, "classifier.*", lambda array: array[..., ::-1]),
}
