"""The names and layouts of Hugging Face's ``BertForSequenceClassification``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from backends.interface import Unsupported
from spec.config import EncoderConfig
from spec.parameters import Weights, parameters

PLACES = {
    "embeddings.token": "bert.embeddings.word_embeddings",
    "embeddings.position": "bert.embeddings.position_embeddings",
    "embeddings.segment": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feed_forward.inner": "intermediate.dense",
    "feed_forward.outer": "output.dense",
    "norm2": "output.LayerNorm",
    "pooler": "bert.pooler.dense",
    "classifier": "classifier",
}
"""Canonical place to the place there, within a layer where it is one of a layer's."""

FIXED = {
    "token_padding_forward": "stored",
    "embedding_scale": "one",
    "embedding_norm": True,
    "positions": "learned",
    "position_start": 0,
    "position_of_padding": "counted",
    "mask_assignment": "per_sample",
    "mask_fill": "add",
    "query_mask": "none",
    "qkv_bias": True,
    "qkv_activation": "none",
    "output_projection": True,
    "norm_placement": "post",
    "norm_epsilon_placement": "inside",
    "norm_variance": "biased",
    "norm_sharing": "separate",
    "final_norm": False,
    "activation": "gelu_erf",
    "pooling": "first",
    "pooler": "tanh",
}
"""The options that BERT is the family's member with."""


def refuse_others(config: EncoderConfig, peer: str) -> None:
    """Refuse a model that is no BERT.

    Raises:
        Unsupported: naming every option in the way.
    """
    wrong = [f"{name}={getattr(config, name)!r}" for name, value in FIXED.items() if getattr(config, name) != value]
    if not config.num_segments:
        wrong.append("num_segments=0")
    if wrong:
        raise Unsupported(f"{peer} is a BERT and cannot express {', '.join(wrong)}")


def native_names(config: EncoderConfig) -> Iterator[tuple[str, str, bool]]:
    """Yield canonical name, name there, and whether the array is transposed there."""
    for name, parameter in parameters(config, "model").items():
        place, _, leaf = name.rpartition(".")
        if place.startswith("layers."):
            _, number, inner = place.split(".", 2)
            native = f"bert.encoder.layer.{number}.{PLACES[inner]}"
        else:
            native = PLACES[place]
        yield name, f"{native}.{leaf}", parameter.kind == "kernel"


def to_native(config: EncoderConfig, weights: Weights) -> dict[str, NDArray[np.floating]]:
    """Return weights under the names, and in the layout, that they have there."""
    return {native: np.ascontiguousarray(weights[name].T if transposed else weights[name]) for name, native, transposed in native_names(config)}


def to_canonical(config: EncoderConfig, arrays: Weights) -> dict[str, NDArray[np.floating]]:
    """Return weights by canonical name and layout."""
    return {name: np.ascontiguousarray(arrays[native].T if transposed else arrays[native]) for name, native, transposed in native_names(config) if native in arrays}
