"""The same classifier out of PyTorch's own layers and fused kernels. Its parameters have the names of the explicit one's.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim.
What no layer of the framework does is refused (:func:`inexpressible`); glue such as padding rows is the explicit one's.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from concord.backends.interface import Implementation, Request
from concord.backends.torch import layers as explicit
from concord.backends.torch import model
from concord.backends.torch.layers import Tap
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants, sees_nothing


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="none")


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"none": explicit.identity, "relu": F.relu, "gelu_erf": gelu_erf, "gelu_tanh": gelu_tanh}  # ATT-1, FFN-2


class LayerNorm(nn.LayerNorm):
    """Layer norm over D with the biased variance and epsilon inside (SPEC NRM-2): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.d_model, eps=config.norm_epsilon, elementwise_affine=True, bias=True)


class Embeddings(explicit.Embeddings):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def look_up(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        return table(ids)


class DotProductAttention(nn.Module):
    """Scaled dot-product attention in one call (SPEC ATT-3 to ATT-7, MSK-3 to MSK-7): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__()
        self.constants = mask_constants(config)  # MSK-6
        self.name = name
        self.scale = config.head_dim**-0.5  # ATT-4: both ways, which differ in rounding alone
        self.assign = explicit.ASSIGNMENTS[config.mask_assignment]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, tap: Tap) -> Tensor:
        context = self.attend(q, k, v, None if key_mask is None else self.bias(q, key_mask))  # (B, Q, H, K)
        return tap(f"{self.name}.context", torch.flatten(context, start_dim=2))  # (B, Q, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (torch.transpose(x, 1, 2) for x in (q, k, v))  # (B, H, T, K)
        options = {"dropout_p": 0.0, "is_causal": False, "scale": self.scale, "enable_gqa": False}
        return torch.transpose(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options), 1, 2)

    def bias(self, q: Tensor, key_mask: Tensor) -> Tensor:
        # Numbers that are added, since a boolean mask has a constant of the kernel's own (MSK-2).
        constant = self.constants[str(q.dtype).removeprefix("torch.")]
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        visible = self.assign(per_query, q.shape[2])  # (B, 1 or H, 1 or Q, S)
        return explicit.add_to_masked(torch.zeros(visible.shape, dtype=q.dtype, device=q.device), visible, constant)


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
    ("mask_fill", "replace"): "F.scaled_dot_product_attention only adds to scores (MSK-3)",
    ("query_mask", "overwrite"): "F.scaled_dot_product_attention does not give its weights away (MSK-8)",
}

OF_NORMS = {
    ("norm_epsilon_placement", "outside"): "nn.LayerNorm adds epsilon to the variance (NRM-3)",
    ("norm_variance", "unbiased"): "nn.LayerNorm divides by D (NRM-4)",
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
        found.append(f"mask_value={request.config.mask_value!r}: F.scaled_dot_product_attention adds to float32 scores, where {constant:g} leaves digits of a row without any key that {request.dtype} drops (MSK-5)")
    if request.dtype == "float16":
        found.append("dtype='float16': F.scaled_dot_product_attention keeps scores in float32, which do not overflow (PRC-2)")
    return found


def fused_inexpressible(request: Request) -> list[str]:
    """Return what keeps a request from being computed by whichever kernel PyTorch chooses; nothing if it can be."""
    found = inexpressible(request)
    if request.gradients and sees_nothing(request.config, request.batch):
        found.append("a query sees no key: the fused kernel differentiates its weights as if each were 1 (MSK-5)")
    return found


def kernels(request: Request) -> AbstractContextManager[None]:
    """Choose the attention kernel: the one that differentiates by the weights that it computed, or any (SPEC ATT-5)."""
    # The fused kernels' backward pass computes the weights again, as exp(score - logarithm of their sum). Rounded, that
    # logarithm shifts a whole row, by as much more as scores are larger; a row of masked keys loses it altogether.
    return sdpa_kernel(SDPBackend.MATH) if request.gradients else nullcontext()


class PackedLinear(nn.Module):
    """A linear layer whose weight lies as oneDNN's kernel reads it: (..., in) to (..., out). It has no gradient."""

    living: ClassVar[WeakValueDictionary[int, "PackedLinear"]] = WeakValueDictionary()

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.features = linear.out_features
        self.number = id(self)
        self.living[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.number, self.features)


# The compiler cannot look into a weight of such a layout: it sees one operation, and the layer's number in place of the weight.
@torch.library.custom_op("concord::packed_linear", mutates_args=())
def packed_linear(x: Tensor, number: int, features: int) -> Tensor:
    layer = PackedLinear.living[number]
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


@packed_linear.register_fake
def _(x: Tensor, number: int, features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def pack_linears(module: nn.Module) -> nn.Module:
    """Put packed layers in the place of all linear ones: on the CPU F.linear calls MKL, which is slow on some processors."""
    for name, child in module.named_children():
        setattr(module, name, PackedLinear(child) if isinstance(child, nn.Linear) else pack_linears(child))
    return module


def packed_linear_inexpressible(request: Request) -> list[str]:
    """Return what keeps a request from being computed with packed weights; nothing if it can be."""
    found = inexpressible(request)
    if request.gradients:
        found.append("gradients: packed weights have none (GRD-1)")
    if request.dtype != "float32" or request.device != "cpu":
        found.append(f"dtype={request.dtype!r}, device={request.device!r}: packed weights are those of float32 on cpu (PRC-3)")
    return found


# Its fast path, taken without gradients, makes a boolean mask of numbers: the constant becomes minus infinity, and a row
# whose keys are all masked becomes NaN.
torch.backends.mha.set_fastpath_enabled(False)


class WholeLayer(nn.TransformerEncoderLayer):
    """The framework's encoder layer (SPEC NRM-1, RES-1, ATT-1 to ATT-6, FFN-1): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        pre = config.norm_placement == "pre"
        options = {"layer_norm_eps": config.norm_epsilon, "batch_first": True, "norm_first": pre, "bias": True}
        super().__init__(config.d_model, config.num_heads, config.d_ff, dropout=0.0, activation=ACTIVATIONS[config.activation], **options)
        self.constants = mask_constants(config)  # MSK-6
        self.result = f"{name}.residual2" if pre else f"{name}.norm2"

    def forward(self, x: Tensor, real: Tensor, tap: Tap) -> Tensor:
        constant = self.constants[str(x.dtype).removeprefix("torch.")]
        bias = explicit.add_to_masked(torch.zeros(real.shape, dtype=x.dtype, device=x.device), real, constant)  # (B, S)
        return tap(self.result, super().forward(x, src_mask=None, src_key_padding_mask=bias, is_causal=False))


class WholePieces:
    """What an encoder is made of that has the framework's layers."""

    layer_class = WholeLayer
    norm_class = LayerNorm
    embeddings_class = Embeddings


class WholeStack(WholePieces, model.EncoderStack):
    """The encoder layers on given embeddings (part ``stack``): (B, T, D) to (B, T, D)."""


class WholeEncoder(WholePieces, model.Encoder):
    """Embeddings and encoder layers (part ``encoder``): (B, T) to (B, T, D)."""


class WholeClassifier(WholePieces, model.TextClassifier):
    """Encoder, pooling and classifier (part ``model``; SPEC HED-1 to HED-3): (B, T) to (B, C)."""


WHOLE_PARTS = {"model": WholeClassifier, "encoder": WholeEncoder, "stack": WholeStack}

OF_LAYER = {
    ("qkv_bias", False): "nn.TransformerEncoderLayer has biases everywhere or nowhere (ATT-1)",
    ("qkv_activation", "relu"): "nn.TransformerEncoderLayer has none on query, key and value (ATT-1)",
    ("output_projection", False): "nn.TransformerEncoderLayer always has one (ATT-6)",
    ("norm_sharing", "shared"): "nn.TransformerEncoderLayer has two norms (NRM-5)",
    ("mask_assignment", "batch_major"): "its mask is one for all heads of a sample (MSK-7)",
}

WHOLE_UNDELIVERED = ("layers.*.attention.*", "layers.*.feed_forward.*", "layers.*.norm?", "layers.*.residual?")
"""Patterns of the taps that stay inside the framework's layer. Its result is delivered."""


def whole_inexpressible(request: Request) -> list[str]:
    """Return what keeps a request from being computed by the framework's encoder layer; nothing if it can be."""
    return inexpressible(request) + [f"{option}={value!r}: {why}" for (option, value), why in OF_LAYER.items() if getattr(request.config, option) == value]


IMPLEMENTATIONS = {
    "library": Implementation(PARTS, inexpressible, UNDELIVERED, {}, kernels),
    "library:fused": Implementation(PARTS, fused_inexpressible, UNDELIVERED, {}),
    "library:onednn": Implementation(PARTS, packed_linear_inexpressible, UNDELIVERED, {}, finish=pack_linears),
    "library:layer": Implementation(WHOLE_PARTS, whole_inexpressible, WHOLE_UNDELIVERED, {}, kernels),
}
