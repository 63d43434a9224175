"""The library's classifier without padding: everything but the core of attention runs on the rows that are kept.

Shapes: B batch, T tokens, N rows kept (:mod:`concord.backends.unpad`), D d_model, H heads, K head_dim, C classes.
Rows stand as one sample of N tokens, (1, N, D), so that the layers stay as they are.
"""

from typing import Any

import tensorflow as tf
from tensorflow import Tensor

from concord.backends.tf import library
from concord.backends.tf.layers import Tap, first_token, silent
from concord.backends.unpad import Kept, unpadded


def unpad(x: Tensor, kept: Kept) -> Tensor:
    """Take out the rows that are kept: (B, T, ...) to (1, N, ...)."""
    return tf.gather(tf.reshape(x, (-1, *x.shape[2:])), kept.rows, axis=0)[None]


def pad(x: Tensor, kept: Kept) -> Tensor:
    """Put rows in their places; in those of padding any row stands: (1, N, ...) to (B, T, ...)."""
    return tf.gather(x[0], kept.slots, axis=0)


class Embeddings(library.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (1, N, D)."""

    def call(self, input_ids: Tensor, segment_ids: Tensor | None, real: Any, tap: Tap = silent) -> Tensor:
        segments = None if segment_ids is None else unpad(segment_ids, real)
        return super().call(unpad(input_ids, real), segments, real, tap=tap)

    def position_ids(self, real: Any) -> Tensor:
        return unpad(super().position_ids(real.real), real)


class DotProductAttention(library.DotProductAttention):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6) in the places of the batch: 3 x (1, N, H, K) to (1, N, D)."""

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Kept, query_mask: Kept, tap: Tap = silent
    ) -> Tensor:
        q, k, v = (pad(x, key_mask) for x in (q, k, v))  # (B, T, H, K)
        return unpad(
            super().call(q, k, v, key_mask=key_mask.real, query_mask=query_mask.real, tap=tap), key_mask
        )


class MultiHeadAttention(library.MultiHeadAttention):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (1, N, D) to (1, N, D)."""

    dot_product_class = DotProductAttention


class EncoderLayer(library.EncoderLayer):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (1, N, D) to (1, N, D)."""

    attention_class = MultiHeadAttention


class TextClassifier(library.TextClassifier):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""

    layer_class = EncoderLayer
    embeddings_class = Embeddings

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        *,
        rows: Tensor,
        slots: Tensor,
        tap: Tap = silent,
    ) -> Tensor:
        kept: Any = Kept(self.real_tokens(input_ids), rows, slots)
        x = self.encode(self.embeddings(input_ids, segment_ids, kept, tap=silent), kept, silent)  # (1, N, D)
        taken = slice(
            1 if self.pooling is first_token else None
        )  # the tokens of each text that pooling takes
        pooled = self.pool(pad(x, kept._replace(slots=slots[:, taken])), kept.real, tap)
        return self.classify(pooled, tap)


IMPLEMENTATIONS = unpadded(library.IMPLEMENTATIONS, TextClassifier)
