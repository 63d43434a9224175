"""The library's classifier without padding: everything but the core of attention runs on the rows that are kept.

Shapes: B batch, T tokens, N rows kept (:mod:`concord.backends.packing`), D d_model, H heads, K head_dim, C classes.
Rows stand as one sample of N tokens, (1, N, D), so that the layers stay as they are.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from concord.backends.interface import Implementation, Request
from concord.backends.packing import obstacles
from concord.backends.torch import library, model
from concord.backends.torch.layers import Tap, silent
from concord.backends.torch.model import Inputs


class Packing(NamedTuple):
    """What layers get in place of the mask: which tokens are real (B, T), which rows are kept (N,), where each token is (B, T)."""

    real: Tensor
    rows: Tensor
    slots: Tensor


def pack(x: Tensor, packing: Packing) -> Tensor:
    """Take out the rows that are kept: (B, T, ...) to (1, N, ...)."""
    return torch.flatten(x, start_dim=0, end_dim=1)[packing.rows][None]


def unpack(x: Tensor, packing: Packing) -> Tensor:
    """Put rows in their places; in those of padding any row stands: (1, N, ...) to (B, T, ...)."""
    return x[0][packing.slots]


class Embeddings(library.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (1, N, D)."""

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None, packing: Packing, tap: Tap) -> Tensor:
        packed, segments = pack(input_ids, packing), None if segment_ids is None else pack(segment_ids, packing)
        return super().forward(packed, segments, packing, tap)

    def position_ids(self, packing: Packing) -> Tensor:
        return pack(super().position_ids(packing.real), packing)


class DotProductAttention(library.DotProductAttention):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-6) in the places of the batch: 3 x (1, N, H, K) to (1, N, D)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Packing, query_mask: Packing, tap: Tap) -> Tensor:
        packing = key_mask
        q, k, v = (unpack(x, packing) for x in (q, k, v))  # (B, T, H, K)
        return pack(super().forward(q, k, v, packing.real, packing.real, tap), packing)


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

    def forward(self, inputs: Inputs, tap: Tap) -> Tensor:
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
