"""Layers of the classifier, written out as the published sources compute them.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff.
Every layer goes on with what ``tap(name, tensor)`` returns for each of its steps. What a layer is made of stands in
class attributes, where :mod:`concord.backends.tf.library` puts the framework's own layers.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import tensorflow as tf
from keras import layers
from keras.ops import shape
from tensorflow import Tensor

from concord.backends.tf.base import Layer, Linear
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

# Keras takes only tensors by position, so ``tap`` is given by name; so are masks, for it fills in absent ones by name.
Step = Callable[[Tensor], Tensor]
Tap = Callable[[str, Tensor], Tensor]
Make = Callable[..., layers.Layer]


def silent(name: str, tensor: Tensor) -> Tensor:
    return tensor


# Options of the configuration, as functions.


def identity(x: Tensor) -> Tensor:
    return x


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Step] = {
    "none": identity,
    "relu": tf.nn.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2
POOLERS: dict[str, Step] = {"none": identity, "tanh": tf.tanh, "relu": tf.nn.relu}  # HED-2


def epsilon_inside(variance: Tensor, epsilon: float) -> Tensor:
    return tf.sqrt(variance + epsilon)


def epsilon_outside(variance: Tensor, epsilon: float) -> Tensor:
    return tf.sqrt(variance) + epsilon


DENOMINATORS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return tf.where(visible, scores, tf.constant(constant, dtype=scores.dtype))


def add_to_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return scores + tf.where(
        visible, tf.constant(0.0, dtype=scores.dtype), tf.constant(constant, dtype=scores.dtype)
    )


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Tensor, heads: int) -> Tensor:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Tensor, heads: int) -> Tensor:
    # The published mistake: heads are stacked before samples, masks are repeated sample by sample.
    batch = shape(mask)[0]
    slot = (
        tf.range(heads, dtype=tf.int64)[None, :] * batch + tf.range(batch, dtype=tf.int64)[:, None]
    )  # (B, H)
    return tf.gather(mask, slot // heads, axis=0)  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def all_heads(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    return step(*(x for x, heads in tensors))


def head_by_head(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    groups = zip(
        *(tf.split(x, num_or_size_splits=x.shape[heads], axis=heads) for x, heads in tensors), strict=True
    )
    return tf.concat([step(*group) for group in groups], axis=axis)


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
    return tf.reshape(x, (shape(x)[0], -1))  # (B, T * D)


def mean_of_real_tokens(x: Tensor, real: Tensor) -> Tensor:
    total = tf.reduce_sum(tf.where(real[..., None], x, tf.zeros_like(x)), axis=1)  # (B, D)
    return total / tf.cast(
        tf.maximum(tf.reduce_sum(tf.cast(real, tf.int64), axis=1, keepdims=True), 1), x.dtype
    )


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(Layer):
    """Layer norm over D in every published form (SPEC NRM-2 to NRM-4): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = config.d_model
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = DENOMINATORS[config.norm_epsilon_placement]

    def build(self, input_shape: Any = None) -> None:
        self.weight = self.add_weight(name="gamma", shape=(self.width,), initializer="ones")
        self.bias = self.add_weight(name="beta", shape=(self.width,), initializer="zeros")

    def call(self, x: Tensor) -> Tensor:
        centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.weight.value + self.bias.value


def every_token(real: Tensor) -> Tensor:
    return tf.broadcast_to(tf.range(shape(real)[1], dtype=tf.int64), shape(real))  # (B, T)


def real_tokens_alone(real: Tensor) -> Tensor:
    return tf.cumsum(tf.cast(real, tf.int64), axis=1) - 1  # (B, T); of padding any number


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(Layer):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scope = scope
        self.token = layers.Embedding(config.vocab_size, config.d_model, mask_zero=False, **self.sub("token"))
        self.position = layers.Embedding(
            config.max_positions, config.d_model, mask_zero=False, **self.sub("position")
        )
        self.position.trainable = config.positions == "learned"
        self.segment = (
            layers.Embedding(config.num_segments, config.d_model, mask_zero=False, **self.sub("segment"))
            if config.num_segments
            else None
        )
        self.norm = self.norm_class(config, **self.sub("norm")) if config.embedding_norm else None
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else None
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def call(self, input_ids: Tensor, segment_ids: Tensor | None, real: Tensor, tap: Tap = silent) -> Tensor:
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
            token = tf.where((input_ids == self.zeroed_row)[..., None], tf.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def look_up(self, table: layers.Embedding, ids: Tensor) -> Tensor:
        return tf.gather(table.embeddings.value, ids, axis=0)

    def position_ids(self, real: Tensor) -> Tensor:
        numbers = self.number(real) + self.position_start  # (B, T)
        return (
            numbers
            if self.padding_position is None
            else tf.where(real, numbers, tf.fill(shape(real), tf.constant(self.padding_position, tf.int64)))
        )


def freeze_row(vectors: Tensor, ids: Tensor, row: int | None) -> Tensor:
    """Let no gradient reach one row of the table that the vectors were taken from (SPEC EMB-4, EMB-5, POS-7)."""
    return vectors if row is None else tf.where((ids == row)[..., None], tf.stop_gradient(vectors), vectors)


class DotProductAttention(Layer):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.constants = mask_constants(config)  # MSK-6
        self.scope = scope
        self.each_head = HEADS[config.head_computation]
        self.scale_query = config.head_dim**-0.5 if config.score_scale == "multiply_query" else None
        self.divide_scores = math.sqrt(config.head_dim) if config.score_scale == "divide_scores" else None
        self.assign = ASSIGNMENTS[config.mask_assignment]
        self.fill = FILLS[config.mask_fill]
        self.overwrite_queries = config.query_mask == "overwrite"

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        tap: Tap = silent,
    ) -> Tensor:
        constant = self.constants[q.dtype.name]
        scores = tap(
            f"{self.scope}.scores", self.each_head(self.score, (q, 2), (k, 2), axis=1)
        )  # (B, H, Q, S)
        if key_mask is not None:
            mask = partial(self.mask, key_mask=key_mask, constant=constant)
            scores = tap(f"{self.scope}.masked_scores", self.each_head(mask, (scores, 1), axis=1))
        weights = tap(
            f"{self.scope}.weights", self.each_head(partial(tf.nn.softmax, axis=-1), (scores, 1), axis=1)
        )
        if self.overwrite_queries and query_mask is not None:
            overwrite = partial(replace_masked, visible=query_mask[:, None, :, None], constant=constant)
            weights = tap(f"{self.scope}.masked_weights", self.each_head(overwrite, (weights, 1), axis=1))
        context = self.each_head(self.combine, (weights, 1), (v, 2), axis=2)  # (B, Q, H, K)
        return tap(f"{self.scope}.context", tf.reshape(context, (*shape(context)[:2], -1)))  # (B, Q, D)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q if self.scale_query is None else q * self.scale_query
        scores = tf.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Tensor, key_mask: Tensor, constant: float) -> Tensor:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.fill(scores, self.assign(per_query, scores.shape[1]), constant)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        return tf.einsum("bhqs,bshk->bqhk", weights, v)


