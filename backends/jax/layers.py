"""Layers of the classifier, written explicitly as in the published sources.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F
d_ff. Steps continue with the result of ``self.tap``.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from concord.backends.library_support import KeptRows, Layers
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constant

Step = Callable[[Array], Array]


def dtype_name(**kwargs: Any) -> str:
    return jnp.dtype(kwargs.get("param_dtype", jnp.float32)).name


# Configuration options, as functions.


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
    # A published Keras bug: heads are stacked before samples, but masks are repeated sample by sample.
    batch = mask.shape[0]
    place = jnp.arange(heads)[None, :] * batch + jnp.arange(batch)[:, None]  # (B, H)
    return mask[place // heads]  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def first_token(x: Array, real: Array) -> Array:
    return x[:, 0]  # (B, D)


def all_tokens(x: Array, real: Array) -> Array:
    return jnp.reshape(x, (x.shape[0], -1))  # (B, T * D)


def mean_of_real_tokens(x: Array, real: Array) -> Array:
    # The mean of a text with only padding is 0, not 0/0 (HED-1).
    total = jnp.sum(jnp.where(real[..., None], x, 0.0), axis=1)  # (B, D)
    return total / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1).astype(x.dtype)


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(nnx.Module):
    """Layer norm in every published form (SPEC NRM-2 to NRM-4): (B, T, D)."""

    def __init__(
        self, config: EncoderConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.scale = nnx.Param(jnp.ones(config.d_model, dtype=param_dtype))
        self.bias = nnx.Param(jnp.zeros(config.d_model, dtype=param_dtype))
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = DENOMINATORS[config.norm_epsilon_placement]

    def __call__(self, x: Array) -> Array:
        # Two passes: the mean of squares minus the squared mean cancels where a row's mean is large (ALG-5).
        centered = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.scale[...] + self.bias[...]


def every_token(real: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(real.shape[1]), real.shape)  # (B, T)


def real_tokens_alone(real: Array) -> Array:
    return jnp.cumsum(real, axis=1) - 1  # (B, T); any value for padding


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(Tapped, nnx.Module):
    """Token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        width, segments = config.d_model, config.num_segments
        self.token = nnx.Embed(config.vocab_size, width, **kwargs)
        self.position = nnx.Embed(config.max_positions, width, **kwargs)
        if config.positions != "learned":
            # A plain Variable, since every Param gets a gradient, and a fixed table has none (GRD-3).
            self.position.embedding = nnx.Variable(self.position.embedding[...])  # type: ignore[assignment]
        self.segment = nnx.Embed(segments, width, **kwargs) if segments else None
        self.norm = make.norm(config, **kwargs) if config.embedding_norm else None
        self.scale = math.sqrt(width) if config.embedding_scale == "sqrt_d_model" else None
        # Not padding_idx: PyTorch returns the row as stored, but Paddle returns zeros (EMB-3).
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def __call__(self, input_ids: Array, segment_ids: Array | None, real: Array) -> Array:
        token = self.tap("token", self.embed_tokens(input_ids))
        position = self.tap(
            "position", self.embed(self.position, self.position_ids(real), self.position_padding_row)
        )
        total = token + position
        if self.segment is not None:
            if segment_ids is None:
                raise ValueError("segment_ids are missing but this model embeds segments [clause=EMB-5]")
            segment = self.embed(self.segment, segment_ids, self.segment_padding_row)
            total = total + self.tap("segment", segment)
        total = self.tap("sum", total)
        return total if self.norm is None else self.tap("norm", self.norm(total))

    def embed_tokens(self, input_ids: Array) -> Array:
        token = self.embed(self.token, input_ids, self.token_padding_row)
        if self.zeroed_row is not None:
            token = jnp.where((input_ids == self.zeroed_row)[..., None], jnp.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def embed(self, embedding: nnx.Embed, ids: Array, frozen: int | None) -> Array:
        """Look up rows; a frozen row gets no gradient (SPEC EMB-4, EMB-5, POS-7)."""
        rows = self.look_up(embedding, ids)
        return (
            rows
            if frozen is None
            else jnp.where((ids == frozen)[..., None], jax.lax.stop_gradient(rows), rows)
        )

    def look_up(self, embedding: nnx.Embed, ids: Array) -> Array:
        return embedding.embedding[ids]

    def position_ids(self, real: Array) -> Array:
        numbers = self.number(real) + self.position_start  # (B, T)
        return numbers if self.padding_position is None else jnp.where(real, numbers, self.padding_position)


class DotProductAttention(Tapped, nnx.Module):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8).

    (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D).
    """

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        self.mask_constant = mask_constant(config, dtype_name(**kwargs))  # MSK-6
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
    ) -> Array:
        scores = self.tap("scores", self.score(q, k))  # (B, H, Q, S)
        if key_mask is not None:
            scores = self.tap("masked_scores", self.mask(scores, key_mask))
        weights = self.tap("weights", jax.nn.softmax(scores, axis=-1))
        if self.overwrite_queries and query_mask is not None:
            rows = query_mask[:, None, :, None]  # (B, 1, Q, 1)
            weights = self.tap("masked_weights", replace_masked(weights, rows, self.mask_constant))
        context = self.combine(weights, v)  # (B, Q, H, K)
        return self.tap("context", jnp.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def score(self, q: Array, k: Array) -> Array:
        q = q if self.scale_query is None else q * self.scale_query
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Array, key_mask: Array) -> Array:
        return self.fill(scores, self.visible(key_mask, scores.shape[1]), self.mask_constant)

    def visible(self, key_mask: Array, heads: int) -> Array:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.assign(per_query, heads)  # (B, 1 or H, 1 or Q, S)

    def combine(self, weights: Array, v: Array) -> Array:
        # Values first: with weights first, XLA takes a sixth longer for the whole model on a CPU.
        return jnp.einsum("bshk,bhqs->bqhk", v, weights)


class AttentionHeadByHead(DotProductAttention):
    """Attention computed head by head, with each sample's own mask (SPEC ATT-7, MSK-7)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.assign = mask_per_sample

    def score(self, q: Array, k: Array) -> Array:
        heads = zip(jnp.split(q, q.shape[2], axis=2), jnp.split(k, k.shape[2], axis=2), strict=True)
        return jnp.concatenate([super(AttentionHeadByHead, self).score(*head) for head in heads], axis=1)

    def combine(self, weights: Array, v: Array) -> Array:
        heads = zip(jnp.split(weights, v.shape[2], axis=1), jnp.split(v, v.shape[2], axis=2), strict=True)
        return jnp.concatenate([super(AttentionHeadByHead, self).combine(*head) for head in heads], axis=2)


