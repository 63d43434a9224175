"""Layers of the classifier, written out as the published sources compute them.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff.
Every layer goes on with what ``tap(name, tensor)`` returns for each of its steps. What a layer is made of stands in
class attributes, where :mod:`concord.backends.torch.library` puts the framework's own layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

Step = Callable[[Tensor], Tensor]
Tap = Callable[[str, Tensor], Tensor]
Make = Callable[..., nn.Module]


def silent(name: str, tensor: Tensor) -> Tensor:
    return tensor


# Options of the configuration, as functions.


def identity(x: Tensor) -> Tensor:
    return x


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Step] = {
    "none": identity,
    "relu": F.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2
POOLERS: dict[str, Step] = {"none": identity, "tanh": torch.tanh, "relu": F.relu}  # HED-2


def epsilon_inside(variance: Tensor, epsilon: float) -> Tensor:
    return torch.sqrt(variance + epsilon)


def epsilon_outside(variance: Tensor, epsilon: float) -> Tensor:
    return torch.sqrt(variance) + epsilon


DENOMINATORS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return torch.where(visible, scores, torch.full_like(scores, constant))


def add_to_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return scores + torch.where(visible, torch.zeros_like(scores), torch.full_like(scores, constant))


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Tensor, heads: int) -> Tensor:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Tensor, heads: int) -> Tensor:
    # The published mistake: heads are stacked before samples, masks are repeated sample by sample.
    batch = mask.shape[0]
    slot = (
        torch.arange(heads, device=mask.device)[None, :] * batch
        + torch.arange(batch, device=mask.device)[:, None]
    )  # (B, H)
    return mask[slot // heads]  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def all_heads(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    return step(*(x for x, heads in tensors))


def head_by_head(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    groups = zip(*(torch.split(x, 1, dim=heads) for x, heads in tensors), strict=True)
    return torch.cat([step(*group) for group in groups], dim=axis)


HEADS = {
    "batched": all_heads,
    "looped": head_by_head,
}  # ATT-7: a step, tensors each with the axis of heads, that of the result


def pre_norm(x: Tensor, sublayer: Step, norm: Step, tap: Tap, scope: str, number: int) -> Tensor:
    normed = tap(f"{scope}.norm{number}", norm(x))
    return tap(f"{scope}.residual{number}", x + sublayer(normed))


def post_norm(x: Tensor, sublayer: Step, norm: Step, tap: Tap, scope: str, number: int) -> Tensor:
    total = tap(f"{scope}.residual{number}", x + sublayer(x))
    return tap(f"{scope}.norm{number}", norm(total))


PLACEMENTS = {"pre": pre_norm, "post": post_norm}  # NRM-1


def first_token(x: Tensor, real: Tensor) -> Tensor:
    return x[:, 0]  # (B, D)


def all_tokens(x: Tensor, real: Tensor) -> Tensor:
    return torch.flatten(x, start_dim=1)  # (B, T * D)


def mean_of_real_tokens(x: Tensor, real: Tensor) -> Tensor:
    total = torch.sum(torch.where(real[..., None], x, 0.0), dim=1)  # (B, D)
    return total / torch.clamp(torch.sum(real, dim=1, keepdim=True), min=1).to(x.dtype)


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(nn.Module):
    """Layer norm over D in every published form (SPEC NRM-2 to NRM-4): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model))
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = DENOMINATORS[config.norm_epsilon_placement]

    def forward(self, x: Tensor) -> Tensor:
        centered = x - torch.mean(x, dim=-1, keepdim=True)
        variance = torch.sum(centered * centered, dim=-1, keepdim=True) / self.count  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.weight + self.bias


def every_token(real: Tensor) -> Tensor:
    return torch.broadcast_to(torch.arange(real.shape[1], device=real.device), real.shape)  # (B, T)