class MultiHeadAttention(Layer):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS
    dot_product_class: ClassVar[Make] = DotProductAttention

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scope = scope
        self.heads = (config.num_heads, config.head_dim)
        self.query = Linear(config.d_model, config.d_model, use_bias=config.qkv_bias, **self.sub("query"))
        self.key = Linear(config.d_model, config.d_model, use_bias=config.qkv_bias, **self.sub("key"))
        self.value = Linear(config.d_model, config.d_model, use_bias=config.qkv_bias, **self.sub("value"))
        self.activation = self.activations[config.qkv_activation]
        self.dot_product = self.dot_product_class(config, scope, **self.sub("dot_product"))
        # Not ``self.output``: every Keras layer has a property of that name.
        self.projection = (
            Linear(config.d_model, config.d_model, use_bias=True, **self.sub("output"))
            if config.output_projection
            else None
        )

    def call(
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
        context = self.dot_product(q, k, v, key_mask=key_mask, query_mask=query_mask, tap=tap)
        return context if self.projection is None else tap(f"{self.scope}.output", self.projection(context))

    def split_heads(self, x: Tensor) -> Tensor:
        return tf.reshape(x, (*shape(x)[:2], *self.heads))  # (B, T, H, K)


class FeedForward(Layer):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations: ClassVar[dict[str, Step]] = ACTIVATIONS

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scope = scope
        self.inner = Linear(config.d_model, config.d_ff, use_bias=True, **self.sub("inner"))
        self.outer = Linear(config.d_ff, config.d_model, use_bias=True, **self.sub("outer"))
        self.activation = self.activations[config.activation]

    def call(self, x: Tensor, tap: Tap = silent) -> Tensor:
        inner = tap(f"{self.scope}.inner", self.inner(x))  # (B, T, F)
        active = tap(f"{self.scope}.activation", self.activation(inner))
        return tap(f"{self.scope}.outer", self.outer(active))


class EncoderLayer(Layer):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class: ClassVar[Make] = LayerNorm
    attention_class: ClassVar[Make] = MultiHeadAttention
    feed_forward_class: ClassVar[Make] = FeedForward

    def __init__(self, config: EncoderConfig, scope: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scope = scope
        self.attention = self.attention_class(config, f"{scope}.attention", **self.sub("attention"))
        self.feed_forward = self.feed_forward_class(
            config, f"{scope}.feed_forward", **self.sub("feed_forward")
        )
        shared = config.norm_sharing == "shared"
        self.norm = self.norm_class(config, **self.sub("norm")) if shared else None
        self.norm1 = None if shared else self.norm_class(config, **self.sub("norm1"))
        self.norm2 = None if shared else self.norm_class(config, **self.sub("norm2"))
        self.place_norm = PLACEMENTS[config.norm_placement]

    @property
    def norms(self) -> tuple[Step, Step]:
        """The norms of the two sublayers (SPEC NRM-5)."""
        norms = [norm for norm in (self.norm, self.norm1, self.norm2) if norm is not None]
        return norms[0], norms[-1]

    def call(self, x: Tensor, real: Tensor, tap: Tap = silent) -> Tensor:
        first, second = self.norms
        x = self.place_norm(
            x,
            lambda h: self.attention(h, h, h, key_mask=real, query_mask=real, tap=tap),
            first,
            tap,
            self.scope,
            1,
        )
        return self.place_norm(x, lambda h: self.feed_forward(h, tap=tap), second, tap, self.scope, 2)
