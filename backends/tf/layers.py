"""Layers of the classifier, written out as the published sources compute them.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff.
Every layer goes on with what ``tap(name, tensor)`` returns for each of its steps. What a layer is made of stands in
class attributes, where :mod:`concord.backends.tf.library` puts the framework's own layers.
"""

import math
from collections.abc import Callable
from functools import partial

import tensorflow as tf
from keras import layers
from tensorflow import Tensor

from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants

# Layers are built when they are constructed, and say so: Keras would trace ``call``, taps and all, to find out.
# Keras takes only tensors by position, so ``tap`` is given by name; so are masks, for it fills in absent ones by name.
Tap = Callable[[str, Tensor], Tensor]


def silent(name: str, tensor: Tensor) -> Tensor:
    return tensor


# Options of the configuration, as functions.


def identity(x: Tensor) -> Tensor:
    return x


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"none": identity, "relu": tf.nn.relu, "gelu_erf": gelu_erf, "gelu_tanh": gelu_tanh}  # ATT-1, FFN-2


def epsilon_inside(variance: Tensor, epsilon: float) -> Tensor:
    return tf.sqrt(variance + epsilon)


def epsilon_outside(variance: Tensor, epsilon: float) -> Tensor:
    return tf.sqrt(variance) + epsilon


DEVIATIONS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return tf.where(visible, scores, tf.constant(constant, dtype=scores.dtype))


