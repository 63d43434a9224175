"""The same classifier, with PaddlePaddle's own layers and fused kernels.

Shapes as in :mod:`concord.backends.paddle.layers`, with N rows kept.
"""

import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, inference, nn

from concord.backends.interface import Implementation, Request
from concord.backends.library_support import (
    ATTENTION_ALONE,
    NOT_EXPOSED,
    NOT_EXPOSED_BY_MODELS,
    KeptRows,
    Layers,
    library_reasons,
    parts_of,
    unpadded,
)
from concord.backends.paddle import layers as explicit
from concord.backends.paddle.layers import scalar
from concord.backends.paddle.model import PARTS, TextClassifier
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig

ACTIVATIONS: dict[str, explicit.Step] = {
    "none": explicit.identity,
    "relu": F.relu,
    "gelu_erf": functools.partial(F.gelu, approximate=False),
    "gelu_tanh": functools.partial(F.gelu, approximate=True),
}  # ATT-1, FFN-2


class LibraryLayerNorm(nn.LayerNorm):
    """Layer norm with biased variance and epsilon inside the root (SPEC NRM-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.d_model, epsilon=config.norm_epsilon, elementwise_affine=True, bias=True)


class LibraryEmbeddings(explicit.Embeddings):
    """Embeddings with the framework's lookup (SPEC EMB-1 to EMB-6, POS-5 to POS-7)."""

    def look_up(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return embedding(ids)


class FusedAttention(explicit.DotProductAttention):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
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
        return self.tap("context", paddle.flatten(context, start_axis=2))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # Not the argument ``scale``: static programs round a constant to float32, even for float64 tensors.
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
        # An additive mask: for a boolean mask, the kernel would choose the constant (MSK-2).
        visible = self.visible(key_mask, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(paddle.zeros(visible.shape, dtype=q.dtype), visible, self.mask_constant)


LIBRARY = Layers(
    LibraryLayerNorm,
    LibraryEmbeddings,
    dict.fromkeys(explicit.EXPLICIT.dot_product, FusedAttention),
    ACTIVATIONS,
)

KNOWN_DEVIATIONS = {
    kind: [{"name": "norm_epsilon_bits", "value": 24, "reason": "nn.LayerNorm stores epsilon as float32"}]
    for kind in ("cpu", "cuda")
}

# nn.LayerNorm refuses larger values.
LARGEST_EPSILON = 0.001


def unsupported_reasons(request: Request) -> list[str]:
    reasons = library_reasons(request, "F.scaled_dot_product_attention", "nn.LayerNorm", float32_scores=False)
    if request.part not in ATTENTION_ALONE and request.config.norm_epsilon > LARGEST_EPSILON:
        reasons.append(
            f"norm_epsilon={request.config.norm_epsilon!r}: nn.LayerNorm accepts none above "
            f"{LARGEST_EPSILON} (NRM-2)"
        )
    return reasons


# The whole model in Paddle Inference, which fuses steps into oneDNN kernels (decision 0034).


class Traced(nn.Layer):
    """A model with its inputs in one mapping, traced without converting control flow."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    @paddle.jit.not_to_static
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.model(**inputs)

    def compiled(self, inputs: Mapping[str, Tensor]) -> inference.Predictor:
        specs: dict[str, Any] = {
            name: paddle.static.InputSpec.from_tensor(x, name) for name, x in inputs.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model"
            paddle.jit.save(paddle.jit.to_static(self, [specs], full_graph=True), path)
            options = inference.Config(f"{path}.json", f"{path}.pdiparams")
            options.enable_mkldnn()
            options.set_cpu_math_library_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            options.disable_glog_info()
            return inference.create_predictor(options)


class Predictor(Tapped, nn.Layer):
    """A Paddle Inference program of the model, without gradients (part ``model``): (B, T) to (B, C)."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.compile = Traced(model).compiled
        self.program: inference.Predictor | None = None

    def forward(self, **inputs: Tensor) -> Tensor:
        self.program = self.program or self.compile(inputs)
        (logits,) = self.program.run([inputs[name] for name in self.program.get_input_names()])
        return self.tap("logits", logits)


def onednn_reasons(request: Request) -> list[str]:
    reasons = unsupported_reasons(request)
    if request.gradients:
        reasons.append("gradients: a Paddle Inference program computes none (GRD-1)")
    if (request.part, request.dtype, request.device) != ("model", "float32", "cpu"):
        reasons.append(
            f"part={request.part!r}, dtype={request.dtype!r}, device={request.device!r}: it runs only the "
            "whole model, in float32 on cpu (PRC-3)"
        )
    return reasons


# Without padding, all but the core of attention runs on the kept rows, as one sample of N tokens.


def unpad(x: Tensor, selection: KeptRows) -> Tensor:
    """Select the kept rows: (B, T, ...) to (1, N, ...)."""
    return paddle.flatten(x, start_axis=0, stop_axis=1)[selection.rows][None]


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

# In the padded model the softmax floor gives every padded key 1.6e-28 times the largest weight.
UNPADDED_DEVIATIONS = {
    "cpu": [
        *KNOWN_DEVIATIONS["cpu"],
        {
            "name": "padding_left_out",
            "value": 1,
            "reason": "a key that is left out gets no weight from the floor of the softmax",
        },
    ],
    "cuda": KNOWN_DEVIATIONS["cuda"],
}

WITH_PADDING = {
    "library": Implementation(parts_of(PARTS, LIBRARY), unsupported_reasons, NOT_EXPOSED, KNOWN_DEVIATIONS),
    "library:onednn": Implementation(
        parts_of(PARTS, LIBRARY), onednn_reasons, NOT_EXPOSED_BY_MODELS, KNOWN_DEVIATIONS, finish=Predictor
    ),
}
IMPLEMENTATIONS = {
    **WITH_PADDING,
    **unpadded(
        WITH_PADDING,
        functools.partial(UnpaddedClassifier, make=UNPADDED_LAYERS),
        known_deviations=UNPADDED_DEVIATIONS,
    ),
}
