"""Bugs of conversion: a weight is wrong (SPEC WGT-1 to WGT-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Array, Bug, group, weight, weights
from concord.conformance.bugs.bug import Change as Changed
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights
from concord.spec.precision import precision

NAME = "layers.0.attention"


def exchanged(first: str, second: str) -> Changed:
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


def loaded(name: str, what: str, tap: str, change: Changed, **fields: Any) -> Bug:
    """Return the bug of weights that shows first at a tap."""
    return group("weights", first=(tap,)).bug(name, what, change, **fields)


BUGS = (
    loaded(
        "weight_transposed",
        "A square weight is transposed.",
        f"{NAME}.key",
        weight(f"{NAME}.key.weight", np.transpose),
        cause="transposed_weight",
    ),
    loaded(
        "weight_of_pooler_transposed",
        "The pooler's weight is transposed.",
        "pooler.dense",
        weight("pooler.weight", np.transpose),
        cause="transposed_weight",
    ),
    loaded(
        "weight_column_major",
        "A weight is read in column-major order.",
        "layers.0.feed_forward.inner",
        weight(
            "layers.0.feed_forward.inner.weight",
            lambda array: array.reshape(-1).reshape(array.shape, order="F"),
        ),
        cause="weight_in_wrong_order",
        clause="WGT-2",
    ),
    loaded(
        "weight_heads_permuted",
        "Each head has the query of another.",
        f"{NAME}.query",
        weights(heads_rolled),
        cause="heads_permuted",
        clause="ATT-2",
    ),
    loaded(
        "weight_fused_by_head",
        "A fused weight that holds query, key and value head by head is cut into thirds.",
        f"{NAME}.query",
        weights(fused_by_head),
        cause="fused_weight",
        clause="WGT-1",
    ),
    loaded(
        "weight_query_and_key_swapped",
        "Query and key have each other's weights.",
        f"{NAME}.query",
        exchanged(".query.", ".key."),
        cause="swapped_weights",
        clause="WGT-1",
    ),
    loaded(
        "weight_key_and_value_swapped",
        "Key and value have each other's weights.",
        f"{NAME}.key",
        exchanged(".key.", ".value."),
        cause="swapped_weights",
        clause="WGT-1",
    ),
    loaded(
        "weight_rows_swapped",
        "Two rows of a value weight have changed places.",
        f"{NAME}.value",
        weight(f"{NAME}.value.weight", lambda array: array[[1, 0, *range(2, len(array))]]),
        cause="weight_permuted",
        clause="WGT-2",
    ),
    loaded(
        "weight_element_off",
        "One element of a weight is off by a hundredth.",
        f"{NAME}.output",
        weight(f"{NAME}.output.weight", one_element(lambda x: x * 1.01)),
        cause="weight_element",
        clause="WGT-4",
    ),
    loaded(
        "weight_element_in_bfloat16",
        "One element of a weight was rounded to bfloat16.",
        f"{NAME}.output",
        weight(f"{NAME}.output.weight", one_element(lambda x: precision("bfloat16").round(x))),
        cause="weight_element",
        clause="WGT-4",
    ),
    loaded(
        "weight_sign_lost",
        "The sign of one element of a weight is lost.",
        "logits",
        weight("classifier.weight", one_element(np.negative)),
        cause="weight_element",
        clause="WGT-4",
    ),
    loaded(
        "weight_stale_layer",
        "Layer 1 has the weights of layer 0.",
        "layers.1.attention.query",
        weights(
            lambda config, given: {name: given[name.replace("layers.1.", "layers.0.")] for name in given}
        ),
        input="two layers",
        alone=True,
        cause="weights_of_another_layer",
        clause="WGT-1",
    ),
    loaded(
        "weight_layers_reversed",
        "Layers are loaded in reverse order.",
        f"{NAME}.query",
        exchanged("layers.0.", "layers.1."),
        input="two layers",
        cause="weights_of_another_layer",
        clause="WGT-1",
    ),
    loaded(
        "weight_bias_missing",
        "The bias of a linear layer is not loaded, and zero.",
        "layers.0.feed_forward.outer",
        weight("layers.0.feed_forward.outer.bias", np.zeros_like),
        cause="missing_bias",
        clause="WGT-2",
    ),
    loaded(
        "weight_projection_biases_missing",
        "Query, key and value have no bias.",
        f"{NAME}.query",
        weight("layers.*.attention.[qkv]*.bias", np.zeros_like),
        cause="missing_bias",
        clause="WGT-2",
    ),
    loaded(
        "weight_classifier_bias_missing",
        "The classifier's bias is not loaded, and zero.",
        "logits",
        weight("classifier.bias", np.zeros_like),
        cause="missing_bias",
        clause="WGT-2",
    ),
    loaded(
        "weight_gain_and_offset_swapped",
        "Gain and offset of a norm have changed places.",
        "layers.0.norm1",
        exchanged("layers.0.norm1.weight", "layers.0.norm1.bias"),
        cause="norm_gain_and_offset_swapped",
        clause="WGT-1",
    ),
    loaded(
        "weight_norms_swapped",
        "The two norms of a layer have changed places.",
        "layers.0.norm1",
        exchanged(".norm1.", ".norm2."),
        cause="norm_sharing",
        clause="WGT-1",
    ),
    loaded(
        "weight_norm_not_loaded",
        "A norm's weights bear other names, and it keeps gain 1 and offset 0.",
        "layers.0.norm1",
        weights(
            lambda config, given: {
                "layers.0.norm1.weight": np.ones(config.d_model),
                "layers.0.norm1.bias": np.zeros(config.d_model),
            }
        ),
        cause="norm_gain_and_offset_missing",
        clause="WGT-1",
    ),
    loaded(
        "weight_segment_table_zero",
        "The segment table is not loaded, and zero.",
        "embeddings.segment",
        weight("embeddings.segment.weight", np.zeros_like),
        cause="segments_ignored",
        clause="WGT-1",
    ),
    loaded(
        "weight_classes_permuted",
        "The classes are in another order.",
        "logits",
        weight("classifier.*", lambda array: array[..., ::-1]),
        cause="classes_reversed",
        clause="WGT-1",
    ),
    loaded(
        "weight_of_flattened_features_first",
        "The flattening head's weight has features before tokens.",
        "logits",
        weights(features_first),
        variant="tf1-text-classifier",
        cause="flatten_order",
        clause="HED-1",
    ),
)
