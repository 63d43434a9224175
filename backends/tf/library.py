"""The same classifier, with Keras' own layers and fused kernels.

Shapes as in :mod:`concord.backends.tf.layers`, with N rows kept.
"""

import functools
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from tensorflow import Tensor

from concord.backends.interface import Implementation, Request
from concord.backends.library_support import (
    NOT_EXPOSED,
    KeptRows,
    Layers,
    library_reasons,
    parts_of,
    unpadded,
)
from concord.backends.tf import layers as explicit
from concord.backends.tf.model import PARTS, TextClassifier
from concord.spec.config import EncoderConfig

ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": keras.ops.relu,
    "gelu_erf": functools.partial(keras.activations.gelu, approximate=False),
    "gelu_tanh": functools.partial(keras.activations.gelu, approximate=True),
}  # ATT-1, FFN-2


class LibraryLayerNorm(layers.LayerNormalization):
    """Layer norm with biased variance and epsilon inside the root (SPEC NRM-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        start = {"gamma_initializer": "ones", "beta_initializer": "zeros"}
        super().__init__(axis=-1, epsilon=config.norm_epsilon, center=True, scale=True, **start, **kwargs)
        self.width = config.d_model

    def build(self, input_shape: Any = None) -> None:
        super().build((None, self.width))


class LibraryEmbeddings(explicit.Embeddings):
    """Embeddings with the framework's lookup (SPEC EMB-1 to EMB-6, POS-5 to POS-7)."""

    def look_up(self, embedding: layers.Embedding, ids: Tensor) -> Tensor:
        return embedding(ids)


class FusedAttention(explicit.DotProductAttention):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.scale = config.head_dim**-0.5  # ATT-4: the two forms differ only in rounding

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return self.tap("context", ops.reshape(context, (*ops.shape(context)[:2], -1)))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # tf.cast would round a Python float to float32, even for float64 tensors.
        scale = tf.constant(self.scale, dtype=q.dtype)
        options: dict[str, Any] = {
            "mask": None,
            "is_causal": False,
            "scale": scale,
            "flash_attention": False,
            "attn_logits_soft_cap": None,
        }
        return keras.ops.dot_product_attention(q, k, v, bias=bias, **options)

    def bias(self, q: Tensor, key_mask: Tensor) -> Tensor:
        # An additive mask: for a boolean mask, the kernel would choose the constant (MSK-2).
        visible = self.visible(key_mask, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(
            ops.zeros(ops.shape(visible), dtype=q.dtype), visible, self.mask_constant
        )


LIBRARY = Layers(
    LibraryLayerNorm,
    LibraryEmbeddings,
    dict.fromkeys(explicit.EXPLICIT.dot_product, FusedAttention),
    ACTIVATIONS,
)

KNOWN_DEVIATIONS = {
    kind: [
        {
            "name": "gelu_constant_bits",
            "value": 24,
            "reason": "tf.nn.gelu casts its constants to the precision via float32",
        }
    ]
    for kind in ("cpu", "cuda")
}


def unsupported_reasons(request: Request) -> list[str]:
    return library_reasons(
        request, "keras.ops.dot_product_attention", "keras.layers.LayerNormalization", float32_scores=True
    )


# Without padding, all but the core of attention runs on the kept rows, as one sample of N tokens.


def unpad(x: Tensor, selection: KeptRows) -> Tensor:
    """Select the kept rows: (B, T, ...) to (1, N, ...)."""
    return tf.gather(tf.reshape(x, (-1, *x.shape[2:])), selection.rows, axis=0)[None]


def pad(x: Tensor, selection: KeptRows) -> Tensor:
    """Restore rows to their positions: (1, N, ...) to (B, T, ...); padding gets arbitrary rows."""
    return tf.gather(x[0], selection.places, axis=0)


class UnpaddedAttention(FusedAttention):
    """Attention on padded batches (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6): 3 x (1, N, H, K) to (1, N, D)."""

    def call(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeptRows, query_mask: KeptRows) -> Tensor:
        q, k, v = (pad(x, key_mask) for x in (q, k, v))  # (B, T, H, K)
        return unpad(super().call(q, k, v, key_mask=key_mask.real, query_mask=query_mask.real), key_mask)


class UnpaddedClassifier(TextClassifier):
    """The classifier on kept rows: (B, T) to (B, C)."""

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None = None, *, rows: Tensor, places: Tensor
    ) -> Tensor:
        selection = KeptRows(self.real_tokens(input_ids), rows, places)
        x = unpad(self.embeddings(input_ids, segment_ids, selection.real), selection)  # (1, N, D)
        return self.classify(self.pool(pad(self.encode(x, selection), selection), selection.real))


UNPADDED_LAYERS = replace(LIBRARY, dot_product=dict.fromkeys(LIBRARY.dot_product, UnpaddedAttention))
WITH_PADDING = {
    "library": Implementation(parts_of(PARTS, LIBRARY), unsupported_reasons, NOT_EXPOSED, KNOWN_DEVIATIONS)
}
IMPLEMENTATIONS = {
    **WITH_PADDING,
    **unpadded(WITH_PADDING, functools.partial(UnpaddedClassifier, make=UNPADDED_LAYERS)),
}
