"""Layers of the classifier, written explicitly as in the published sources.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F
d_ff. Steps continue with the result of ``self.tap``.
"""

import math
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from concord.backends.library_support import KeptRows, Layers
from concord.backends.taps import Tapped
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constant

Step = Callable[[Tensor], Tensor]


# Static programs round constants to float32, even for float64 tensors: in ``x * c``, ``x + c``, ``x / c``,
# ``paddle.full_like`` and ``paddle.to_tensor(c)``. ``paddle.where`` also does so in eager mode.
# ``paddle.full`` with a dtype does not.


def scalar(value: float, like: Tensor) -> Tensor | float:
    return paddle.full([], value, dtype=like.dtype) if like.dtype == paddle.float64 else value


def filled(like: Tensor, value: float) -> Tensor:
    return paddle.full(like.shape, value, dtype=like.dtype)


# Configuration options, as functions.


def identity(x: Tensor) -> Tensor:
    return x


def gelu_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + paddle.erf(x / scalar(math.sqrt(2.0), x)))


def gelu_tanh(x: Tensor) -> Tensor:
    return (
        0.5
        * x
        * (1.0 + paddle.tanh(scalar(math.sqrt(2.0 / math.pi), x) * (x + scalar(0.044715, x) * x * x * x)))
    )


ACTIVATIONS: dict[str, Step] = {
    "none": identity,
    "relu": F.relu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
}  # ATT-1, FFN-2
POOLERS: dict[str, Step] = {"none": identity, "tanh": paddle.tanh, "relu": F.relu}  # HED-2


def epsilon_inside(variance: Tensor, epsilon: float) -> Tensor:
    return paddle.sqrt(variance + scalar(epsilon, variance))


def epsilon_outside(variance: Tensor, epsilon: float) -> Tensor:
    return paddle.sqrt(variance) + scalar(epsilon, variance)


DENOMINATORS = {"inside": epsilon_inside, "outside": epsilon_outside}  # NRM-3


def replace_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return paddle.where(visible, scores, filled(scores, constant))


def add_to_masked(scores: Tensor, visible: Tensor, constant: float) -> Tensor:
    return scores + paddle.where(visible, paddle.zeros_like(scores), filled(scores, constant))


FILLS = {"replace": replace_masked, "add": add_to_masked}  # MSK-3


def mask_per_sample(mask: Tensor, heads: int) -> Tensor:
    return mask[:, None]  # (B, 1, 1 or Q, S)


