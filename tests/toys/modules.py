"""A small encoder in plain PyTorch, and a version with fused attention."""

import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare.module_reference import ModuleReference

torch.set_num_threads(1)  # several would slow down parallel tests

ROWS, WIDTH, HEADS, INNER, CLASSES, TOKENS = 31, 12, 3, 19, 5, 7


class Attention(nn.Module):
    """Self-attention with an additive mask: (B, T, D) and (B, T) to (B, T, D)."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scaling = (WIDTH // HEADS) ** -0.5

    def forward(self, x, mask):
        heads = (self.apart(layer(x)) for layer in (self.query, self.key, self.value))
        return self.output(self.context(*heads, mask).transpose(1, 2).reshape(x.shape))

    def context(self, q, k, v, mask):
        hidden = torch.finfo(q.dtype).min * (1 - mask[:, None, None, :].to(q.dtype))
        return F.softmax(q @ k.transpose(-1, -2) * self.scaling + hidden, dim=-1) @ v

    def apart(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Fused(Attention):
    def context(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals: (B, T, D) to (B, T, D)."""

    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-5)
        self.attention = attention()
        self.inner, self.act, self.outer = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.outer(self.act(self.inner(self.norm2(x))))


class Encoder(nn.Module):
    """Token ids and a mask, (B, T), to logits (B, C)."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.token, self.position = nn.Embedding(ROWS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(2))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1])
        x = self.token(input_ids) + self.position(places)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return {"hidden": x, "logits": self.classifier(x[:, 0])}


def encoder(attention=Attention):
    # Freshly initialized weights would hide bugs.
    generator = torch.Generator().manual_seed(3)
    model = Encoder(attention)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def texts():
    generator = torch.Generator().manual_seed(5)
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 3, 5])[:, None]).long()
    return {
        "input_ids": torch.randint(1, ROWS, mask.shape, generator=generator) * mask,
        "attention_mask": mask,
    }


def activations(model, inputs):
    return ModuleReference(model, kwargs=inputs).arrays
