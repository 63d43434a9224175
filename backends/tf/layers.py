"""Layers of the classifier, written explicitly as in the published sources.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F
d_ff. Steps continue with the result of ``self.tap``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import keras
import tensorflow as tf
from keras import layers, ops
from tensorflow import Tensor

from concord.backends.library_support import KeptRows, Layers
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig, from_mapping
from concord.spec.masks import mask_constant

# Pass masks by name, since Keras fills in missing masks by name.
Step = Callable[[Tensor], Tensor]


class Layer(Tapped, layers.Layer):
    """A layer that knows its sizes and builds its sublayers for any input."""

    def build(self, input_shape: Any = None) -> None:
        # Without this method, Keras would trace ``call`` to find the sublayers to build.
        for layer in self._flatten_layers(include_self=False, recursive=False):
            layer.build()

    def sub(self, name: str) -> dict[str, Any]:
        return {"name": name, "dtype": self.dtype_policy}


class Linear(layers.Dense):
    """A dense layer with a fixed input size: (..., in) to (..., out)."""

    def __init__(self, inputs: int, outputs: int, use_bias: bool, **kwargs: Any) -> None:
        super().__init__(outputs, activation=None, use_bias=use_bias, **kwargs)
        self.inputs = inputs

    def build(self, input_shape: Any = None) -> None:
        super().build((None, self.inputs))


class ModelBase(Layer, keras.Model):
    """A model of a configuration, with its inputs in one mapping, as ``fit`` passes them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keras.saving.register_keras_serializable(package=cls.__module__)(cls)

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config

    def call(self, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
        return self.forward(**inputs, **options)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(
            from_mapping(config["config"]),
            **{name: value for name, value in config.items() if name != "config"},
        )


# Configuration options, as functions.


def identity(x: Tensor) -> Tensor:
    return x


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Step] = {
    "none": identity,
    "relu": ops.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2
POOLERS: dict[str, Step] = {"none": identity, "tanh": ops.tanh, "relu": ops.relu}  # HED-2


def epsilon_inside(variance: Tensor, epsilon: float) -> Tensor:
    return ops.sqrt(variance + epsilon)


def epsilon_outside(variance: Tensor, epsilon: float) -> Tensor:
    return ops.sqrt(variance) + epsilon


DENOMINATORS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return ops.where(visible, scores, ops.convert_to_tensor(constant, scores.dtype))


def add_to_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    zero, masked = (ops.convert_to_tensor(value, scores.dtype) for value in (0.0, constant))
    return scores + ops.where(visible, zero, masked)


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Tensor, heads: int) -> Tensor:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Tensor, heads: int) -> Tensor:
    # A published Keras bug: heads are stacked before samples, but masks are repeated sample by sample.
    batch = ops.shape(mask)[0]
    place = ops.arange(heads)[None, :] * batch + ops.arange(batch)[:, None]  # (B, H)
    return ops.take(mask, place // heads, axis=0)  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def first_token(x: Tensor, real: Tensor) -> Tensor:
    return x[:, 0]  # (B, D)


def all_tokens(x: Tensor, real: Tensor) -> Tensor:
    return ops.reshape(x, (ops.shape(x)[0], -1))  # (B, T * D)


def mean_of_real_tokens(x: Tensor, real: Tensor) -> Tensor:
    # The mean of a text with only padding is 0, not 0/0 (HED-1).
    total = ops.sum(ops.where(real[..., None], x, ops.zeros_like(x)), axis=1)  # (B, D)
    count = ops.maximum(ops.sum(ops.cast(real, "int64"), axis=1, keepdims=True), 1)
    return total / ops.cast(count, x.dtype)


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(Layer):
    """Layer norm in every published form (SPEC NRM-2 to NRM-4): (B, T, D)."""

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
        # Two passes: the mean of squares minus the squared mean cancels where a row's mean is large (ALG-5).
        centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = ops.sum(centered * centered, axis=-1, keepdims=True) / self.count  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.weight.value + self.bias.value


def every_token(real: Tensor) -> Tensor:
    return ops.broadcast_to(ops.arange(ops.shape(real)[1], dtype="int64"), ops.shape(real))  # (B, T)


def real_tokens_alone(real: Tensor) -> Tensor:
    return ops.cumsum(ops.cast(real, "int64"), axis=1) - 1  # (B, T); any value for padding


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(Layer):
    """Token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, segments = config.d_model, config.num_segments
        self.token = layers.Embedding(config.vocab_size, width, mask_zero=False, **self.sub("token"))
        self.position = layers.Embedding(config.max_positions, width, mask_zero=False, **self.sub("position"))
        self.position.trainable = config.positions == "learned"
        self.segment = (
            layers.Embedding(segments, width, mask_zero=False, **self.sub("segment")) if segments else None
        )
        self.norm = make.norm(config, **self.sub("norm")) if config.embedding_norm else None
        self.scale = math.sqrt(width) if config.embedding_scale == "sqrt_d_model" else None
        # Not padding_idx: PyTorch returns the row as stored, but Paddle returns zeros (EMB-3).
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def call(self, input_ids: Tensor, segment_ids: Tensor | None, real: Tensor) -> Tensor:
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

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        token = self.embed(self.token, input_ids, self.token_padding_row)
        if self.zeroed_row is not None:
            token = ops.where((input_ids == self.zeroed_row)[..., None], ops.zeros_like(token), token)
        return token if self.scale is None else token * self.scale

    def embed(self, embedding: layers.Embedding, ids: Tensor, frozen: int | None) -> Tensor:
        """Look up rows; a frozen row gets no gradient (SPEC EMB-4, EMB-5, POS-7)."""
        rows = self.look_up(embedding, ids)
        return (
            rows if frozen is None else ops.where((ids == frozen)[..., None], ops.stop_gradient(rows), rows)
        )

    def look_up(self, embedding: layers.Embedding, ids: Tensor) -> Tensor:
        return tf.gather(embedding.embeddings.value, ids, axis=0)

    def position_ids(self, real: Tensor) -> Tensor:
        numbers = self.number(real) + self.position_start  # (B, T)
        if self.padding_position is None:
            return numbers
        return ops.where(real, numbers, ops.full_like(numbers, self.padding_position))


class DotProductAttention(Layer):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8).

    (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D).
    """

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mask_constant = mask_constant(config, self.compute_dtype)  # MSK-6
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
    ) -> Tensor:
        scores = self.tap("scores", self.score(q, k))  # (B, H, Q, S)
        if key_mask is not None:
            scores = self.tap("masked_scores", self.mask(scores, key_mask))
        weights = self.tap("weights", ops.softmax(scores, axis=-1))
        if self.overwrite_queries and query_mask is not None:
            rows = query_mask[:, None, :, None]  # (B, 1, Q, 1)
            weights = self.tap("masked_weights", replace_masked(weights, rows, self.mask_constant))
        context = self.combine(weights, v)  # (B, Q, H, K)
        return self.tap("context", ops.reshape(context, (*ops.shape(context)[:2], -1)))  # (B, Q, D)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q if self.scale_query is None else q * self.scale_query
        scores = tf.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / self.divide_scores

    def mask(self, scores: Tensor, key_mask: Tensor) -> Tensor:
        return self.fill(scores, self.visible(key_mask, scores.shape[1]), self.mask_constant)

    def visible(self, key_mask: Tensor, heads: int) -> Tensor:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.assign(per_query, heads)  # (B, 1 or H, 1 or Q, S)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        return tf.einsum("bhqs,bshk->bqhk", weights, v)


