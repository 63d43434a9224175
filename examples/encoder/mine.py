"""A text classifier, ported from a checkpoint. It has two bugs, which verdict.py finds."""

from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.ln2 = nn.LayerNorm(width)

    def forward(self, x, visible):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        weights = scores.masked_fill(~visible[:, None, None, :], -1e9).softmax(dim=-1)
        attended = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.ln1(x + self.proj(attended))
        return self.ln2(x + self.down(F.gelu(self.up(x), approximate="tanh")))


class Classifier(nn.Module):
    def __init__(self, words=101, room=16, width=24, heads=3, inner=40, layers=2, classes=5):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(room, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, ids != 0)
        return self.head(x[:, 0])
