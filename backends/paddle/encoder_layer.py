"""The same classifier out of PaddlePaddle's own encoder layers, which Keras and Flax do not have.

Shapes: B batch, T tokens, S keys (S = T), D d_model.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import Tensor, nn

from concord.backends.interface import Implementation, Request
from concord.backends.library import ENCODER_LAYER, UNDELIVERED_BY_LAYERS, reasons_of
from concord.backends.paddle import layers as explicit
from concord.backends.paddle import library, model
from concord.backends.paddle.layers import Tap, silent
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

ACTIVATIONS = {"relu": "relu", "gelu_erf": "gelu"}  # of functions of ``F``, which get no other argument


class LibraryEncoderLayer(nn.TransformerEncoderLayer):
    """The framework's encoder layer (SPEC NRM-1, RES-1, ATT-1 to ATT-6, FFN-1): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        pre = config.norm_placement == "pre"
        options: dict[str, Any] = {
            "layer_norm_eps": config.norm_epsilon,
            "normalize_before": pre,
            "attn_dropout": 0.0,
            "act_dropout": 0.0,
            "bias_attr": True,
        }
        super().__init__(
            config.d_model,
            config.num_heads,
            config.d_ff,
            dropout=0.0,
            activation=ACTIVATIONS[config.activation],
            **options,
        )
        self.constants = mask_constants(config)  # MSK-6
        self.result = f"{scope}.residual2" if pre else f"{scope}.norm2"

    def forward(self, x: Tensor, real: Tensor, tap: Tap = silent) -> Tensor:
        constant = self.constants[str(x.dtype).removeprefix("paddle.")]
        visible = real[:, None, None, :]  # (B, 1, 1, S)
        bias = explicit.add_to_masked(paddle.zeros(visible.shape, dtype=x.dtype), visible, constant)
        return tap(self.result, super().forward(x, src_mask=bias, cache=None))


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
    ".self_attn.q_proj.": ".attention.query.",
    ".self_attn.k_proj.": ".attention.key.",
    ".self_attn.v_proj.": ".attention.value.",
    ".self_attn.out_proj.": ".attention.output.",
    ".linear1.": ".feed_forward.inner.",
    ".linear2.": ".feed_forward.outer.",
}


def explicit_names(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by native name, those of the framework's encoder layer by the names that the explicit one has."""
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        found[functools.reduce(lambda path, names: path.replace(*names), NAMES.items(), name)] = tensor
    return found


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed by the framework's encoder layer; nothing if it can be."""
    found = library.unsupported_reasons(request) + reasons_of(request.config, ENCODER_LAYER)
    if request.config.activation not in ACTIVATIONS:
        found.append(
            f"activation={request.config.activation!r}: nn.TransformerEncoderLayer takes the name of a function alone (FFN-2)"
        )
    scale = request.config.head_dim**-0.5
    if (request.dtype, request.execution) == ("float64", "compiled") and scale != float(np.float32(scale)):
        found.append(
            "dtype='float64': compiled, nn.TransformerEncoderLayer rounds 1 / sqrt(K) to float32 (ATT-4)"
        )
    return found


IMPLEMENTATIONS = {
    "library:layer": Implementation(
        PARTS, unsupported_reasons, UNDELIVERED_BY_LAYERS, library.KNOWN_DEVIATIONS
    )
}
