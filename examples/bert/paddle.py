"""BERT for classification in plain PaddlePaddle, and its plug-in for Concord.

Shapes: B batch, T tokens, D width, H heads, K = D / H, C classes.
"""

import math
from typing import ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from concord.spec import EncoderConfig
from examples.bert.joining import Plain

EPSILON = 1e-12
MASKED = float(np.finfo(np.float32).min)


class Embeddings(nn.Layer):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.max_positions, config.d_model)
        self.segment = nn.Embedding(2, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, epsilon=EPSILON)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        token = self.token(ids)
        token = paddle.where((ids == 0)[..., None], token.detach(), token)  # padding is not trained
        positions = paddle.arange(ids.shape[1])
        return self.norm(token + self.position(positions) + self.segment(segments))  # (B, T, D)


class Attention(nn.Layer):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = paddle.matmul(q, k, transpose_y=True) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        context = paddle.matmul(F.softmax(scores + mask, axis=-1), v)  # (B, H, T, K)
        return self.output(context.transpose([0, 2, 1, 3]).flatten(start_axis=2))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape([*x.shape[:2], self.heads, -1]).transpose([0, 2, 1, 3])  # (B, H, T, K)


class FeedForward(nn.Layer):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x)))


class Layer(nn.Layer):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.d_model, epsilon=EPSILON)
        self.feed_forward = FeedForward(config)
        self.norm2 = nn.LayerNorm(config.d_model, epsilon=EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed_forward(x))


class Bert(nn.Layer):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.LayerList([Layer(config) for _ in range(config.num_layers)])
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.classifier = nn.Linear(config.d_model, config.num_classes)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        x = self.embeddings(ids, segments)
        mask = (ids == 0).astype(x.dtype)[:, None, None, :] * MASKED  # (B, 1, 1, T)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(paddle.tanh(self.pooler(x[:, 0])))  # (B, C)


class Backend(Plain):
    """The model as a plug-in: ``concord check --backend examples.bert.paddle:Backend --variant bert``."""

    name, version = "plain-paddle", paddle.__version__
    deviations: ClassVar = [
        {"name": "softmax_floor", "value": -64.0, "reason": "entries minus the largest are clipped"},
        {"name": "log_softmax_floor", "value": -64.0, "reason": "entries minus the largest are clipped"},
        {"name": "norm_epsilon_bits", "value": 24, "reason": "nn.LayerNorm stores epsilon as float32"},
    ]

    def compute(self, config, weights, inputs, dtype):
        paddle.set_device("cpu")
        paddle.set_default_dtype(dtype)
        model = Bert(config)
        model.set_state_dict(weights)
        ids, segments, labels = (
            paddle.to_tensor(inputs[name]) for name in ("input_ids", "segment_ids", "labels")
        )
        logits = model(ids, segments)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
        return logits.numpy(), loss.numpy(), gradients