def real_tokens_alone(real: Tensor) -> Tensor:
    return torch.cumsum(real, dim=1) - 1  # (B, T); of padding any number


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(nn.Module):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.token = nn.Embedding(config.vocab_size, config.d_model, padding_idx=None)
        self.position = nn.Embedding(config.max_positions, config.d_model, padding_idx=None)
        self.position.weight.requires_grad_(config.positions == "learned")
        self.segment = (
            nn.Embedding(config.num_segments, config.d_model, padding_idx=None)
            if config.num_segments
            else None
        )
        self.norm = self.norm_class(config) if config.embedding_norm else None
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else None
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None, real: Tensor, tap: Tap = silent
    ) -> Tensor:
        token = tap(f"{self.scope}.token", self.embed_tokens(input_ids))
        position_ids = self.position_ids(real)
        position = tap(
            f"{self.scope}.position",
            freeze_row(self.look_up(self.position, position_ids), position_ids, self.position_padding_row),
        )
        total = token + position
        if self.segment is not None:
            if segment_ids is None:
                raise ValueError(
                    "segment_ids are missing but this model has a table of segments [clause=EMB-5]"
                )
            segment = freeze_row(
                self.look_up(self.segment, segment_ids), segment_ids, self.segment_padding_row
            )
            total = total + tap(f"{self.scope}.segment", segment)
        total = tap(f"{self.scope}.sum", total)
        return total if self.norm is None else tap(f"{self.scope}.norm", self.norm(total))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        token = freeze_row(self.look_up(self.token, input_ids), input_ids, self.token_padding_row)
        if self.zeroed_row is not None:
            token = torch.where((input_ids == self.zeroed_row)[..., None], torch.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def look_up(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        return table.weight[ids]

    def position_ids(self, real: Tensor) -> Tensor:
        numbers = self.number(real) + self.position_start  # (B, T)
        return numbers if self.padding_position is None else torch.where(real, numbers, self.padding_position)


def freeze_row(vectors: Tensor, ids: Tensor, row: int | None) -> Tensor:
    """Let no gradient reach one row of the table that the vectors were taken from (SPEC EMB-4, EMB-5, POS-7)."""
    return vectors if row is None else torch.where((ids == row)[..., None], vectors.detach(), vectors)


class DotProductAttention(nn.Module):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.each_head = HEADS[config.head_computation]
        self.scale_query = config.head_dim**-0.5 if config.score_scale == "multiply_query" else None
        self.divide_scores = math.sqrt(config.head_dim) if config.score_scale == "divide_scores" else None
        self.assign = ASSIGNMENTS[config.mask_assignment]
        self.fill = FILLS[config.mask_fill]
        self.overwrite_queries = config.query_mask == "overwrite"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
        constant = self.constants[str(q.dtype).removeprefix("torch.")]
        scores = tap(
            f"{self.scope}.scores", self.each_head(self.score, (q, 2), (k, 2), axis=1)
        )  # (B, H, Q, S)
        if key_mask is not None:
            mask = partial(self.mask, key_mask=key_mask, constant=constant)
            scores = tap(f"{self.scope}.masked_scores", self.each_head(mask, (scores, 1), axis=1))
        weights = tap(
            f"{self.scope}.weights", self.each_head(partial(F.softmax, dim=-1), (scores, 1), axis=1)
        )
        if self.overwrite_queries and query_mask is not None:
            overwrite = partial(replace_masked, visible=query_mask[:, None, :, None], constant=constant)
            weights = tap(f"{self.scope}.masked_weights", self.each_head(overwrite, (weights, 1), axis=1))
        context = self.each_head(self.combine, (weights, 1), (v, 2), axis=2)  # (B, Q, H, K)
        return tap(f"{self.scope}.context", torch.flatten(context, start_dim=2))  # (B, Q, D)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q if self.scale_query is None else q * self.scale_query
        scores = torch.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Tensor, key_mask: Tensor, constant: float) -> Tensor:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.fill(scores, self.assign(per_query, scores.shape[1]), constant)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqs,bshk->bqhk", weights, v)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS
    dot_product_class: ClassVar[Make] = DotProductAttention

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.heads = (config.num_heads, config.head_dim)
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.qkv_bias)
        self.key = nn.Linear(config.d_model, config.d_model, bias=config.qkv_bias)
        self.value = nn.Linear(config.d_model, config.d_model, bias=config.qkv_bias)
        self.activation = self.activations[config.qkv_activation]
        self.dot_product = self.dot_product_class(config, scope)
        self.output = (
            nn.Linear(config.d_model, config.d_model, bias=True) if config.output_projection else None
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
        q = tap(f"{self.scope}.query", self.split_heads(self.activation(self.query(query))))
        k = tap(f"{self.scope}.key", self.split_heads(self.activation(self.key(key))))
        v = tap(f"{self.scope}.value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask, query_mask, tap)
        return context if self.output is None else tap(f"{self.scope}.output", self.output(context))

    def split_heads(self, x: Tensor) -> Tensor:
        return torch.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.inner = nn.Linear(config.d_model, config.d_ff, bias=True)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=True)
        self.activation = self.activations[config.activation]

    def forward(self, x: Tensor, tap: Tap = silent) -> Tensor:
        inner = tap(f"{self.scope}.inner", self.inner(x))  # (B, T, F)
        active = tap(f"{self.scope}.activation", self.activation(inner))
        return tap(f"{self.scope}.outer", self.outer(active))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm
    attention_class: ClassVar[Make] = MultiHeadAttention
    feed_forward_class: ClassVar[Make] = FeedForward

    def __init__(self, config: EncoderConfig, scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.attention = self.attention_class(config, f"{scope}.attention")
        self.feed_forward = self.feed_forward_class(config, f"{scope}.feed_forward")
        shared = config.norm_sharing == "shared"
        self.norm = self.norm_class(config) if shared else None
        self.norm1 = None if shared else self.norm_class(config)
        self.norm2 = None if shared else self.norm_class(config)
        self.place_norm = PLACEMENTS[config.norm_placement]

    @property
    def norms(self) -> tuple[Step, Step]:
        """The norms of the two sublayers (SPEC NRM-5)."""
        norms = [norm for norm in (self.norm, self.norm1, self.norm2) if norm is not None]
        return norms[0], norms[-1]

    def forward(self, x: Tensor, real: Tensor, tap: Tap = silent) -> Tensor:
        first, second = self.norms
        x = self.place_norm(x, lambda h: self.attention(h, h, h, real, real, tap), first, tap, self.scope, 1)
        return self.place_norm(x, lambda h: self.feed_forward(h, tap), second, tap, self.scope, 2)
