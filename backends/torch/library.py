"""The same classifier out of PyTorch's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`unsupported_reasons`); glue such as padding rows is the explicit one's.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from concord.backends.interface import Implementation, Request
from concord.backends.library import UNDELIVERED, LibraryLayers
from concord.backends.torch import layers as explicit
from concord.backends.torch import model
from concord.backends.torch.layers import Tap, silent
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants, sees_nothing


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="none")


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": F.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2


class LayerNorm(nn.LayerNorm):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.d_model, eps=config.norm_epsilon, elementwise_affine=True, bias=True)


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        return table(ids)


class DotProductAttention(nn.Module):
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
        return tap(f"{self.scope}.context", torch.flatten(context, start_dim=2))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (torch.transpose(x, 1, 2) for x in (q, k, v))  # (B, H, T, K)
        options: dict[str, Any] = {
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": self.scale,
            "enable_gqa": False,
        }
        return torch.transpose(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options), 1, 2)

    def bias(self, q: Tensor, key_mask: Tensor) -> Tensor:
        # Numbers that are added, since a boolean mask has a constant of the kernel's own (MSK-2).
        constant = self.constants[str(q.dtype).removeprefix("torch.")]
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        visible = self.assign(per_query, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(
            torch.zeros(visible.shape, dtype=q.dtype, device=q.device), visible, constant
        )


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

LAYERS = LibraryLayers(attention="F.scaled_dot_product_attention", norm="nn.LayerNorm", float32_scores=True)


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
    found = LAYERS.unsupported_reasons(request)
    if request.dtype == "float16":
        found.append(
            "dtype='float16': F.scaled_dot_product_attention keeps scores in float32, which do not overflow (PRC-2)"
        )
    return found


def fused_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by whichever kernel PyTorch chooses; nothing if it can be."""
    found = unsupported_reasons(request)
    if request.gradients and sees_nothing(request.config, request.batch):
        found.append(
            "a query sees no key: the fused kernel differentiates its weights as if each were 1 (MSK-5)"
        )
    return found


def kernels(request: Request) -> AbstractContextManager[None]:
    """Choose the attention kernel: the one that differentiates by the weights that it computed, or any (SPEC ATT-5)."""
    # The fused kernels' backward pass computes the weights again, as exp(score - logarithm of their sum). Rounded, that
    # logarithm shifts a whole row, by as much more as scores are larger; a row of masked keys loses it altogether.
    return sdpa_kernel(SDPBackend.MATH) if request.gradients else nullcontext()


IMPLEMENTATIONS = {
    "library": Implementation(PARTS, unsupported_reasons, UNDELIVERED, context=kernels),
    "library:fused": Implementation(PARTS, fused_reasons, UNDELIVERED),
}
