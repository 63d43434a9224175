"""The classifier and those of its parts that can be run alone.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, C classes.
Every part takes its inputs by name (:func:`spec.inputs`) and ``tap(name, tensor)``, and returns its output.
"""

from collections.abc import Mapping

import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from concord.backends.tf.layers import DotProductAttention, Embeddings, EncoderLayer, LayerNorm, MultiHeadAttention, Tap
from concord.spec.config import EncoderConfig

Inputs = Mapping[str, Tensor]


class EncoderStack(layers.Layer):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""

    layer_class = EncoderLayer
    norm_class = LayerNorm

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pad_id = config.pad_id
        self.layers = [self.layer_class(config, f"layers.{i}") for i in range(config.num_layers)]
        self.final_norm = self.norm_class(config, "final_norm") if config.final_norm else None
        self.built = True

    def call(self, inputs: Inputs, tap: Tap) -> Tensor:
        return self.encode(inputs["embeddings"], self.real_tokens(inputs), tap)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        return inputs["input_ids"] != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Tensor, real: Tensor, tap: Tap) -> Tensor:
        for layer in self.layers:
            x = layer(x, real, tap=tap)
        return x if self.final_norm is None else tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    embeddings_class = Embeddings

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config, "embeddings")

    def call(self, inputs: Inputs, tap: Tap) -> Tensor:
        real = self.real_tokens(inputs)
        return self.encode(self.embeddings(inputs["input_ids"], inputs.get("segment_ids"), real, tap=tap), real, tap)


class TextClassifier(Encoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-3): (B, T) to (B, C)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.flatten = config.pooling == "flatten"
        features = config.d_model * config.max_positions if self.flatten else config.d_model
        self.pooler = layers.Dense(config.d_model, activation=None, use_bias=True, name="pooler") if config.pooler == "tanh" else None
        if self.pooler is not None:
            self.pooler.build((None, config.d_model))
        self.classifier = layers.Dense(config.num_classes, activation=None, use_bias=True, name="classifier")
        self.classifier.build((None, features))

    def call(self, inputs: Inputs, tap: Tap) -> Tensor:
        x = super().call(inputs, tap)  # (B, T, D)
        pooled = tap("pooling", tf.reshape(x, (x.shape[0], -1)) if self.flatten else x[:, 0])  # (B, D) or (B, T * D)
        if self.pooler is not None:
            dense = tap("pooler.dense", self.pooler(pooled))
            pooled = tap("pooler.output", tf.tanh(dense))
        return tap("logits", self.classifier(pooled))


class AttentionAlone(layers.Layer):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class = MultiHeadAttention

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = self.attention_class(config, "attention")
        self.built = True

    def call(self, inputs: Inputs, tap: Tap) -> Tensor:
        masks = {"key_mask": inputs.get("key_mask"), "query_mask": inputs.get("query_mask")}
        return self.attention(inputs["query"], inputs["key"], inputs["value"], **masks, tap=tap)


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
