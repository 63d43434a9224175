"""The same classifier out of JAX and Flax's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`inexpressible`); glue such as padding rows is the explicit one's.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.interface import Implementation, Request
from concord.backends.jax import layers as explicit
from concord.backends.jax import model
from concord.backends.jax.layers import Tap
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants, sees_nothing


def gelu_erf(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {"none": explicit.identity, "relu": jax.nn.relu, "gelu_erf": gelu_erf, "gelu_tanh": gelu_tanh}  # ATT-1, FFN-2


class LayerNorm(nnx.LayerNorm):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        # Not the fast variance, the mean of squares less the square of the mean, which cancels (NRM-2).
        how = {"use_bias": True, "use_scale": True, "use_fast_variance": False, "reduction_axes": -1, "feature_axes": -1}
        super().__init__(config.d_model, epsilon=config.norm_epsilon, **how, rngs=nnx.Rngs(0))


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: nnx.Embed, ids: Array) -> Array:
        # What ``nnx.Embed`` does, but that it would return the precision in which it was constructed.
        return jnp.take(table.embedding[...], ids, axis=0, mode="fill")


class DotProductAttention(nnx.Module):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.constants = mask_constants(config)  # MSK-6
        self.name = name
        self.scale = config.head_dim**-0.5  # ATT-4: both ways, which differ in rounding alone
        self.assign = explicit.ASSIGNMENTS[config.mask_assignment]

    def __call__(self, q: Array, k: Array, v: Array, key_mask: Array | None, query_mask: Array | None, tap: Tap) -> Array:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return tap(f"{self.name}.context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def attend(self, q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        options = {"mask": None, "is_causal": False, "scale": self.scale, "local_window_size": None, "implementation": "xla"}
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


class Pieces:
    """What an encoder is made of."""

    layer_class = EncoderLayer
    norm_class = LayerNorm
    embeddings_class = Embeddings


class EncoderStack(Pieces, model.EncoderStack):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""


class Encoder(Pieces, model.Encoder):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""


class TextClassifier(Pieces, model.TextClassifier):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-3): (B, T) to (B, C)."""


class AttentionAlone(model.AttentionAlone):
    """Multi-head attention on given tensors (part ``attention``): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    attention_class = MultiHeadAttention


class DotProductAlone(model.DotProductAlone):
    """Scaled dot-product attention on given heads (part ``dot_product``): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    attention_class = DotProductAttention


PARTS = {
    "model": TextClassifier,
    "encoder": Encoder,
    "stack": EncoderStack,
    "attention": AttentionAlone,
    "dot_product": DotProductAlone,
}

ATTENTION_ALONE = ("attention", "dot_product")

OF_ATTENTION = {
    ("mask_fill", "replace"): "jax.nn.dot_product_attention only adds to scores (MSK-3)",
    ("query_mask", "overwrite"): "jax.nn.dot_product_attention does not give its weights away (MSK-8)",
}

OF_NORMS = {
    ("norm_epsilon_placement", "outside"): "nnx.LayerNorm adds epsilon to the variance (NRM-3)",
    ("norm_variance", "unbiased"): "nnx.LayerNorm divides by D (NRM-4)",
}

HALF = ("bfloat16", "float16")

ABSORBING = 2.0**40
"""What leaves no digit of a score of a half precision if a float32 adds it."""

UNDELIVERED = ("*attention.scores", "*attention.masked_scores", "*attention.weights")
"""Patterns of the taps that stay inside the kernel."""


def inexpressible(request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
    options = OF_ATTENTION if request.part in ATTENTION_ALONE else {**OF_ATTENTION, **OF_NORMS}
    found = [f"{option}={value!r}: {why}" for (option, value), why in options.items() if getattr(request.config, option) == value]
    constant = mask_constants(request.config)[request.dtype]
    if request.dtype in HALF and sees_nothing(request.config, request.batch) and abs(constant) < ABSORBING:
        found.append(f"mask_value={request.config.mask_value!r}: jax.nn.dot_product_attention adds to float32 scores, where {constant:g} leaves digits of a row without any key that {request.dtype} drops (MSK-5)")
    if request.dtype == "float64":
        found.append("dtype='float64': jax.nn.dot_product_attention computes its softmax in float32, in every precision (PRC-2)")
    return found


IMPLEMENTATIONS = {"library": Implementation(PARTS, inexpressible, UNDELIVERED, {})}
