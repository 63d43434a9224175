"""The classifier and those of its parts that can be run alone.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, C classes.
Every part takes its inputs by name (:func:`spec.inputs`) and ``tap(name, tensor)``, and returns its output.
"""

from typing import ClassVar

import paddle
from paddle import Tensor, nn

from concord.backends.paddle.layers import (
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
from concord.backends.paddle.scalars import filled
from concord.spec.config import EncoderConfig
from concord.spec.pooling import least_squares_by_dtype


class EncoderStack(nn.Layer):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""

    layer_class: ClassVar[Make] = EncoderLayer
    norm_class: ClassVar[Make] = LayerNorm

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pad_id = config.pad_id
        self.layers = nn.LayerList(
            [self.layer_class(config, f"layers.{i}") for i in range(config.num_layers)]
        )
        self.final_norm = self.norm_class(config) if config.final_norm else None

    def forward(self, embeddings: Tensor, input_ids: Tensor, tap: Tap = silent) -> Tensor:
        return self.encode(embeddings, self.real_tokens(input_ids), tap)

    def real_tokens(self, input_ids: Tensor) -> Tensor:
        return input_ids != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Tensor, real: Tensor, tap: Tap) -> Tensor:
        for layer in self.layers:
            x = layer(x, real, tap)
        return x if self.final_norm is None else tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    embeddings_class: ClassVar[Make] = Embeddings

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config, "embeddings")

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None, tap: Tap = silent) -> Tensor:
        real = self.real_tokens(input_ids)
        return self.encode(self.embeddings(input_ids, segment_ids, real, tap), real, tap)


class PooledEncoder(Encoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D), or to (B, T * D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.pooling = POOLINGS[config.pooling]
        self.pooler = (
            nn.Linear(config.d_model, config.d_model, bias_attr=True) if config.pooler != "none" else None
        )
        self.activation = POOLERS[config.pooler]
        self.least_squares = least_squares_by_dtype(config)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None, tap: Tap = silent) -> Tensor:
        real = self.real_tokens(input_ids)
        return self.pool(
            self.encode(self.embeddings(input_ids, segment_ids, real, tap), real, tap), real, tap
        )

    def pool(self, x: Tensor, real: Tensor, tap: Tap) -> Tensor:
        """Return the vector of each text, (B, D) or (B, T * D), of encoded tokens (B, T, D)."""
        pooled = tap("pooling", self.pooling(x, real))
        if self.pooler is not None:
            dense = tap("pooler.dense", self.pooler(pooled))
            pooled = tap("pooler.output", self.activation(dense))
        return tap("normalized", self.normalize(pooled)) if self.least_squares else pooled

    def normalize(self, x: Tensor) -> Tensor:
        squares, least = (
            paddle.sum(x * x, axis=-1, keepdim=True),
            self.least_squares[str(x.dtype).removeprefix("paddle.")],
        )  # (B, 1)
        return x / paddle.sqrt(paddle.where(squares > least, squares, filled(squares, least)))


class TextClassifier(PooledEncoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        features = config.d_model * (config.max_positions if config.pooling == "flatten" else 1)
        self.classifier = nn.Linear(features, config.num_classes, bias_attr=True)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None, tap: Tap = silent) -> Tensor:
        return self.classify(super().forward(input_ids, segment_ids, tap), tap)

    def classify(self, pooled: Tensor, tap: Tap) -> Tensor:
        """Return the logits (B, C) of pooled vectors."""
        return tap("logits", self.classifier(pooled))


class AttentionAlone(nn.Layer):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class: ClassVar[Make] = MultiHeadAttention

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = self.attention_class(config, "attention")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
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
