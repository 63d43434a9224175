"""Layers of the classifier, written out as the published sources compute them.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff.
Every layer goes on with what ``tap(name, tensor)`` returns for each of its steps. What a layer is made of stands in
class attributes, where :mod:`concord.backends.jax.library` puts the framework's own layers.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import zeros

from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

Tap = Callable[[str, Array], Array]


def silent(name: str, tensor: Array) -> Array:
    return tensor


# Options of the configuration, as functions.


def identity(x: Array) -> Array:
    return x


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1.0 + jax.lax.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"none": identity, "relu": jax.nn.relu, "gelu_erf": gelu_erf, "gelu_tanh": gelu_tanh}  # ATT-1, FFN-2


def epsilon_inside(variance: Array, epsilon: float) -> Array:
    return jnp.sqrt(variance + epsilon)


def epsilon_outside(variance: Array, epsilon: float) -> Array:
    return jnp.sqrt(variance) + epsilon


DEVIATIONS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


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
    slot = jnp.arange(heads, dtype=jnp.int64)[None, :] * batch + jnp.arange(batch, dtype=jnp.int64)[:, None]  # (B, H)
    return mask[slot // heads]  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def all_heads(step: Callable[..., Array], *tensors: tuple[Array, int], axis: int) -> Array:
    return step(*(x for x, heads in tensors))


def head_by_head(step: Callable[..., Array], *tensors: tuple[Array, int], axis: int) -> Array:
    groups = zip(*(jnp.split(x, x.shape[heads], axis=heads) for x, heads in tensors), strict=True)
    return jnp.concatenate([step(*group) for group in groups], axis=axis)


HEADS = {"batched": all_heads, "looped": head_by_head}  # ATT-7: a step, tensors each with the axis of heads, that of the result


class LayerNorm(nnx.Module):
    """Layer norm over D in every published form (SPEC NRM-2 to NRM-4): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        self.scale = nnx.Param(jnp.ones(config.d_model, dtype=jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.d_model, dtype=jnp.float32))
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.deviation = DEVIATIONS[config.norm_epsilon_placement]

    def __call__(self, x: Array) -> Array:
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.deviation(variance, self.epsilon) * self.scale[...] + self.bias[...]


