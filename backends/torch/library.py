"""The same classifier, with PyTorch's own layers and fused kernels.

Shapes as in :mod:`concord.backends.torch.layers`, with N rows kept.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from concord.backends.interface import Implementation, Request
from concord.backends.library_support import (
    NOT_EXPOSED,
    KeptRows,
    Layers,
    library_reasons,
    parts_of,
    unpadded,
)
from concord.backends.torch import layers as explicit
from concord.backends.torch.model import PARTS, TextClassifier
from concord.spec.config import EncoderConfig
from concord.spec.masks import sees_nothing

ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": F.relu,
    "gelu_erf": functools.partial(F.gelu, approximate="none"),
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # ATT-1, FFN-2


class LibraryLayerNorm(nn.LayerNorm):
    """Layer norm with biased variance and epsilon inside the root (SPEC NRM-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(
            config.d_model, eps=config.norm_epsilon, elementwise_affine=True, bias=True, **kwargs
        )


class LibraryEmbeddings(explicit.Embeddings):
    """Embeddings with the framework's lookup (SPEC EMB-1 to EMB-6, POS-5 to POS-7)."""

    def look_up(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return embedding(ids)


class FusedAttention(explicit.DotProductAttention):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.scale = config.head_dim**-0.5  # ATT-4: the two forms differ only in rounding

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return self.tap("context", torch.flatten(context, start_dim=2))  # (B, Q, D)

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
        # An additive mask: for a boolean mask, the kernel would choose the constant (MSK-2).
        visible = self.visible(key_mask, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        zeros = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
        return explicit.add_to_masked(zeros, visible, self.mask_constant)


LIBRARY = Layers(
    LibraryLayerNorm,
    LibraryEmbeddings,
    dict.fromkeys(explicit.EXPLICIT.dot_product, FusedAttention),
    ACTIVATIONS,
)


def unsupported_reasons(request: Request) -> list[str]:
    reasons = library_reasons(request, "F.scaled_dot_product_attention", "nn.LayerNorm", float32_scores=True)
    if request.dtype == "float16":
        reasons.append(
            "dtype='float16': F.scaled_dot_product_attention keeps scores in float32, which do not "
            "overflow (PRC-2)"
        )
    return reasons


def fused_reasons(request: Request) -> list[str]:
    reasons = unsupported_reasons(request)
    if request.gradients and sees_nothing(request.config, request.batch):
        reasons.append(
            "a query sees no key: the fused kernel differentiates its weights as if each were 1 (MSK-5)"
        )
    return reasons


def kernels(request: Request) -> AbstractContextManager[None]:
    # With gradients, use the kernel that keeps its weights (SPEC ATT-5). The backward pass of fused kernels
    # recomputes them as exp(score - log-sum-exp). The rounding of that logarithm shifts a whole row, more for
    # larger scores; a row of masked keys loses it completely.
    return sdpa_kernel(SDPBackend.MATH) if request.gradients else nullcontext()


# Linear layers in oneDNN: on the CPU, F.linear calls MKL, which is slow on AMD processors (decision 0034).


class ReorderedLinear(nn.Module):
    """A linear layer with oneDNN's weight layout, without gradient: (..., in) to (..., out)."""

    living: ClassVar[WeakValueDictionary[int, "ReorderedLinear"]] = WeakValueDictionary()

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.features = linear.out_features
        self.number = id(self)
        self.living[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        return reordered_linear(x, self.number, self.features)


# The compiler cannot trace a weight in this layout, so it sees one operation that takes the layer's number.
@torch.library.custom_op("concord::reordered_linear", mutates_args=())
def reordered_linear(x: Tensor, number: int, features: int) -> Tensor:
    layer = ReorderedLinear.living[number]
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


@reordered_linear.register_fake
def _(x: Tensor, number: int, features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def reorder_linears(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        reordered = ReorderedLinear(child) if isinstance(child, nn.Linear) else reorder_linears(child)
        setattr(module, name, reordered)
    return module


def onednn_reasons(request: Request) -> list[str]:
    reasons = unsupported_reasons(request)
    if request.gradients:
        reasons.append("gradients: a run with reordered weights computes none (GRD-1)")
    if request.dtype != "float32" or request.device != "cpu":
        reasons.append(
            f"dtype={request.dtype!r}, device={request.device!r}: reordered weights exist only for float32 "
            "on cpu (PRC-3)"
        )
    return reasons


# Without padding, all but the core of attention runs on the kept rows, as one sample of N tokens.


def unpad(x: Tensor, selection: KeptRows) -> Tensor:
    """Select the kept rows: (B, T, ...) to (1, N, ...)."""
    return torch.flatten(x, start_dim=0, end_dim=1)[selection.rows][None]


def pad(x: Tensor, selection: KeptRows) -> Tensor:
    """Restore rows to their positions: (1, N, ...) to (B, T, ...); padding gets arbitrary rows."""
    return x[0][selection.places]


class UnpaddedAttention(FusedAttention):
    """Attention on padded batches (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6): 3 x (1, N, H, K) to (1, N, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeptRows, query_mask: KeptRows) -> Tensor:
        q, k, v = (pad(x, key_mask) for x in (q, k, v))  # (B, T, H, K)
        return unpad(super().forward(q, k, v, key_mask.real, query_mask.real), key_mask)


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
    "library": Implementation(parts_of(PARTS, LIBRARY), unsupported_reasons, NOT_EXPOSED, context=kernels),
    "library:fused": Implementation(parts_of(PARTS, LIBRARY), fused_reasons, NOT_EXPOSED),
    "library:onednn": Implementation(
        parts_of(PARTS, LIBRARY), onednn_reasons, NOT_EXPOSED, finish=reorder_linears
    ),
}
IMPLEMENTATIONS = {
    **WITH_PADDING,
    **unpadded(WITH_PADDING, functools.partial(UnpaddedClassifier, make=UNPADDED_LAYERS)),
}
