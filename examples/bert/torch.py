"""BERT for classification in plain PyTorch, and its plug-in for Concord.

Shapes: B batch, T tokens, D width, H heads, K = D / H, C classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concord.spec import EncoderConfig
from examples.bert.joining import Arrays, Plain

EPSILON = 1e-12
MASKED = torch.finfo(torch.float32).min


class Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model, padding_idx=0)  # row 0 is not trained
        self.position = nn.Embedding(config.max_positions, config.d_model)
        self.segment = nn.Embedding(2, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=EPSILON)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        return self.norm(self.token(ids) + self.position(positions) + self.segment(segments))  # (B, T, D)


class Attention(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        context = torch.softmax(scores + mask, dim=-1) @ v  # (B, H, T, K)
        return self.output(context.transpose(1, 2).flatten(start_dim=2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, K)


class FeedForward(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x)))


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.d_model, eps=EPSILON)
        self.feed_forward = FeedForward(config)
        self.norm2 = nn.LayerNorm(config.d_model, eps=EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed_forward(x))


class Bert(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.classifier = nn.Linear(config.d_model, config.num_classes)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        x = self.embeddings(ids, segments)
        mask = torch.where(ids == 0, MASKED, 0.0).to(x.dtype)[:, None, None, :]  # (B, 1, 1, T)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))  # (B, C)


class Backend(Plain):
    """The model as a plug-in: ``concord check --backend examples.bert.torch:Backend --variant bert``."""

    name, version = "plain-torch", torch.__version__

    def compute(self, config, weights, inputs, dtype):
        model = Bert(config).to(getattr(torch, dtype))
        model.load_state_dict(turned({name: torch.tensor(array) for name, array in weights.items()}))
        ids, segments, labels = (
            torch.tensor(inputs[name]) for name in ("input_ids", "segment_ids", "labels")
        )
        logits = model(ids, segments)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        gradients = turned({name: parameter.grad for name, parameter in model.named_parameters()})
        return logits.numpy(force=True), loss.numpy(force=True), as_arrays(gradients)


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transpose the weights of linear layers, which PyTorch stores as (out, in)."""
    return {
        name: tensor.T if tensor.ndim == 2 and not name.startswith("embeddings.") else tensor
        for name, tensor in tensors.items()
    }


def as_arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: tensor.numpy(force=True) for name, tensor in tensors.items()}