class AttentionHeadByHead(DotProductAttention):
    """Attention computed head by head, with each sample's own mask (SPEC ATT-7, MSK-7)."""

    def __init__(self, config: EncoderConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.assign = mask_per_sample

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        heads = zip(ops.split(q, q.shape[2], axis=2), ops.split(k, k.shape[2], axis=2), strict=True)
        return ops.concatenate([super(AttentionHeadByHead, self).score(*head) for head in heads], axis=1)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        heads = zip(ops.split(weights, v.shape[2], axis=1), ops.split(v, v.shape[2], axis=2), strict=True)
        return ops.concatenate([super(AttentionHeadByHead, self).combine(*head) for head in heads], axis=2)


class MultiHeadAttention(Layer):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, bias = config.d_model, config.qkv_bias
        self.heads = (config.num_heads, config.head_dim)
        self.query = Linear(width, width, use_bias=bias, **self.sub("query"))
        self.key = Linear(width, width, use_bias=bias, **self.sub("key"))
        self.value = Linear(width, width, use_bias=bias, **self.sub("value"))
        self.activation = make.activations[config.qkv_activation]
        self.dot_product = make.dot_product[config.head_computation](config, **self.sub("dot_product"))
        # Not ``self.output``: every Keras layer has a property with that name.
        self.projection = (
            Linear(width, width, use_bias=True, **self.sub("output")) if config.output_projection else None
        )

    def call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | KeptRows | None = None,
        query_mask: Tensor | KeptRows | None = None,
    ) -> Tensor:
        q = self.tap("query", self.split_heads(self.activation(self.query(query))))
        k = self.tap("key", self.split_heads(self.activation(self.key(key))))
        v = self.tap("value", self.split_heads(self.activation(self.value(value))))
        context = self.dot_product(q, k, v, key_mask=key_mask, query_mask=query_mask)
        return context if self.projection is None else self.tap("output", self.projection(context))

    def split_heads(self, x: Tensor) -> Tensor:
        return ops.reshape(x, (*ops.shape(x)[:2], *self.heads))  # (B, T, H, K)


