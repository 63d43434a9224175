"""The library's classifier without padding: everything but the core of attention runs on the rows that are kept.

Shapes: B batch, T tokens, N rows kept (:mod:`concord.backends.packing`), D d_model, H heads, K head_dim, C classes.
Rows stand as one sample of N tokens, (1, N, D), so that the layers stay as they are.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from concord.backends.interface import Implementation, Request
from concord.backends.jax import library, model
from concord.backends.jax.layers import Tap, silent
from concord.backends.jax.model import Inputs
from concord.backends.packing import obstacles


class Packing(NamedTuple):
    """What layers get in place of the mask: which tokens are real (B, T), which rows are kept (N,), where each token is (B, T)."""

    real: Array
    rows: Array
    slots: Array


def pack(x: Array, packing: Packing) -> Array:
    """Take out the rows that are kept: (B, T, ...) to (1, N, ...)."""
    return jnp.reshape(x, (-1, *x.shape[2:])).at[packing.rows].get(mode="promise_in_bounds")[None]


def unpack(x: Array, packing: Packing) -> Array:
    """Put rows in their places; in those of padding any row stands: (1, N, ...) to (B, T, ...)."""
    return x[0].at[packing.slots].get(mode="promise_in_bounds")


class Embeddings(library.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (1, N, D)."""

    def __call__(self, input_ids: Array, segment_ids: Array | None, packing: Packing, tap: Tap) -> Array:
        packed, segments = pack(input_ids, packing), None if segment_ids is None else pack(segment_ids, packing)
        return super().__call__(packed, segments, packing, tap)

    def position_ids(self, packing: Packing) -> Array:
        return pack(super().position_ids(packing.real), packing)


class DotProductAttention(library.DotProductAttention):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6) in the places of the batch: 3 x (1, N, H, K) to (1, N, D)."""

    def __call__(self, q: Array, k: Array, v: Array, key_mask: Packing, query_mask: Packing, tap: Tap) -> Array:
        packing = key_mask
        q, k, v = (unpack(x, packing) for x in (q, k, v))  # (B, T, H, K)
        return pack(super().__call__(q, k, v, packing.real, packing.real, tap), packing)


class MultiHeadAttention(library.MultiHeadAttention):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (1, N, D) to (1, N, D)."""

    dot_product_class = DotProductAttention


class EncoderLayer(library.EncoderLayer):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (1, N, D) to (1, N, D)."""

    attention_class = MultiHeadAttention


class Encoder(library.Encoder):
    """Embeddings and encoder layers, of which the first token of each sample is asked: (B, T) to (B, 1, D)."""

    layer_class = EncoderLayer
    embeddings_class = Embeddings

    def __call__(self, inputs: Inputs, tap: Tap) -> Array:
        packing = Packing(self.real_tokens(inputs), inputs["packing.rows"], inputs["packing.slots"])
        x = self.embeddings(inputs["input_ids"], inputs.get("segment_ids"), packing, silent)
        return unpack(self.encode(x, packing, silent), packing._replace(slots=packing.slots[:, :1]))


class TextClassifier(model.TextClassifier, Encoder):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-3): (B, T) to (B, C)."""


PARTS = {"model": TextClassifier}

UNDELIVERED = ("embeddings.*", "layers.*", "final_norm")
"""Patterns of the taps that have another shape here, or none."""


def inexpressible(entry: Implementation, request: Request) -> list[str]:
    """Return what keeps a request from being computed by library layers without padding, one line for each reason."""
    return entry.inexpressible(request) + obstacles(request)


IMPLEMENTATIONS = {
    f"{name} packed": replace(entry, parts=PARTS, inexpressible=partial(inexpressible, entry), undelivered=UNDELIVERED)
    for name, entry in library.IMPLEMENTATIONS.items()
    if entry.parts is library.PARTS
}
