"""Layers of the classifier, written out as the published sources compute them.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff.
Every layer goes on with what ``tap(name, tensor)`` returns for each of its steps. What a layer is made of stands in
class attributes, where :mod:`concord.backends.jax.library` puts the framework's own layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

Step = Callable[[Array], Array]
Tap = Callable[[str, Array], Array]
Make = Callable[..., nnx.Module]


def silent(name: str, tensor: Array) -> Array:
    return tensor


# Options of the configuration, as functions.


def identity(x: Array) -> Array:
    return x


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1.0 + jax.lax.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Step] = {
    "none": identity,
    "relu": jax.nn.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2
POOLERS: dict[str, Step] = {"none": identity, "tanh": jnp.tanh, "relu": jax.nn.relu}  # HED-2


def epsilon_inside(variance: Array, epsilon: float) -> Array:
    return jnp.sqrt(variance + epsilon)


def epsilon_outside(variance: Array, epsilon: float) -> Array:
    return jnp.sqrt(variance) + epsilon


DENOMINATORS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Array, visible: Array, constant: float) -> Array:
    return jnp.where(visible, scores, jnp.full_like(scores, constant))


def add_to_masked(scores: Array, visible: Array, constant: float) -> Array:
    return scores + jnp.where(visible, jnp.zeros_like(scores), jnp.full_like(scores, constant))


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Array, heads: int) -> Array:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Array, heads: int) -> Array:
    # The published mistake: heads are stacked before samples, masks are repeated sample by sample.
    batch = mask.shape[0]
    slot = jnp.arange(heads)[None, :] * batch + jnp.arange(batch)[:, None]  # (B, H)
    return mask[slot // heads]  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def all_heads(step: Callable[..., Array], *tensors: tuple[Array, int], axis: int) -> Array:
    return step(*(x for x, heads in tensors))


def head_by_head(step: Callable[..., Array], *tensors: tuple[Array, int], axis: int) -> Array:
    groups = zip(*(jnp.split(x, x.shape[heads], axis=heads) for x, heads in tensors), strict=True)
    return jnp.concatenate([step(*group) for group in groups], axis=axis)


HEADS = {
    "batched": all_heads,
    "looped": head_by_head,
}  # ATT-7: a step, tensors each with the axis of heads, that of the result


def pre_norm(x: Array, sublayer: Step, norm: Step, tap: Tap, scope: str, number: int) -> Array:
    normed = tap(f"{scope}.norm{number}", norm(x))
    return tap(f"{scope}.residual{number}", x + sublayer(normed))


def post_norm(x: Array, sublayer: Step, norm: Step, tap: Tap, scope: str, number: int) -> Array:
    total = tap(f"{scope}.residual{number}", x + sublayer(x))
    return tap(f"{scope}.norm{number}", norm(total))


PLACEMENTS = {"pre": pre_norm, "post": post_norm}  # NRM-1


def first_token(x: Array, real: Array) -> Array:
    return x[:, 0]  # (B, D)


def all_tokens(x: Array, real: Array) -> Array:
    return jnp.reshape(x, (x.shape[0], -1))  # (B, T * D)


def mean_of_real_tokens(x: Array, real: Array) -> Array:
    total = jnp.sum(jnp.where(real[..., None], x, 0.0), axis=1)  # (B, D)
    return total / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1).astype(x.dtype)


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(nnx.Module):
    """Layer norm over D in every published form (SPEC NRM-2 to NRM-4): (B, T, D) to (B, T, D)."""

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scale = nnx.Param(jnp.ones(config.d_model, dtype=param_dtype))
        self.bias = nnx.Param(jnp.zeros(config.d_model, dtype=param_dtype))
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = DENOMINATORS[config.norm_epsilon_placement]

    def __call__(self, x: Array) -> Array:
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.scale[...] + self.bias[...]


def every_token(real: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(real.shape[1]), real.shape)  # (B, T)


def real_tokens_alone(real: Array) -> Array:
    return jnp.cumsum(real, axis=1) - 1  # (B, T); of padding any number


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(nnx.Module):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scope = scope
        self.token = nnx.Embed(config.vocab_size, config.d_model, param_dtype=param_dtype, rngs=rngs)
        self.position = nnx.Embed(config.max_positions, config.d_model, param_dtype=param_dtype, rngs=rngs)
        if config.positions != "learned":
            self.position.embedding = nnx.Variable(self.position.embedding[...])  # type: ignore[assignment]  # no Param, which gradients are taken by
        self.segment = (
            nnx.Embed(config.num_segments, config.d_model, param_dtype=param_dtype, rngs=rngs)
            if config.num_segments
            else None
        )
        self.norm = (
            self.norm_class(config, param_dtype=param_dtype, rngs=rngs) if config.embedding_norm else None
        )
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else None
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def __call__(self, input_ids: Array, segment_ids: Array | None, real: Array, tap: Tap = silent) -> Array:
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

    def embed_tokens(self, input_ids: Array) -> Array:
        token = freeze_row(self.look_up(self.token, input_ids), input_ids, self.token_padding_row)
        if self.zeroed_row is not None:
            token = jnp.where((input_ids == self.zeroed_row)[..., None], jnp.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def look_up(self, table: nnx.Embed, ids: Array) -> Array:
        return table.embedding[ids]

    def position_ids(self, real: Array) -> Array:
        numbers = self.number(real) + self.position_start  # (B, T)
        return numbers if self.padding_position is None else jnp.where(real, numbers, self.padding_position)


def freeze_row(vectors: Array, ids: Array, row: int | None) -> Array:
    """Let no gradient reach one row of the table that the vectors were taken from (SPEC EMB-4, EMB-5, POS-7)."""
    return (
        vectors
        if row is None
        else jnp.where((ids == row)[..., None], jax.lax.stop_gradient(vectors), vectors)
    )


class DotProductAttention(nnx.Module):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.each_head = HEADS[config.head_computation]
        self.scale_query = config.head_dim**-0.5 if config.score_scale == "multiply_query" else None
        self.divide_scores = math.sqrt(config.head_dim) if config.score_scale == "divide_scores" else None
        self.assign = ASSIGNMENTS[config.mask_assignment]
        self.fill = FILLS[config.mask_fill]
        self.overwrite_queries = config.query_mask == "overwrite"

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
        tap: Tap = silent,
    ) -> Array:
        constant = self.constants[str(q.dtype)]
        scores = tap(
            f"{self.scope}.scores", self.each_head(self.score, (q, 2), (k, 2), axis=1)
        )  # (B, H, Q, S)
        if key_mask is not None:
            mask = partial(self.mask, key_mask=key_mask, constant=constant)
            scores = tap(f"{self.scope}.masked_scores", self.each_head(mask, (scores, 1), axis=1))
        weights = tap(
            f"{self.scope}.weights", self.each_head(partial(jax.nn.softmax, axis=-1), (scores, 1), axis=1)
        )
        if self.overwrite_queries and query_mask is not None:
            overwrite = partial(replace_masked, visible=query_mask[:, None, :, None], constant=constant)
            weights = tap(f"{self.scope}.masked_weights", self.each_head(overwrite, (weights, 1), axis=1))
        context = self.each_head(self.combine, (weights, 1), (v, 2), axis=2)  # (B, Q, H, K)
        return tap(f"{self.scope}.context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def score(self, q: Array, k: Array) -> Array:
        q = q if self.scale_query is None else q * self.scale_query
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Array, key_mask: Array, constant: float) -> Array:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.fill(scores, self.assign(per_query, scores.shape[1]), constant)

    def combine(self, weights: Array, v: Array) -> Array:
        return jnp.einsum("bhqs,bshk->bqhk", weights, v)


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS
    dot_product_class: ClassVar[Make] = DotProductAttention

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scope = scope
        self.heads = (config.num_heads, config.head_dim)
        width = config.d_model
        self.query = nnx.Linear(width, width, use_bias=config.qkv_bias, param_dtype=param_dtype, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=config.qkv_bias, param_dtype=param_dtype, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=config.qkv_bias, param_dtype=param_dtype, rngs=rngs)
        self.activation = self.activations[config.qkv_activation]
        self.dot_product = self.dot_product_class(config, scope, param_dtype=param_dtype, rngs=rngs)
        self.output = (
            nnx.Linear(width, width, use_bias=True, param_dtype=param_dtype, rngs=rngs)
            if config.output_projection
            else None
        )

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | None = None,
        query_mask: Array | None = None,
        tap: Tap = silent,
    ) -> Array:
        q = tap(f"{self.scope}.query", self.split_heads(self.activation(self.query(query))))
        k = tap(f"{self.scope}.key", self.split_heads(self.activation(self.key(key))))
        v = tap(f"{self.scope}.value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask, query_mask, tap)
        return context if self.output is None else tap(f"{self.scope}.output", self.output(context))

    def split_heads(self, x: Array) -> Array:
        return jnp.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(nnx.Module):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scope = scope
        self.inner = nnx.Linear(
            config.d_model, config.d_ff, use_bias=True, param_dtype=param_dtype, rngs=rngs
        )
        self.outer = nnx.Linear(
            config.d_ff, config.d_model, use_bias=True, param_dtype=param_dtype, rngs=rngs
        )
        self.activation = self.activations[config.activation]

    def __call__(self, x: Array, tap: Tap = silent) -> Array:
        inner = tap(f"{self.scope}.inner", self.inner(x))  # (B, T, F)
        active = tap(f"{self.scope}.activation", self.activation(inner))
        return tap(f"{self.scope}.outer", self.outer(active))


class EncoderLayer(nnx.Module):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm
    attention_class: ClassVar[Make] = MultiHeadAttention
    feed_forward_class: ClassVar[Make] = FeedForward

    def __init__(
        self, config: EncoderConfig, scope: str, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scope = scope
        self.attention = self.attention_class(
            config, f"{scope}.attention", param_dtype=param_dtype, rngs=rngs
        )
        self.feed_forward = self.feed_forward_class(
            config, f"{scope}.feed_forward", param_dtype=param_dtype, rngs=rngs
        )
        shared = config.norm_sharing == "shared"
        self.norm = self.norm_class(config, param_dtype=param_dtype, rngs=rngs) if shared else None
        self.norm1 = None if shared else self.norm_class(config, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = None if shared else self.norm_class(config, param_dtype=param_dtype, rngs=rngs)
        self.place_norm = PLACEMENTS[config.norm_placement]

    @property
    def norms(self) -> tuple[Step, Step]:
        """The norms of the two sublayers (SPEC NRM-5)."""
        norms = [norm for norm in (self.norm, self.norm1, self.norm2) if norm is not None]
        return norms[0], norms[-1]

    def __call__(self, x: Array, real: Array, tap: Tap = silent) -> Array:
        first, second = self.norms
        x = self.place_norm(x, lambda h: self.attention(h, h, h, real, real, tap), first, tap, self.scope, 1)
        return self.place_norm(x, lambda h: self.feed_forward(h, tap), second, tap, self.scope, 2)