class FeedForward(Layer):
    """Two linear layers around an activation (SPEC FFN-1, FFN-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = Linear(config.d_model, config.d_ff, use_bias=True, **self.sub("inner"))
        self.outer = Linear(config.d_ff, config.d_model, use_bias=True, **self.sub("outer"))
        self.activation = make.activations[config.activation]

    def call(self, x: Tensor) -> Tensor:
        inner = self.tap("inner", self.inner(x))  # (B, T, F)
        active = self.tap("activation", self.activation(inner))
        return self.tap("outer", self.outer(active))


class PostNormLayer(Layer):
    """Attention and feed-forward; norms follow the residuals (SPEC NRM-1, NRM-5, RES-1): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = MultiHeadAttention(config, make, **self.sub("attention"))
        self.feed_forward = FeedForward(config, make, **self.sub("feed_forward"))
        shared = config.norm_sharing == "shared"
        self.norm: Any = make.norm(config, **self.sub("norm")) if shared else None
        self.norm1 = None if shared else make.norm(config, **self.sub("norm1"))
        self.norm2 = None if shared else make.norm(config, **self.sub("norm2"))

    def call(self, x: Tensor, real: Tensor | KeptRows) -> Tensor:
        norm1, norm2 = self.norm1 or self.norm, self.norm2 or self.norm  # NRM-5
        h = self.tap("residual1", x + self.attention(x, x, x, key_mask=real, query_mask=real))
        x = self.tap("norm1", norm1(h))
        h = self.tap("residual2", x + self.feed_forward(x))
        return self.tap("norm2", norm2(h))


class PreNormLayer(PostNormLayer):
    """The same layer with norms before the sublayers, outside the residual stream (SPEC NRM-1)."""

    def call(self, x: Tensor, real: Tensor | KeptRows) -> Tensor:
        norm1, norm2 = self.norm1 or self.norm, self.norm2 or self.norm  # NRM-5
        h = self.tap("norm1", norm1(x))
        x = self.tap("residual1", x + self.attention(h, h, h, key_mask=real, query_mask=real))
        h = self.tap("norm2", norm2(x))
        return self.tap("residual2", x + self.feed_forward(h))


LAYERS = {"post": PostNormLayer, "pre": PreNormLayer}  # NRM-1

EXPLICIT = Layers(
    LayerNorm,
    Embeddings,
    {"batched": DotProductAttention, "looped": AttentionHeadByHead},
    ACTIVATIONS,
)