class Embeddings(nnx.Module):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.name = name
        rngs = nnx.Rngs(0)
        self.token = nnx.Embed(config.vocab_size, config.d_model, embedding_init=zeros, rngs=rngs)
        self.position = nnx.Embed(config.max_positions, config.d_model, embedding_init=zeros, rngs=rngs)
        self.position.embedding = (nnx.Param if config.positions == "learned" else nnx.Variable)(self.position.embedding[...])
        self.segment = nnx.Embed(config.num_segments, config.d_model, embedding_init=zeros, rngs=rngs) if config.num_segments else None
        self.norm = self.norm_class(config) if config.embedding_norm else None
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else None
        self.token_padding_row = config.token_padding_row
        self.zero_padding = config.token_padding_forward == "zero"
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.zero_row_for_padding = config.position_of_padding == "zero_row"

    def __call__(self, input_ids: Array, segment_ids: Array | None, real: Array, tap: Tap) -> Array:
        token = tap(f"{self.name}.token", self.embed_tokens(input_ids))
        position = tap(f"{self.name}.position", self.look_up(self.position, self.position_ids(real)))
        total = token + position
        if self.segment is not None:
            segment = freeze_row(self.look_up(self.segment, segment_ids), segment_ids, self.segment_padding_row)
            total = total + tap(f"{self.name}.segment", segment)
        total = tap(f"{self.name}.sum", total)
        return total if self.norm is None else tap(f"{self.name}.norm", self.norm(total))

    def embed_tokens(self, input_ids: Array) -> Array:
        token = freeze_row(self.look_up(self.token, input_ids), input_ids, self.token_padding_row)
        if self.zero_padding:
            token = jnp.where((input_ids == self.token_padding_row)[..., None], jnp.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def look_up(self, table: nnx.Embed, ids: Array) -> Array:
        return table.embedding[ids]

    def position_ids(self, real: Array) -> Array:
        numbers = jnp.arange(real.shape[1], dtype=jnp.int64) + self.position_start  # (T,)
        numbers = jnp.broadcast_to(numbers, real.shape)  # (B, T)
        return jnp.where(real, numbers, 0) if self.zero_row_for_padding else numbers


def freeze_row(vectors: Array, ids: Array, row: int | None) -> Array:
    """Let no gradient reach one row of the table that the vectors were taken from (SPEC EMB-4, EMB-5)."""
    return vectors if row is None else jnp.where((ids == row)[..., None], jax.lax.stop_gradient(vectors), vectors)


class DotProductAttention(nnx.Module):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.constants = mask_constants(config)  # MSK-6
        self.name = name
        self.each_head = HEADS[config.head_computation]
        self.scale_query = config.head_dim**-0.5 if config.score_scale == "multiply_query" else None
        self.divide_scores = math.sqrt(config.head_dim) if config.score_scale == "divide_scores" else None
        self.assign = ASSIGNMENTS[config.mask_assignment]
        self.fill = FILLS[config.mask_fill]
        self.overwrite_queries = config.query_mask == "overwrite"

    def __call__(self, q: Array, k: Array, v: Array, key_mask: Array | None, query_mask: Array | None, tap: Tap) -> Array:
        constant = self.constants[str(q.dtype)]
        scores = tap(f"{self.name}.scores", self.each_head(self.score, (q, 2), (k, 2), axis=1))  # (B, H, Q, S)
        if key_mask is not None:
            mask = partial(self.mask, key_mask=key_mask, constant=constant)
            scores = tap(f"{self.name}.masked_scores", self.each_head(mask, (scores, 1), axis=1))
        weights = tap(f"{self.name}.weights", self.each_head(partial(jax.nn.softmax, axis=-1), (scores, 1), axis=1))
        if self.overwrite_queries and query_mask is not None:
            overwrite = partial(replace_masked, visible=query_mask[:, None, :, None], constant=constant)
            weights = tap(f"{self.name}.masked_weights", self.each_head(overwrite, (weights, 1), axis=1))
        context = self.each_head(self.combine, (weights, 1), (v, 2), axis=2)  # (B, Q, H, K)
        return tap(f"{self.name}.context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

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

    activations = ACTIVATIONS
    dot_product_class = DotProductAttention

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.name = name
        self.heads = (config.num_heads, config.head_dim)
        width, rngs = config.d_model, nnx.Rngs(0)
        self.query = nnx.Linear(width, width, use_bias=config.qkv_bias, kernel_init=zeros, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=config.qkv_bias, kernel_init=zeros, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=config.qkv_bias, kernel_init=zeros, rngs=rngs)
        self.activation = self.activations[config.qkv_activation]
        self.dot_product = self.dot_product_class(config, name)
        self.output = nnx.Linear(width, width, use_bias=True, kernel_init=zeros, rngs=rngs) if config.output_projection else None

    def __call__(self, query: Array, key: Array, value: Array, key_mask: Array | None, query_mask: Array | None, tap: Tap) -> Array:
        q = tap(f"{self.name}.query", self.split_heads(self.activation(self.query(query))))
        k = tap(f"{self.name}.key", self.split_heads(self.activation(self.key(key))))
        v = tap(f"{self.name}.value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask, query_mask, tap)
        return context if self.output is None else tap(f"{self.name}.output", self.output(context))

    def split_heads(self, x: Array) -> Array:
        return jnp.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(nnx.Module):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations = ACTIVATIONS

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.name = name
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(config.d_model, config.d_ff, use_bias=True, kernel_init=zeros, rngs=rngs)
        self.outer = nnx.Linear(config.d_ff, config.d_model, use_bias=True, kernel_init=zeros, rngs=rngs)
        self.activation = self.activations[config.activation]

    def __call__(self, x: Array, tap: Tap) -> Array:
        inner = tap(f"{self.name}.inner", self.inner(x))  # (B, T, F)
        active = tap(f"{self.name}.activation", self.activation(inner))
        return tap(f"{self.name}.outer", self.outer(active))


class EncoderLayer(nnx.Module):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class = LayerNorm
    attention_class = MultiHeadAttention
    feed_forward_class = FeedForward

    def __init__(self, config: EncoderConfig, name: str) -> None:
        self.name = name
        self.attention = self.attention_class(config, f"{name}.attention")
        self.feed_forward = self.feed_forward_class(config, f"{name}.feed_forward")
        if config.norm_sharing == "shared":
            self.norm = self.norm_class(config)
            self.norm_names = ("norm", "norm")
        else:
            self.norm1 = self.norm_class(config)
            self.norm2 = self.norm_class(config)
            self.norm_names = ("norm1", "norm2")
        # Not bound: nnx.merge builds new modules, and a bound method would compute with the old one's weights.
        self.sublayer = EncoderLayer.pre_norm if config.norm_placement == "pre" else EncoderLayer.post_norm

    def __call__(self, x: Array, real: Array, tap: Tap) -> Array:
        x = self.sublayer(self, 1, x, lambda h: self.attention(h, h, h, real, real, tap), tap)
        return self.sublayer(self, 2, x, lambda h: self.feed_forward(h, tap), tap)

    def pre_norm(self, number: int, x: Array, function: Callable[[Array], Array], tap: Tap) -> Array:
        normed = tap(f"{self.name}.norm{number}", getattr(self, self.norm_names[number - 1])(x))
        return tap(f"{self.name}.residual{number}", x + function(normed))

    def post_norm(self, number: int, x: Array, function: Callable[[Array], Array], tap: Tap) -> Array:
        total = tap(f"{self.name}.residual{number}", x + function(x))
        return tap(f"{self.name}.norm{number}", getattr(self, self.norm_names[number - 1])(total))
