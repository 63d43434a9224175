"""The same classifier out of Keras's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`unsupported_reasons`); glue such as padding rows is the explicit one's.
"""

from typing import Any, ClassVar

import keras
import tensorflow as tf
from keras import layers
from keras.ops import shape
from tensorflow import Tensor

from concord.backends.interface import Implementation, Request
from concord.backends.library import UNDELIVERED, LibraryLayers
from concord.backends.tf import layers as explicit
from concord.backends.tf import model
from concord.backends.tf.base import Layer
from concord.backends.tf.layers import Tap, silent
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants


def gelu_erf(x: Tensor) -> Tensor:
    return keras.activations.gelu(x, approximate=False)


def gelu_tanh(x: Tensor) -> Tensor:
    return keras.activations.gelu(x, approximate=True)


ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": keras.ops.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2


class LayerNorm(layers.LayerNormalization):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        start = {"gamma_initializer": "ones", "beta_initializer": "zeros"}
        super().__init__(axis=-1, epsilon=config.norm_epsilon, center=True, scale=True, **start, **kwargs)
        self.width = config.d_model

    def build(self, input_shape: Any = None) -> None:
        super().build((None, self.width))


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: layers.Embedding, ids: Tensor) -> Tensor:
        return table(ids)


class DotProductAttention(Layer):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.scale = config.head_dim**-0.5  # ATT-4: both ways, which differ in rounding alone
        self.assign = explicit.ASSIGNMENTS[config.mask_assignment]

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return tap(f"{self.scope}.context", tf.reshape(context, (*shape(context)[:2], -1)))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # A number would be rounded to float32 on its way (``tf.cast``), beside float64 tensors too.
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
        # Numbers that are added, since a boolean mask has a constant of the kernel's own (MSK-2).
        constant = self.constants[q.dtype.name]
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        visible = self.assign(per_query, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(tf.zeros(shape(visible), dtype=q.dtype), visible, constant)


class MultiHeadAttention(explicit.MultiHeadAttention):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    activations = ACTIVATIONS
    dot_product_class = DotProductAttention


class FeedForward(explicit.FeedForward):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations = ACTIVATIONS


class EncoderLayer(explicit.EncoderLayer):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class = LayerNorm
    attention_class = MultiHeadAttention
    feed_forward_class = FeedForward


class LibraryPieces:
    """What an encoder is made of."""

    layer_class: ClassVar[explicit.Make] = EncoderLayer
    norm_class: ClassVar[explicit.Make] = LayerNorm
    embeddings_class: ClassVar[explicit.Make] = Embeddings


class EncoderStack(LibraryPieces, model.EncoderStack):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""


class Encoder(LibraryPieces, model.Encoder):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""


class PooledEncoder(LibraryPieces, model.PooledEncoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D), or to (B, T * D)."""


class TextClassifier(LibraryPieces, model.TextClassifier):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""


class AttentionAlone(model.AttentionAlone):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class = MultiHeadAttention


class DotProductAlone(model.DotProductAlone):
    """Scaled dot-product attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    attention_class = DotProductAttention


PARTS = {
    "model": TextClassifier,
    "pooled": PooledEncoder,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}

LAYERS = LibraryLayers(
    attention="keras.ops.dot_product_attention", norm="keras.layers.LayerNormalization", float32_scores=True
)

KNOWN_DEVIATIONS = {
    kind: [
        {
            "name": "gelu_constant_bits",
            "value": 24,
            "reason": "tf.nn.gelu casts its constants to the precision by way of float32",
        }
    ]
    for kind in ("cpu", "cuda")
}


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
    found = LAYERS.unsupported_reasons(request)
    return found


IMPLEMENTATIONS = {"library": Implementation(PARTS, unsupported_reasons, UNDELIVERED, KNOWN_DEVIATIONS)}
