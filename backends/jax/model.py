"""The classifier and those of its parts that can be run alone.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, C classes.
Every part takes its inputs by name (:func:`spec.inputs`) and ``tap(name, tensor)``, and returns its output.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import zeros

from concord.backends.jax.layers import DotProductAttention, Embeddings, EncoderLayer, LayerNorm, MultiHeadAttention, Tap
from concord.spec.config import EncoderConfig

Inputs = Mapping[str, Array]


class EncoderStack(nnx.Module):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""

    layer_class = EncoderLayer
    norm_class = LayerNorm

    def __init__(self, config: EncoderConfig) -> None:
        self.pad_id = config.pad_id
        self.layers = nnx.List([self.layer_class(config, f"layers.{i}") for i in range(config.num_layers)])
        self.final_norm = self.norm_class(config) if config.final_norm else None

    def __call__(self, inputs: Inputs, tap: Tap) -> Array:
        return self.encode(inputs["embeddings"], self.real_tokens(inputs), tap)

    def real_tokens(self, inputs: Inputs) -> Array:
        return inputs["input_ids"] != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Array, real: Array, tap: Tap) -> Array:
        for layer in self.layers:
            x = layer(x, real, tap)
        return x if self.final_norm is None else tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    embeddings_class = Embeddings

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config, "embeddings")

    def __call__(self, inputs: Inputs, tap: Tap) -> Array:
        real = self.real_tokens(inputs)
        return self.encode(self.embeddings(inputs["input_ids"], inputs.get("segment_ids"), real, tap), real, tap)


class TextClassifier(Encoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-3): (B, T) to (B, C)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.flatten = config.pooling == "flatten"
        features = config.d_model * config.max_positions if self.flatten else config.d_model
        width, rngs = config.d_model, nnx.Rngs(0)
        self.pooler = nnx.Linear(width, width, use_bias=True, kernel_init=zeros, rngs=rngs) if config.pooler == "tanh" else None
        self.classifier = nnx.Linear(features, config.num_classes, use_bias=True, kernel_init=zeros, rngs=rngs)

    def __call__(self, inputs: Inputs, tap: Tap) -> Array:
        x = super().__call__(inputs, tap)  # (B, T, D)
        pooled = tap("pooling", jnp.reshape(x, (x.shape[0], -1)) if self.flatten else x[:, 0])  # (B, D) or (B, T * D)
        if self.pooler is not None:
            dense = tap("pooler.dense", self.pooler(pooled))
            pooled = tap("pooler.output", jnp.tanh(dense))
        return tap("logits", self.classifier(pooled))


class AttentionAlone(nnx.Module):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class = MultiHeadAttention

    def __init__(self, config: EncoderConfig) -> None:
        self.attention = self.attention_class(config, "attention")

    def __call__(self, inputs: Inputs, tap: Tap) -> Array:
        masks = inputs.get("key_mask"), inputs.get("query_mask")
        return self.attention(inputs["query"], inputs["key"], inputs["value"], *masks, tap)


class DotProductAlone(AttentionAlone):
    """Scaled dot-product attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    attention_class = DotProductAttention


PARTS = {
    "model": TextClassifier,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}
