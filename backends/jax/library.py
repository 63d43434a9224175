"""The same classifier, with layers and fused kernels of JAX and Flax.

Shapes as in :mod:`concord.backends.jax.layers`, with N rows kept.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from concord.backends.interface import Implementation, Request
from concord.backends.jax import layers as explicit
from concord.backends.jax.model import PARTS, TextClassifier
from concord.backends.library_support import (
    NOT_EXPOSED,
    KeptRows,
    Layers,
    library_reasons,
    parts_of,
    unpadded,
)
from concord.spec.config import EncoderConfig
from concord.spec.masks import sees_nothing

ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": jax.nn.relu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}  # ATT-1, FFN-2


class LibraryLayerNorm(nnx.LayerNorm):
    """Layer norm with biased variance and epsilon inside the root (SPEC NRM-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        # Not the fast variance, E[x^2] - E[x]^2, which cancels (ALG-5).
        how: dict[str, Any] = {
            "use_bias": True,
            "use_scale": True,
            "use_fast_variance": False,
            "reduction_axes": -1,
            "feature_axes": -1,
        }
        super().__init__(config.d_model, epsilon=config.norm_epsilon, **how, **kwargs)


class LibraryEmbeddings(explicit.Embeddings):
    """Embeddings with the framework's lookup (SPEC EMB-1 to EMB-6, POS-5 to POS-7)."""

    def look_up(self, embedding: nnx.Embed, ids: Array) -> Array:
        return embedding(ids)


class FusedAttention(explicit.DotProductAttention):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7)."""

    kernel = "xla"

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.scale = config.head_dim**-0.5  # ATT-4: the two forms differ only in rounding

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
    ) -> Array:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return self.tap("context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def attend(self, q: Array, k: Array, v: Array, bias: Array | None) -> Array:
        options: dict[str, Any] = {
            "mask": None,
            "is_causal": False,
            "scale": self.scale,
            "local_window_size": None,
            "implementation": self.kernel,
        }
        return jax.nn.dot_product_attention(q, k, v, bias=bias, **options)

    def bias(self, q: Array, key_mask: Array) -> Array:
        # An additive mask: for a boolean mask, the kernel would choose the constant (MSK-2).
        visible = self.visible(key_mask, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        unmasked = jnp.zeros((*visible.shape[:2], q.shape[1], visible.shape[3]), dtype=q.dtype)
        return explicit.add_to_masked(unmasked, visible, self.mask_constant)


class CudnnAttention(FusedAttention):
    """Scaled dot-product attention by cuDNN."""

    kernel = "cudnn"


LIBRARY = Layers(
    LibraryLayerNorm,
    LibraryEmbeddings,
    dict.fromkeys(explicit.EXPLICIT.dot_product, FusedAttention),
    ACTIVATIONS,
)


def unsupported_reasons(request: Request) -> list[str]:
    reasons = library_reasons(request, "jax.nn.dot_product_attention", "nnx.LayerNorm", float32_scores=True)
    if request.dtype == "float64":
        reasons.append(
            "dtype='float64': jax.nn.dot_product_attention computes its softmax in float32, in every "
            "precision (PRC-2)"
        )
    return reasons


def cudnn_reasons(request: Request) -> list[str]:
    reasons = unsupported_reasons(request)
    if request.dtype not in ("bfloat16", "float16") or not request.device.startswith("cuda"):
        reasons.append(
            f"dtype={request.dtype!r}, device={request.device!r}: cuDNN's attention exists only for bfloat16 "
            "and float16 on GPUs (PRC-3)"
        )
    if request.gradients and sees_nothing(request.config, request.batch):
        reasons.append("a query sees no key: cuDNN's gradients of other tokens are wrong (MSK-5)")
    return reasons


# Without padding, all but the core of attention runs on the kept rows, as one sample of N tokens.


def unpad(x: Array, selection: KeptRows) -> Array:
    """Select the kept rows: (B, T, ...) to (1, N, ...)."""
    return jnp.reshape(x, (-1, *x.shape[2:])).at[selection.rows].get(mode="promise_in_bounds")[None]


def pad(x: Array, selection: KeptRows) -> Array:
    """Restore rows to their positions: (1, N, ...) to (B, T, ...); padding gets arbitrary rows."""
    return x[0].at[selection.places].get(mode="promise_in_bounds")


class UnpaddedAttention(FusedAttention):
    """Attention on padded batches (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6): 3 x (1, N, H, K) to (1, N, D)."""

    def __call__(self, q: Array, k: Array, v: Array, key_mask: KeptRows, query_mask: KeptRows) -> Array:
        q, k, v = (pad(x, key_mask) for x in (q, k, v))  # (B, T, H, K)
        return unpad(super().__call__(q, k, v, key_mask.real, query_mask.real), key_mask)


class UnpaddedClassifier(TextClassifier):
    """The classifier on kept rows: (B, T) to (B, C)."""

    def __call__(
        self, input_ids: Array, segment_ids: Array | None = None, *, rows: Array, places: Array
    ) -> Array:
        selection = KeptRows(self.real_tokens(input_ids), rows, places)
        x = unpad(self.embeddings(input_ids, segment_ids, selection.real), selection)  # (1, N, D)
        return self.classify(self.pool(pad(self.encode(x, selection), selection), selection.real))


UNPADDED_LAYERS = replace(LIBRARY, dot_product=dict.fromkeys(LIBRARY.dot_product, UnpaddedAttention))
CUDNN_LAYERS = replace(LIBRARY, dot_product=dict.fromkeys(LIBRARY.dot_product, CudnnAttention))
WITH_PADDING = {"library": Implementation(parts_of(PARTS, LIBRARY), unsupported_reasons, NOT_EXPOSED)}
IMPLEMENTATIONS = {
    **WITH_PADDING,
    "library:cudnn": Implementation(parts_of(PARTS, CUDNN_LAYERS), cudnn_reasons, NOT_EXPOSED),
    **unpadded(WITH_PADDING, functools.partial(UnpaddedClassifier, make=UNPADDED_LAYERS)),
}