def mask_batch_major(mask: Tensor, heads: int) -> Tensor:
    # A published Keras bug: heads are stacked before samples, but masks are repeated sample by sample.
    batch = mask.shape[0]
    place = (
        paddle.arange(heads, dtype="int64")[None, :] * batch + paddle.arange(batch, dtype="int64")[:, None]
    )  # (B, H)
    return mask[place // heads]  # (B, H, 1 or Q, S)


ASSIGNMENTS = {"per_sample": mask_per_sample, "batch_major": mask_batch_major}  # MSK-7


def first_token(x: Tensor, real: Tensor) -> Tensor:
    return x[:, 0]  # (B, D)


def all_tokens(x: Tensor, real: Tensor) -> Tensor:
    return paddle.flatten(x, start_axis=1)  # (B, T * D)


def mean_of_real_tokens(x: Tensor, real: Tensor) -> Tensor:
    # The mean of a text with only padding is 0, not 0/0 (HED-1).
    total = paddle.sum(paddle.where(real[..., None], x, paddle.zeros_like(x)), axis=1)  # (B, D)
    return total / paddle.clip(paddle.sum(real.astype("int64"), axis=1, keepdim=True), min=1).astype(x.dtype)


POOLINGS = {"first": first_token, "flatten": all_tokens, "mean": mean_of_real_tokens}  # HED-1


class LayerNorm(nn.Layer):
    """Layer norm in every published form (SPEC NRM-2 to NRM-4): (B, T, D)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        ones, zeros = (nn.initializer.Constant(value) for value in (1.0, 0.0))
        self.weight = self.create_parameter([config.d_model], default_initializer=ones)
        self.bias = self.create_parameter([config.d_model], default_initializer=zeros)
        self.epsilon = config.norm_epsilon
        self.count = config.d_model - (1 if config.norm_variance == "unbiased" else 0)
        self.denominator = DENOMINATORS[config.norm_epsilon_placement]

    def forward(self, x: Tensor) -> Tensor:
        # Two passes: the mean of squares minus the squared mean cancels where a row's mean is large (ALG-5).
        centered = x - paddle.mean(x, axis=-1, keepdim=True)
        variance = paddle.sum(centered * centered, axis=-1, keepdim=True) / scalar(self.count, x)  # (B, T, 1)
        return centered / self.denominator(variance, self.epsilon) * self.weight + self.bias


def every_token(real: Tensor) -> Tensor:
    return paddle.broadcast_to(paddle.arange(real.shape[1], dtype="int64"), real.shape)  # (B, T)


def real_tokens_alone(real: Tensor) -> Tensor:
    return paddle.cumsum(real.astype("int64"), axis=1) - 1  # (B, T); any value for padding


NUMBERS = {"counted": every_token, "zero_row": every_token, "pad_row": real_tokens_alone}  # POS-6


class Embeddings(Tapped, nn.Layer):
    """Token, position and segment vectors (SPEC EMB-1 to EMB-6, POS-5 to POS-7): (B, T) to (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers) -> None:
        super().__init__()
        width, segments = config.d_model, config.num_segments
        self.token = nn.Embedding(config.vocab_size, width, padding_idx=None)
        self.position = nn.Embedding(config.max_positions, width, padding_idx=None)
        self.position.weight.stop_gradient = config.positions != "learned"
        self.segment = nn.Embedding(segments, width, padding_idx=None) if segments else None
        self.norm = make.norm(config) if config.embedding_norm else None
        self.scale = math.sqrt(width) if config.embedding_scale == "sqrt_d_model" else None
        # Not padding_idx: PyTorch returns the row as stored, but Paddle returns zeros (EMB-3).
        self.token_padding_row = config.token_padding_row
        self.zeroed_row = config.token_padding_row if config.token_padding_forward == "zero" else None
        self.segment_padding_row = config.segment_padding_row
        self.position_start = config.position_start
        self.number = NUMBERS[config.position_of_padding]
        self.padding_position = {"zero_row": 0, "pad_row": config.pad_id}.get(config.position_of_padding)
        self.position_padding_row = config.position_padding_row

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None, real: Tensor) -> Tensor:
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
            token = paddle.where((input_ids == self.zeroed_row)[..., None], paddle.zeros_like(token), token)
        return token if self.scale is None else token * scalar(self.scale, token)

    def embed(self, embedding: nn.Embedding, ids: Tensor, frozen: int | None) -> Tensor:
        """Look up rows; a frozen row gets no gradient (SPEC EMB-4, EMB-5, POS-7)."""
        rows = self.look_up(embedding, ids)
        return rows if frozen is None else paddle.where((ids == frozen)[..., None], rows.detach(), rows)

    def look_up(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return embedding.weight[ids]

    def position_ids(self, real: Tensor) -> Tensor:
        numbers = self.number(real) + self.position_start  # (B, T)
        if self.padding_position is None:
            return numbers
        return paddle.where(real, numbers, paddle.full_like(numbers, self.padding_position))


class DotProductAttention(Tapped, nn.Layer):
    """Scaled dot-product attention (SPEC ATT-3 to ATT-7, MSK-3 to MSK-8).

    (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.mask_constant = mask_constant(config, paddle.get_default_dtype())  # MSK-6
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
    ) -> Tensor:
        scores = self.tap("scores", self.score(q, k))  # (B, H, Q, S)
        if key_mask is not None:
            scores = self.tap("masked_scores", self.mask(scores, key_mask))
        weights = self.tap("weights", F.softmax(scores, axis=-1))
        if self.overwrite_queries and query_mask is not None:
            rows = query_mask[:, None, :, None]  # (B, 1, Q, 1)
            weights = self.tap("masked_weights", replace_masked(weights, rows, self.mask_constant))
        context = self.combine(weights, v)  # (B, Q, H, K)
        return self.tap("context", paddle.flatten(context, start_axis=2))  # (B, Q, D)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q if self.scale_query is None else q * scalar(self.scale_query, q)
        scores: Any = paddle.einsum("bqhk,bshk->bhqs", q, k)
        return scores if self.divide_scores is None else scores / scalar(self.divide_scores, scores)

    def mask(self, scores: Tensor, key_mask: Tensor) -> Tensor:
        return self.fill(scores, self.visible(key_mask, scores.shape[1]), self.mask_constant)

    def visible(self, key_mask: Tensor, heads: int) -> Tensor:
        per_query = key_mask[:, None, :] if key_mask.ndim == 2 else key_mask  # (B, 1 or Q, S)
        return self.assign(per_query, heads)  # (B, 1 or H, 1 or Q, S)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        context: Any = paddle.einsum("bhqs,bshk->bqhk", weights, v)
        return context


class AttentionHeadByHead(DotProductAttention):
    """Attention computed head by head, with each sample's own mask (SPEC ATT-7, MSK-7)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.assign = mask_per_sample

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        heads = zip(paddle.split(q, q.shape[2], axis=2), paddle.split(k, k.shape[2], axis=2), strict=True)
        return paddle.concat([super(AttentionHeadByHead, self).score(*head) for head in heads], axis=1)

    def combine(self, weights: Tensor, v: Tensor) -> Tensor:
        heads = zip(
            paddle.split(weights, v.shape[2], axis=1), paddle.split(v, v.shape[2], axis=2), strict=True
        )
        return paddle.concat([super(AttentionHeadByHead, self).combine(*head) for head in heads], axis=2)


class MultiHeadAttention(Tapped, nn.Layer):
    """Multi-head attention (SPEC ATT-1 to ATT-7): (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    def __init__(self, config: EncoderConfig, make: Layers) -> None:
        super().__init__()
        width, bias = config.d_model, config.qkv_bias
        self.heads = (config.num_heads, config.head_dim)
        self.query = nn.Linear(width, width, bias_attr=bias)
        self.key = nn.Linear(width, width, bias_attr=bias)
        self.value = nn.Linear(width, width, bias_attr=bias)
        self.activation = make.activations[config.qkv_activation]
        self.dot_product = make.dot_product[config.head_computation](config)
        self.output = nn.Linear(width, width, bias_attr=True) if config.output_projection else None

    def forward(
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
        context = self.dot_product(q, k, v, key_mask, query_mask)
        return context if self.output is None else self.tap("output", self.output(context))

    def split_heads(self, x: Tensor) -> Tensor:
        return paddle.reshape(x, (*x.shape[:2], *self.heads))  # (B, T, H, K)


class FeedForward(Tapped, nn.Layer):
    """Two linear layers around an activation (SPEC FFN-1, FFN-2): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff, bias_attr=True)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias_attr=True)
        self.activation = make.activations[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.tap("inner", self.inner(x))  # (B, T, F)
        active = self.tap("activation", self.activation(inner))
        return self.tap("outer", self.outer(active))


class PostNormLayer(Tapped, nn.Layer):
    """Attention and feed-forward; norms follow the residuals (SPEC NRM-1, NRM-5, RES-1): (B, T, D)."""

    def __init__(self, config: EncoderConfig, make: Layers) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config, make)
        self.feed_forward = FeedForward(config, make)
        shared = config.norm_sharing == "shared"
        self.norm: Any = make.norm(config) if shared else None
        self.norm1 = None if shared else make.norm(config)
        self.norm2 = None if shared else make.norm(config)

    def forward(self, x: Tensor, real: Tensor | KeptRows) -> Tensor:
        norm1, norm2 = self.norm1 or self.norm, self.norm2 or self.norm  # NRM-5
        h = self.tap("residual1", x + self.attention(x, x, x, real, real))
        x = self.tap("norm1", norm1(h))
        h = self.tap("residual2", x + self.feed_forward(x))
        return self.tap("norm2", norm2(h))


class PreNormLayer(PostNormLayer):
    """The same layer with norms before the sublayers, outside the residual stream (SPEC NRM-1)."""

    def forward(self, x: Tensor, real: Tensor | KeptRows) -> Tensor:
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
