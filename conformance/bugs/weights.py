"""Bugs of conversion: a weight is wrong (SPEC WGT-1 to WGT-4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import Change, Changes, weight, weights
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights
from concord.spec.precision import precision

NAME = "layers.0.attention"


def exchanged(first: str, second: str) -> Change:
    """Return the change that exchanges two words in the names of weights."""

    def partner(name: str) -> str:
        return name.replace(first, second) if first in name else name.replace(second, first)

    return weights(
        lambda config, given: {
            name: given[partner(name)] for name in given if first in name or second in name
        }
    )


def heads_rolled(config: EncoderConfig, given: Weights) -> dict[str, Array]:
    """Give each head the query of another."""
    return {
        f"{NAME}.query.{leaf}": np.roll(given[f"{NAME}.query.{leaf}"], config.head_dim, axis=-1)
        for leaf in ("weight", "bias")
    }


def cut_from_fused(config: EncoderConfig, given: Weights, prefix: str, role: str, leaf: str) -> Array:
    """Return the third of a fused weight, which holds query, key and value for each head, that a role
    would get.
    """
    roles = ("query", "key", "value")
    parts = [given[f"{prefix}.{one}.{leaf}"] for one in roles]
    split = [part.reshape(*part.shape[:-1], config.num_heads, config.head_dim) for part in parts]
    fused = np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], 3 * config.d_model)
    return np.split(fused, 3, axis=-1)[roles.index(role)]


def fused_by_head(config: EncoderConfig, given: Weights) -> dict[str, Array]:
    """Cut a fused weight that holds query, key and value for each head into thirds."""
    return {
        f"{NAME}.{role}.{leaf}": cut_from_fused(config, given, NAME, role, leaf)
        for role in ("query", "key", "value")
        for leaf in ("weight", "bias")
    }


def features_first(config: EncoderConfig, given: Weights) -> dict[str, Array]:
    """Take the rows of the flattening head's weight for (D, T) where they are (T, D)."""
    array = given["classifier.weight"]
    return {
        "classifier.weight": array.reshape(config.max_positions, config.d_model, -1)
        .swapaxes(0, 1)
        .reshape(array.shape)
    }


def one_element(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return the change of a single element, one of middling size."""

    def changed(array: Array) -> Array:
        flat = array.reshape(-1)
        place = int(np.argsort(abs(flat))[len(flat) // 2])
        flat[place] = change(flat[place : place + 1])[0]
        return array

    return changed


EDITS: Changes = {
    "weight_transposed": weight(f"{NAME}.key.weight", np.transpose),
    "weight_of_pooler_transposed": weight("pooler.weight", np.transpose),
    "weight_column_major": weight(
        "layers.0.feed_forward.inner.weight",
        lambda array: array.reshape(-1).reshape(array.shape, order="F"),
    ),
    "weight_heads_permuted": weights(heads_rolled),
    "weight_fused_by_head": weights(fused_by_head),
    "weight_rows_swapped": weight(f"{NAME}.value.weight", lambda array: array[[1, 0, *range(2, len(array))]]),
    "weight_element_off": weight(f"{NAME}.output.weight", one_element(lambda x: x * 1.01)),
    "weight_element_in_bfloat16": weight(f"{NAME}.output.weight", one_element(precision("bfloat16").round)),
    "weight_sign_lost": weight("classifier.weight", one_element(np.negative)),
    "weight_stale_layer": weights(
        lambda config, given: {name: given[name.replace("layers.1.", "layers.0.")] for name in given}
    ),
    "weight_bias_missing": weight("layers.0.feed_forward.outer.bias", np.zeros_like),
    "weight_projection_biases_missing": weight("layers.*.attention.[qkv]*.bias", np.zeros_like),
    "weight_classifier_bias_missing": weight("classifier.bias", np.zeros_like),
    "weight_norm_not_loaded": weights(
        lambda config, given: {
            "layers.0.norm1.weight": np.ones(config.d_model),
            "layers.0.norm1.bias": np.zeros(config.d_model),
        }
    ),
    "weight_segment_table_zero": weight("embeddings.segment.weight", np.zeros_like),
    "weight_classes_permuted": weight("classifier.*", lambda array: array[..., ::-1]),
    "weight_of_flattened_features_first": weights(features_first),
}
