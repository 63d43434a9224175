"""The classifier and those of its parts that can be run alone.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, C classes.
Every part takes its inputs by name (:func:`spec.inputs`) and ``tap(name, tensor)``, and returns its output.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from concord.backends.jax.layers import (
    POOLERS,
    POOLINGS,
    DotProductAttention,
    Embeddings,
    EncoderLayer,
    LayerNorm,
    Make,
    MultiHeadAttention,
    Tap,
    silent,
)
from concord.spec.config import EncoderConfig
from concord.spec.pooling import least_squares_by_dtype


class EncoderStack(nnx.Module):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""

    layer_class: ClassVar[Make] = EncoderLayer
    norm_class: ClassVar[Make] = LayerNorm

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.pad_id = config.pad_id
        self.layers = nnx.List(
            [
                self.layer_class(config, f"layers.{i}", param_dtype=param_dtype, rngs=rngs)
                for i in range(config.num_layers)
            ]
        )
        self.final_norm = (
            self.norm_class(config, param_dtype=param_dtype, rngs=rngs) if config.final_norm else None
        )

    def __call__(self, embeddings: Array, input_ids: Array, tap: Tap = silent) -> Array:
        return self.encode(embeddings, self.real_tokens(input_ids), tap)

    def real_tokens(self, input_ids: Array) -> Array:
        return input_ids != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Array, real: Array, tap: Tap) -> Array:
        for layer in self.layers:
            x = layer(x, real, tap)
        return x if self.final_norm is None else tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    embeddings_class: ClassVar[Make] = Embeddings

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        self.embeddings = self.embeddings_class(config, "embeddings", param_dtype=param_dtype, rngs=rngs)

    def __call__(self, input_ids: Array, segment_ids: Array | None = None, tap: Tap = silent) -> Array:
        real = self.real_tokens(input_ids)
        return self.encode(self.embeddings(input_ids, segment_ids, real, tap), real, tap)


class PooledEncoder(Encoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D), or to (B, T * D)."""

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        self.pooling = POOLINGS[config.pooling]
        self.pooler = (
            nnx.Linear(config.d_model, config.d_model, use_bias=True, param_dtype=param_dtype, rngs=rngs)
            if config.pooler != "none"
            else None
        )
        self.activation = POOLERS[config.pooler]
        self.least_squares = least_squares_by_dtype(config)

    def __call__(self, input_ids: Array, segment_ids: Array | None = None, tap: Tap = silent) -> Array:
        real = self.real_tokens(input_ids)
        return self.pool(
            self.encode(self.embeddings(input_ids, segment_ids, real, tap), real, tap), real, tap
        )

    def pool(self, x: Array, real: Array, tap: Tap) -> Array:
        """Return the vector of each text, (B, D) or (B, T * D), of encoded tokens (B, T, D)."""
        pooled = tap("pooling", self.pooling(x, real))
        if self.pooler is not None:
            dense = tap("pooler.dense", self.pooler(pooled))
            pooled = tap("pooler.output", self.activation(dense))
        return tap("normalized", self.normalize(pooled)) if self.least_squares else pooled

    def normalize(self, x: Array) -> Array:
        squares, least = jnp.sum(x * x, axis=-1, keepdims=True), self.least_squares[str(x.dtype)]  # (B, 1)
        return x / jnp.sqrt(jnp.where(squares > least, squares, least))


class TextClassifier(PooledEncoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        features = config.d_model * (config.max_positions if config.pooling == "flatten" else 1)
        self.classifier = nnx.Linear(
            features, config.num_classes, use_bias=True, param_dtype=param_dtype, rngs=rngs
        )

    def __call__(self, input_ids: Array, segment_ids: Array | None = None, tap: Tap = silent) -> Array:
        return self.classify(super().__call__(input_ids, segment_ids, tap), tap)

    def classify(self, pooled: Array, tap: Tap) -> Array:
        """Return the logits (B, C) of pooled vectors."""
        return tap("logits", self.classifier(pooled))


class AttentionAlone(nnx.Module):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class: ClassVar[Make] = MultiHeadAttention

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.attention = self.attention_class(config, "attention", param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
        tap: Tap = silent,
    ) -> Array:
        return self.attention(query, key, value, key_mask, query_mask, tap)


class DotProductAlone(AttentionAlone):
    """Scaled dot-product attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    attention_class: ClassVar[Make] = DotProductAttention


PARTS = {
    "model": TextClassifier,
    "pooled": PooledEncoder,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}
