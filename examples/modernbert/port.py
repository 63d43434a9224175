"""A port of ModernBERT to PyTorch, judged by the model in NumPy: ``python -m examples.modernbert.port``."""

import torch
import torch.nn.functional as F
from torch import nn

from concord import compare
from concord.conformance.compare.written import Written
from examples.modernbert.reference import ModernBert


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv, self.Wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin, visible):
        q, k, v = self.Wqkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, K)
        q, k = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, k))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.Wo(context.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.Wi, self.Wo = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x):
        x, gate = self.Wi(x).chunk(2, -1)
        return self.Wo(self.drop(self.act(x) * gate))


class Layer(nn.Module):
    def __init__(self, width, heads, inner, first):
        super().__init__()
        self.attn_norm = nn.Identity() if first else nn.LayerNorm(width, bias=False)
        self.attn, self.mlp_norm = Attention(width, heads), nn.LayerNorm(width, bias=False)
        self.mlp = FeedForward(width, inner)

    def forward(self, x, *rotation_and_mask):
        x = x + self.attn(self.attn_norm(x), *rotation_and_mask)
        return x + self.mlp(self.mlp_norm(x))


class Port(nn.Module):
    """Ids and a mask (B, T) to hidden states (B, T, D)."""

    def __init__(self, rows, width, heads, layers, inner, window, every=3):
        super().__init__()
        self.embeddings = nn.Module()
        self.embeddings.tok_embeddings = nn.Embedding(rows, width, padding_idx=0)
        self.embeddings.norm = nn.LayerNorm(width, bias=False)
        self.layers = nn.ModuleList(Layer(width, heads, inner, i == 0) for i in range(layers))
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.head_width, self.window, self.every = width // heads, window, every

    def forward(self, input_ids, attention_mask):
        x = self.embeddings.norm(self.embeddings.tok_embeddings(input_ids))
        places = torch.arange(input_ids.shape[1])
        near = (places[:, None] - places).abs() <= self.window // 2
        real = attention_mask[:, None, None, :].bool()
        for i, layer in enumerate(self.layers):
            local = i % self.every > 0
            theta = 10_000.0 if local else 160_000.0
            angles = places[:, None] / theta ** (torch.arange(0, self.head_width, 2) / self.head_width)
            angles = torch.cat([angles, angles], -1)
            x = layer(x, angles.cos(), angles.sin(), real & near if local else real)
        return self.final_norm(x)


SIZES = {"heads": 3, "layers": 4, "window": 6}


def reference_of(model):
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return Written(ModernBert(**SIZES), weights)


def built():
    """Return the reference, a port with the same weights, and three texts."""
    generator = torch.Generator().manual_seed(7)
    port = Port(rows=101, width=36, inner=53, **SIZES).eval()
    with torch.no_grad():
        for parameter in port.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    # No text is shorter by more than a window, so each query sees a key. For a query that sees none, only the
    # port gives zero.
    real = torch.arange(13) < torch.tensor([13, 10, 11])[:, None]
    ids = torch.randint(1, 101, real.shape, generator=generator) * real
    return reference_of(port), port, {"input_ids": ids, "attention_mask": real.long()}


def of_transformers():
    """The same, with transformers' module as the port."""
    from transformers import ModernBertConfig, ModernBertModel

    _, port, inputs = built()
    sizes = {"hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 4, "intermediate_size": 53}
    config = ModernBertConfig(vocab_size=101, **sizes, local_attention=SIZES["window"], pad_token_id=0)
    model = ModernBertModel(config).eval()
    model.load_state_dict(port.state_dict())
    return reference_of(model), model, inputs


if __name__ == "__main__":
    reference, port, inputs = built()
    print(compare(reference, port, inputs, gradients=True))
    port.window = 4  # a bug for Concord to find
    print(compare(reference, port, inputs))
