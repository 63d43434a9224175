"""The same classifier out of JAX and Flax's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`unsupported_reasons`); glue such as padding rows is the explicit one's.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from concord.backends.interface import Implementation, Request
from concord.backends.jax import layers as explicit
from concord.backends.jax import model
from concord.backends.jax.layers import Tap, silent
from concord.backends.library import UNDELIVERED, LibraryLayers
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants


def gelu_erf(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": jax.nn.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2


class LayerNorm(nnx.LayerNorm):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        # Not the fast variance, the mean of squares less the square of the mean, which cancels (NRM-2).
        how: dict[str, Any] = {
            "use_bias": True,
            "use_scale": True,
            "use_fast_variance": False,
            "reduction_axes": -1,
            "feature_axes": -1,
        }
        super().__init__(
            config.d_model, epsilon=config.norm_epsilon, **how, param_dtype=param_dtype, rngs=rngs
        )


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: nnx.Embed, ids: Array) -> Array:
        return table(ids)


class DotProductAttention(nnx.Module):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.scale = config.head_dim**-0.5  # ATT-4: both ways, which differ in rounding alone
        self.assign = explicit.ASSIGNMENTS[config.mask_assignment]

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
        tap: Tap = silent,
    ) -> Array:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return tap(f"{self.scope}.context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def attend(self, q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        options: dict[str, Any] = {
            "mask": None,
            "is_causal": False,
            "scale": self.scale,
            "local_window_size": None,
            "implementation": "xla",
        }
        return jax.nn.dot_product_attention(q, k, v, bias=bias, **options)

    def bias(self, q: Array, key_mask: Array) -> Array:
        # Numbers that are added, since a boolean mask has a constant of the kernel's own (MSK-2).
        constant = self.constants[str(q.dtype)]
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        visible = self.assign(per_query, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(jnp.zeros(visible.shape, dtype=q.dtype), visible, constant)


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

LAYERS = LibraryLayers(attention="jax.nn.dot_product_attention", norm="nnx.LayerNorm", float32_scores=True)


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
    found = LAYERS.unsupported_reasons(request)
    if request.dtype == "float64":
        found.append(
            "dtype='float64': jax.nn.dot_product_attention computes its softmax in float32, in every precision (PRC-2)"
        )
    return found


IMPLEMENTATIONS = {"library": Implementation(PARTS, unsupported_reasons, UNDELIVERED)}