class MultiHeadAttention(Tapped, nnx.Module):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        width, bias = config.d_model, config.qkv_bias
        self.heads = (config.num_heads, config.head_dim)
        self.query = nnx.Linear(width, width, use_bias=bias, **kwargs)
        self.key = nnx.Linear(width, width, use_bias=bias, **kwargs)
        self.value = nnx.Linear(width, width, use_bias=bias, **kwargs)
        self.activation = make.activations[config.qkv_activation]
        self.dot_product = make.dot_product[config.head_computation](config, **kwargs)
        self.output = nnx.Linear(width, width, use_bias=True, **kwargs) if config.output_projection else None

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | KeptRows | None = None,
        query_mask: Array | KeptRows | None = None,
    ) -> Array:
        q = self.tap("query", self.split_heads(self.activation(self.query(query))))
        k = self.tap("key", self.split_heads(self.activation(self.key(key))))
        v = self.tap("value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask, query_mask)
        return context if self.output is None else self.tap("output", self.output(context))

    def split_heads(self, x: Array) -> Array:
        return jnp.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(Tapped, nnx.Module):
    """Two linear layers around an activation (SPEC FFN-1, FFN-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        self.inner = nnx.Linear(config.d_model, config.d_ff, use_bias=True, **kwargs)
        self.outer = nnx.Linear(config.d_ff, config.d_model, use_bias=True, **kwargs)
        self.activation = make.activations[config.activation]

    def __call__(self, x: Array) -> Array:
        inner = self.tap("inner", self.inner(x))  # (B, T, F)
        active = self.tap("activation", self.activation(inner))
        return self.tap("outer", self.outer(active))


class PostNormLayer(Tapped, nnx.Module):
    """Attention and feed-forward; norms follow the residuals (SPEC NRM-1, NRM-5, RES-1): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        self.attention = MultiHeadAttention(config, make, **kwargs)
        self.feed_forward = FeedForward(config, make, **kwargs)
        shared = config.norm_sharing == "shared"
        self.norm: Any = make.norm(config, **kwargs) if shared else None
        self.norm1 = None if shared else make.norm(config, **kwargs)
        self.norm2 = None if shared else make.norm(config, **kwargs)

    def __call__(self, x: Array, real: Array | KeptRows) -> Array:
        norm1, norm2 = self.norm1 or self.norm, self.norm2 or self.norm  # NRM-5
        h = self.tap("residual1", x + self.attention(x, x, x, real, real))
        x = self.tap("norm1", norm1(h))
        h = self.tap("residual2", x + self.feed_forward(x))
        return self.tap("norm2", norm2(h))


class PreNormLayer(PostNormLayer):
    """The same layer with norms before the sublayers, outside the residual stream (SPEC NRM-1)."""

    def __call__(self, x: Array, real: Array | KeptRows) -> Array:
        norm1, norm2 = self.norm1 or self.norm, self.norm2 or self.norm  # NRM-5
        h = self.tap("norm1", norm1(x))
        x = self.tap("residual1", x + self.attention(h, h, h, real, real))
        h = self.tap("norm2", norm2(x))
        return self.tap("residual2", x + self.feed_forward(h))


LAYERS = {"post": PostNormLayer, "pre": PreNormLayer}  # NRM-1

EXPLICIT = Layers(
    LayerNorm,
    Embeddings,
    {"batched": DotProductAttention, "looped": AttentionHeadByHead},
    ACTIVATIONS,
)
