"""The classifier and its parts (inputs: :func:`concord.spec.tensors.inputs`).

Shapes as in :mod:`concord.backends.paddle.layers`, with C classes.
"""

import paddle
from paddle import Tensor, nn

from concord.backends.library_support import KeptRows, Layers
from concord.backends.paddle.layers import (
    EXPLICIT,
    LAYERS,
    POOLERS,
    POOLINGS,
    MultiHeadAttention,
    filled,
)
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig
from concord.spec.pooling import least_squares


class EncoderStack(Tapped, nn.Layer):
    """Encoder layers on given embeddings (part ``stack``): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT) -> None:
        super().__init__()
        self.pad_id = config.pad_id
        layer = LAYERS[config.norm_placement]
        self.layers = nn.LayerList([layer(config, make) for _ in range(config.num_layers)])
        # No published source has a final norm here (NRM-6).
        self.final_norm = make.norm(config) if config.final_norm else None

    def forward(self, embeddings: Tensor, input_ids: Tensor) -> Tensor:
        return self.encode(embeddings, self.real_tokens(input_ids))

    def real_tokens(self, input_ids: Tensor) -> Tensor:
        return input_ids != self.pad_id  # (B, T); MSK-1

    def encode(self, x: Tensor, real: Tensor | KeptRows) -> Tensor:
        for layer in self.layers:
            x = layer(x, real)
        return x if self.final_norm is None else self.tap("final_norm", self.final_norm(x))


class Encoder(EncoderStack):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT) -> None:
        super().__init__(config, make)
        self.embeddings = make.embeddings(config, make)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        real = self.real_tokens(input_ids)
        return self.encode(self.embeddings(input_ids, segment_ids, real), real)


class PooledEncoder(Encoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D) or (B, T * D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT) -> None:
        super().__init__(config, make)
        self.pooling = POOLINGS[config.pooling]
        width, pooler = config.d_model, config.pooler
        self.pooler = nn.Linear(width, width, bias_attr=True) if pooler != "none" else None
        self.activation = POOLERS[pooler]
        normalized = config.length_epsilon is not None
        self.least_squares = least_squares(config, paddle.get_default_dtype()) if normalized else 0.0

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        return self.pool(super().forward(input_ids, segment_ids), self.real_tokens(input_ids))

    def pool(self, x: Tensor, real: Tensor) -> Tensor:
        pooled = self.tap("pooling", self.pooling(x, real))
        if self.pooler is not None:
            dense = self.tap("pooler.dense", self.pooler(pooled))
            pooled = self.tap("pooler.output", self.activation(dense))
        return self.tap("normalized", self.normalize(pooled)) if self.least_squares else pooled

    def normalize(self, x: Tensor) -> Tensor:
        # Compare before taking the root, whose derivative at a zero vector would be infinite.
        squares = paddle.sum(x * x, axis=-1, keepdim=True)  # (B, 1)
        least = filled(squares, self.least_squares)
        return x / paddle.sqrt(paddle.where(squares > self.least_squares, squares, least))


class TextClassifier(PooledEncoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT) -> None:
        super().__init__(config, make)
        features = config.d_model * (config.max_positions if config.pooling == "flatten" else 1)
        self.classifier = nn.Linear(features, config.num_classes, bias_attr=True)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        return self.classify(super().forward(input_ids, segment_ids))

    def classify(self, pooled: Tensor) -> Tensor:
        return self.tap("logits", self.classifier(pooled))


class AttentionAlone(nn.Layer):
    """Multi-head attention (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, make: Layers = EXPLICIT) -> None:
        super().__init__()
        self.attention = self.build_attention(config, make)

    def build_attention(self, config: EncoderConfig, make: Layers) -> nn.Layer:
        return MultiHeadAttention(config, make)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        return self.attention(query, key, value, key_mask, query_mask)


class DotProductAlone(AttentionAlone):
    """Attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def build_attention(self, config: EncoderConfig, make: Layers) -> nn.Layer:
        return make.dot_product[config.head_computation](config)


PARTS = {
    "model": TextClassifier,
    "pooled": PooledEncoder,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}
