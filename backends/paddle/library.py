"""The same classifier out of PaddlePaddle's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`unsupported_reasons`); glue such as padding rows is the explicit one's.
"""

from typing import Any, ClassVar

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from concord.backends.interface import Implementation, Request
from concord.backends.library import ATTENTION_ALONE, UNDELIVERED, LibraryLayers
from concord.backends.paddle import layers as explicit
from concord.backends.paddle import model
from concord.backends.paddle.layers import Tap, silent
from concord.backends.paddle.scalars import scalar
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x, approximate=False)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate=True)


ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": F.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2


class LayerNorm(nn.LayerNorm):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.d_model, epsilon=config.norm_epsilon, elementwise_affine=True, bias=True)


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        return table(ids)


class DotProductAttention(nn.Layer):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.scale = config.head_dim**-0.5  # ATT-4: both ways, which differ in rounding alone
        self.assign = explicit.ASSIGNMENTS[config.mask_assignment]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return tap(f"{self.scope}.context", paddle.flatten(context, start_axis=2))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # Static programs round a number to float32, beside float64 tensors too; hence not by the argument ``scale``.
        q = q * scalar(self.scale, q)
        options: dict[str, Any] = {
            "dropout_p": 0.0,
            "is_causal": False,
            "training": False,
            "backend": None,
            "scale": 1.0,
            "enable_gqa": False,
        }
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)

    def bias(self, q: Tensor, key_mask: Tensor) -> Tensor:
        # Numbers that are added, since a boolean mask has a constant of the kernel's own (MSK-2).
        constant = self.constants[str(q.dtype).removeprefix("paddle.")]
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        visible = self.assign(per_query, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(paddle.zeros(visible.shape, dtype=q.dtype), visible, constant)


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

LAYERS = LibraryLayers(attention="F.scaled_dot_product_attention", norm="nn.LayerNorm", float32_scores=False)

KNOWN_DEVIATIONS = {
    kind: [{"name": "norm_epsilon_bits", "value": 24, "reason": "nn.LayerNorm holds epsilon as a float32"}]
    for kind in ("cpu", "cuda")
}

LARGEST_EPSILON = 0.001


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
    found = LAYERS.unsupported_reasons(request)
    if request.part not in ATTENTION_ALONE and request.config.norm_epsilon > LARGEST_EPSILON:
        found.append(
            f"norm_epsilon={request.config.norm_epsilon!r}: nn.LayerNorm takes none above {LARGEST_EPSILON} (NRM-2)"
        )
    return found


IMPLEMENTATIONS = {"library": Implementation(PARTS, unsupported_reasons, UNDELIVERED, KNOWN_DEVIATIONS)}