def add_to_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return scores + tf.where(visible, tf.constant(0.0, dtype=scores.dtype), tf.constant(constant, dtype=scores.dtype))


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Tensor, heads: int) -> Tensor:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Tensor, heads: int) -> Tensor:
    # The published mistake: heads are stacked before samples, masks are repeated sample by sample.
    batch = mask.shape[0]
    slot = tf.range(heads, dtype=tf.int64)[None, :] * batch + tf.range(batch, dtype=tf.int64)[:, None]  # (B, H)
    return tf.gather(mask, slot // heads, axis=0)  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def all_heads(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    return step(*(x for x, heads in tensors))


def head_by_head(step: Callable[..., Tensor], *tensors: tuple[Tensor, int], axis: int) -> Tensor:
    groups = zip(*(tf.split(x, num_or_size_splits=x.shape[heads], axis=heads) for x, heads in tensors), strict=True)
    return tf.concat([step(*group) for group in groups], axis=axis)


HEADS = {"batched": all_heads, "looped": head_by_head}  # ATT-7: a step, tensors each with the axis of heads, that of the result


class LayerNorm(layers.Layer):
    """Layer norm over D in every published form (SPEC NRM-2 to NRM-4): (B, T, D) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        self.weight = self.add_weight(name="gamma", shape=(config.d_model,), initializer="ones", trainable=True)
        self.bias = self.add_weight(name="beta", shape=(config.d_model,), initializer="zeros", trainable=True)
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.deviation = DEVIATIONS[config.norm_epsilon_placement]
        self.built = True

    def call(self, x: Tensor) -> Tensor:
        centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.deviation(variance, self.epsilon) * self.weight.value + self.bias.value


class Embeddings(layers.Layer):
    """Sum of token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5, POS-6): (B, T) to (B, T, D)."""

    norm_class = LayerNorm

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        width, segments = config.d_model, config.num_segments
        self.token = layers.Embedding(config.vocab_size, width, mask_zero=False, name=f"{name}.token")
        self.position = layers.Embedding(config.max_positions, width, mask_zero=False, name=f"{name}.position")
        self.position.trainable = config.positions == "learned"
        self.segment = layers.Embedding(segments, width, mask_zero=False, name=f"{name}.segment") if segments else None
        for table in filter(None, (self.token, self.position, self.segment)):
            table.build()
        self.norm = self.norm_class(config, f"{name}.norm") if config.embedding_norm else None
        self.scale = math.sqrt(config.d_model) if config.embedding_scale == "sqrt_d_model" else None
        self.token_padding_row = config.token_padding_row
        self.zero_padding = config.token_padding_forward == "zero"
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.zero_row_for_padding = config.position_of_padding == "zero_row"
        self.built = True

    def call(self, input_ids: Tensor, segment_ids: Tensor | None, real: Tensor, tap: Tap) -> Tensor:
        token = tap(f"{self.name}.token", self.embed_tokens(input_ids))
        position = tap(f"{self.name}.position", self.look_up(self.position, self.position_ids(real)))
        total = token + position
        if self.segment is not None:
            segment = freeze_row(self.look_up(self.segment, segment_ids), segment_ids, self.segment_padding_row)
            total = total + tap(f"{self.name}.segment", segment)
        total = tap(f"{self.name}.sum", total)
        return total if self.norm is None else tap(f"{self.name}.norm", self.norm(total))

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        token = freeze_row(self.look_up(self.token, input_ids), input_ids, self.token_padding_row)
        if self.zero_padding:
            token = tf.where((input_ids == self.token_padding_row)[..., None], tf.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def look_up(self, table: layers.Embedding, ids: Tensor) -> Tensor:
        return tf.gather(table.embeddings.value, ids, axis=0)

    def position_ids(self, real: Tensor) -> Tensor:
        numbers = tf.range(real.shape[1], dtype=tf.int64) + self.position_start  # (T,)
        numbers = tf.broadcast_to(numbers, real.shape)  # (B, T)
        return tf.where(real, numbers, tf.zeros_like(numbers)) if self.zero_row_for_padding else numbers


def freeze_row(vectors: Tensor, ids: Tensor, row: int | None) -> Tensor:
    """Let no gradient reach one row of the table that the vectors were taken from (SPEC EMB-4, EMB-5)."""
    return vectors if row is None else tf.where((ids == row)[..., None], tf.stop_gradient(vectors), vectors)


class DotProductAttention(layers.Layer):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8): (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        self.constants = mask_constants(config)  # MSK-6
        self.each_head = HEADS[config.head_computation]
        self.scale_query = config.head_dim**-0.5 if config.score_scale == "multiply_query" else None
        self.divide_scores = math.sqrt(config.head_dim) if config.score_scale == "divide_scores" else None
        self.assign = ASSIGNMENTS[config.mask_assignment]
        self.fill = FILLS[config.mask_fill]
        self.overwrite_queries = config.query_mask == "overwrite"
        self.built = True

    def call(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, tap: Tap) -> Tensor:
        constant = self.constants[q.dtype.name]
        scores = tap(f"{self.name}.scores", self.each_head(self.score, (q, 2), (k, 2), axis=1))  # (B, H, Q, S)
        if key_mask is not None:
            mask = partial(self.mask, key_mask=key_mask, constant=constant)
            scores = tap(f"{self.name}.masked_scores", self.each_head(mask, (scores, 1), axis=1))
        weights = tap(f"{self.name}.weights", self.each_head(partial(tf.nn.softmax, axis=-1), (scores, 1), axis=1))
        if self.overwrite_queries and query_mask is not None:
            overwrite = partial(replace_masked, visible=query_mask[:, None, :, None], constant=constant)
            weights = tap(f"{self.name}.masked_weights", self.each_head(overwrite, (weights, 1), axis=1))
        context = self.each_head(self.combine, (weights, 1), (v, 2), axis=2)  # (B, Q, H, K)
        return tap(f"{self.name}.context", tf.reshape(context, (*context.shape[:2], -1)))  # (B, Q, D)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q if self.scale_query is None else q * self.scale_query
        scores = tf.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Tensor, key_mask: Tensor, constant: float) -> Tensor:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.fill(scores, self.assign(per_query, scores.shape[1]), constant)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        return tf.einsum("bhqs,bshk->bqhk", weights, v)


class MultiHeadAttention(layers.Layer):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    activations = ACTIVATIONS
    dot_product_class = DotProductAttention

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        self.heads = (config.num_heads, config.head_dim)
        width = config.d_model
        self.query = layers.Dense(width, activation=None, use_bias=config.qkv_bias, name=f"{name}.query")
        self.key = layers.Dense(width, activation=None, use_bias=config.qkv_bias, name=f"{name}.key")
        self.value = layers.Dense(width, activation=None, use_bias=config.qkv_bias, name=f"{name}.value")
        self.activation = self.activations[config.qkv_activation]
        self.dot_product = self.dot_product_class(config, name)
        # Not ``self.output``: every Keras layer has a property of that name.
        self.projection = layers.Dense(width, activation=None, use_bias=True, name=f"{name}.output") if config.output_projection else None
        for linear in filter(None, (self.query, self.key, self.value, self.projection)):
            linear.build((None, width))
        self.built = True

    def call(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, tap: Tap) -> Tensor:
        q = tap(f"{self.name}.query", self.split_heads(self.activation(self.query(query))))
        k = tap(f"{self.name}.key", self.split_heads(self.activation(self.key(key))))
        v = tap(f"{self.name}.value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask=key_mask, query_mask=query_mask, tap=tap)
        return context if self.projection is None else tap(f"{self.name}.output", self.projection(context))

    def split_heads(self, x: Tensor) -> Tensor:
        return tf.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(layers.Layer):
    """Two linear layers with an activation between them (SPEC FFN-1, FFN-2): (B, T, D) to (B, T, D)."""

    activations = ACTIVATIONS

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        self.inner = layers.Dense(config.d_ff, activation=None, use_bias=True, name=f"{name}.inner")
        self.inner.build((None, config.d_model))
        self.outer = layers.Dense(config.d_model, activation=None, use_bias=True, name=f"{name}.outer")
        self.outer.build((None, config.d_ff))
        self.activation = self.activations[config.activation]
        self.built = True

    def call(self, x: Tensor, tap: Tap) -> Tensor:
        inner = tap(f"{self.name}.inner", self.inner(x))  # (B, T, F)
        active = tap(f"{self.name}.activation", self.activation(inner))
        return tap(f"{self.name}.outer", self.outer(active))


class EncoderLayer(layers.Layer):
    """Self-attention and feed-forward, each with residual and norm (SPEC NRM-1, NRM-5, RES-1): (B, T, D) to (B, T, D)."""

    norm_class = LayerNorm
    attention_class = MultiHeadAttention
    feed_forward_class = FeedForward

    def __init__(self, config: EncoderConfig, name: str) -> None:
        super().__init__(name=name)
        self.attention = self.attention_class(config, f"{name}.attention")
        self.feed_forward = self.feed_forward_class(config, f"{name}.feed_forward")
        if config.norm_sharing == "shared":
            self.norm = self.norm_class(config, f"{name}.norm")
            self.norm_names = ("norm", "norm")
        else:
            self.norm1 = self.norm_class(config, f"{name}.norm1")
            self.norm2 = self.norm_class(config, f"{name}.norm2")
            self.norm_names = ("norm1", "norm2")
        self.sublayer = self.pre_norm if config.norm_placement == "pre" else self.post_norm
        self.built = True

    def call(self, x: Tensor, real: Tensor, tap: Tap) -> Tensor:
        x = self.sublayer(1, x, lambda h: self.attention(h, h, h, key_mask=real, query_mask=real, tap=tap), tap)
        return self.sublayer(2, x, lambda h: self.feed_forward(h, tap=tap), tap)

    def pre_norm(self, number: int, x: Tensor, function: Callable[[Tensor], Tensor], tap: Tap) -> Tensor:
        normed = tap(f"{self.name}.norm{number}", getattr(self, self.norm_names[number - 1])(x))
        return tap(f"{self.name}.residual{number}", x + function(normed))

    def post_norm(self, number: int, x: Tensor, function: Callable[[Tensor], Tensor], tap: Tap) -> Tensor:
        total = tap(f"{self.name}.residual{number}", x + function(x))
        return tap(f"{self.name}.norm{number}", getattr(self, self.norm_names[number - 1])(total))
