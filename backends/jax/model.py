"""The classifier and its parts (inputs: :func:`concord.spec.tensors.inputs`).

Shapes as in :mod:`concord.backends.jax.layers`, with C classes.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.jax.layers import (
    EXPLICIT,
    LAYERS,
    POOLERS,
    POOLINGS,
    MultiHeadAttention,
    dtype_name,
)
from concord.backends.library_support import KeptRows, Layers
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig
from concord.spec.pooling import least_squares


class EncoderStack(Tapped, nnx.Module):
    """Encoder layers on given embeddings (part ``stack``): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT, **kwargs: Any) -> None:
        self.pad_id = config.pad_id
        layer = LAYERS[config.norm_placement]
        self.layers = nnx.List([layer(config, make, **kwargs) for _ in range(config.num_layers)])
        # No published source has a final norm here (NRM-6).
        self.final_norm = make.norm(config, **kwargs) if config.final_norm else None

    def __call__(self, embeddings: Array, input_ids: Array) -> Array:
        return self.encode(embeddings, self.real_tokens(input_ids))

    def real_tokens(self, input_ids: Array) -> Array:
        return input_ids != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Array, real: Array | KeptRows) -> Array:
        for layer in self.layers:
            x = layer(x, real)
        return x if self.final_norm is None else self.tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT, **kwargs: Any) -> None:
        super().__init__(config, make, **kwargs)
        self.embeddings = make.embeddings(config, make, **kwargs)

    def __call__(self, input_ids: Array, segment_ids: Array | None = None) -> Array:
        real = self.real_tokens(input_ids)
        return self.encode(self.embeddings(input_ids, segment_ids, real), real)


class PooledEncoder(Encoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D) or (B, T * D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT, **kwargs: Any) -> None:
        super().__init__(config, make, **kwargs)
        self.pooling = POOLINGS[config.pooling]
        width, pooler = config.d_model, config.pooler
        self.pooler = nnx.Linear(width, width, use_bias=True, **kwargs) if pooler != "none" else None
        self.activation = POOLERS[pooler]
        normalized = config.length_epsilon is not None
        self.least_squares = least_squares(config, dtype_name(**kwargs)) if normalized else 0.0

    def __call__(self, input_ids: Array, segment_ids: Array | None = None) -> Array:
        return self.pool(super().__call__(input_ids, segment_ids), self.real_tokens(input_ids))

    def pool(self, x: Array, real: Array) -> Array:
        pooled = self.tap("pooling", self.pooling(x, real))
        if self.pooler is not None:
            dense = self.tap("pooler.dense", self.pooler(pooled))
            pooled = self.tap("pooler.output", self.activation(dense))
        return self.tap("normalized", self.normalize(pooled)) if self.least_squares else pooled

    def normalize(self, x: Array) -> Array:
        # Compare before taking the root, whose derivative at a zero vector would be infinite.
        squares = jnp.sum(x * x, axis=-1, keepdims=True)  # (B, 1)
        return x / jnp.sqrt(jnp.where(squares > self.least_squares, squares, self.least_squares))


class TextClassifier(PooledEncoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT, **kwargs: Any) -> None:
        super().__init__(config, make, **kwargs)
        features = config.d_model * (config.max_positions if config.pooling == "flatten" else 1)
        self.classifier = nnx.Linear(features, config.num_classes, use_bias=True, **kwargs)

    def __call__(self, input_ids: Array, segment_ids: Array | None = None) -> Array:
        return self.classify(super().__call__(input_ids, segment_ids))

    def classify(self, pooled: Array) -> Array:
        return self.tap("logits", self.classifier(pooled))


class AttentionAlone(nnx.Module):
    """Multi-head attention (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT, **kwargs: Any) -> None:
        self.attention = self.build_attention(config, make, **kwargs)

    def build_attention(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> nnx.Module:
        return MultiHeadAttention(config, make, **kwargs)

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
    ) -> Array:
        return self.attention(query, key, value, key_mask, query_mask)


class DotProductAlone(AttentionAlone):
    """Attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def build_attention(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> nnx.Module:
        return make.dot_product[config.head_computation](config, **kwargs)


PARTS = {
    "model": TextClassifier,
    "pooled": PooledEncoder,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}
