"""The same classifier out of PyTorch's own encoder layers, which Keras and Flax do not have.

Shapes: B batch, T tokens, S keys (S = T), D d_model.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from concord.backends.interface import Implementation, Request
from concord.backends.library import ENCODER_LAYER, UNDELIVERED_BY_LAYERS, reasons_of
from concord.backends.torch import layers as explicit
from concord.backends.torch import library, model
from concord.backends.torch.layers import Tap, silent
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants


class LibraryEncoderLayer(nn.TransformerEncoderLayer):
    """The framework's encoder layer (SPEC NRM-1, RES-1, ATT-1 to ATT-6, FFN-1): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        pre = config.norm_placement == "pre"
        options: dict[str, Any] = {
            "layer_norm_eps": config.norm_epsilon,
            "batch_first": True,
            "norm_first": pre,
            "bias": True,
        }
        super().__init__(
            config.d_model,
            config.num_heads,
            config.d_ff,
            dropout=0.0,
            activation=library.ACTIVATIONS[config.activation],
            **options,
        )
        self.constants = mask_constants(config)  # MSK-6
        self.result = f"{scope}.residual2" if pre else f"{scope}.norm2"

    def forward(self, x: Tensor, real: Tensor, tap: Tap = silent) -> Tensor:
        constant = self.constants[str(x.dtype).removeprefix("torch.")]
        bias = explicit.add_to_masked(
            torch.zeros(real.shape, dtype=x.dtype, device=x.device), real, constant
        )  # (B, S)
        return tap(self.result, super().forward(x, src_mask=None, src_key_padding_mask=bias, is_causal=False))


class LayerPieces:
    """What an encoder is made of that has the framework's layers."""

    layer_class: ClassVar[explicit.Make] = LibraryEncoderLayer
    norm_class: ClassVar[explicit.Make] = library.LayerNorm
    embeddings_class: ClassVar[explicit.Make] = library.Embeddings


class EncoderStack(LayerPieces, model.EncoderStack):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""


class Encoder(LayerPieces, model.Encoder):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""


class PooledEncoder(LayerPieces, model.PooledEncoder):
    """Encoder and pooling (part ``pooled``; SPEC HED-1, HED-2, HED-5): (B, T) to (B, D), or to (B, T * D)."""


class TextClassifier(LayerPieces, model.TextClassifier):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-5): (B, T) to (B, C)."""


PARTS = {"model": TextClassifier, "pooled": PooledEncoder, "encoder": Encoder, "stack": EncoderStack}

NAMES = {
    ".self_attn.out_proj.": ".attention.output.",
    ".linear1.": ".feed_forward.inner.",
    ".linear2.": ".feed_forward.outer.",
}


def explicit_names(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by native name, those of the framework's encoder layer by the names that the explicit one has."""
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        layer, stacked, leaf = name.rpartition(".self_attn.in_proj_")
        if stacked:  # (3 D, D) or (3 D,): query, key and value below each other
            found |= {
                f"{layer}.attention.{role}.{leaf}": rows
                for role, rows in zip(("query", "key", "value"), torch.chunk(tensor, 3, dim=0), strict=True)
            }
            continue
        found[functools.reduce(lambda path, names: path.replace(*names), NAMES.items(), name)] = tensor
    return found


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by the framework's encoder layer; nothing if it can be."""
    return library.unsupported_reasons(request) + reasons_of(request.config, ENCODER_LAYER)


@contextmanager
def without_fast_path(request: Request) -> Iterator[None]:
    """Keep to the kernels of a request, and from the layer's fast path, which is taken without gradients."""
    # It makes a boolean mask of numbers: the constant becomes minus infinity, and a row whose keys are all masked becomes NaN.
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with library.kernels(request):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


IMPLEMENTATIONS = {
    "library:layer": Implementation(
        PARTS, unsupported_reasons, UNDELIVERED_BY_LAYERS, context=without_fast_path
    )
}
