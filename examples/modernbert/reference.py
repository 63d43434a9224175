"""ModernBERT in NumPy, written on Concord's arithmetic, as the reference of a port.

Without a PyTorch module to compare with, write the model once, from its paper. Concord runs it exactly, and
with the errors of a precision. This gives the truth and a tolerance for each element.
"""

from dataclasses import dataclass

import numpy as np

from concord.spec.tape import RowSums


@dataclass(frozen=True)
class ModernBert:
    """Shapes: B batch, T tokens, D width, H heads, K = D / H."""

    heads: int
    layers: int
    window: int  # keys that a local layer sees, half of them on each side
    every: int = 3  # every third layer is global, the others are local
    padding: int = 0  # id of padding
    epsilon: float = 1e-5
    theta: tuple = (160_000.0, 10_000.0)  # for global and local layers

    def __call__(self, m, weights, inputs, tap):
        ids, real = inputs["input_ids"], inputs["attention_mask"] == 1
        places = np.arange(ids.shape[1])
        near = abs(places[:, None] - places) <= self.window // 2
        x = m.take(weights["embeddings.tok_embeddings.weight"], ids)
        x = m.freeze(x, (ids == self.padding)[..., None])  # the padding row is not trained
        x = tap("embeddings.tok_embeddings", x)
        x = tap("embeddings.norm", self.norm(m, x, weights["embeddings.norm.weight"]))
        rotations = [self.rotation(m, places, x.shape[2] // self.heads, theta) for theta in self.theta]
        for i in range(self.layers):
            name, local = f"layers.{i}", i % self.every > 0
            y = x
            if i > 0:  # layer 0 follows the norm of the embeddings
                y = tap(f"{name}.attn_norm", self.norm(m, x, weights[f"{name}.attn_norm.weight"]))
            visible = real[:, None, None, :] & near if local else real[:, None, None, :]
            x = m.add(x, self.attention(m, f"{name}.attn", y, weights, rotations[local], visible, tap))
            y = tap(f"{name}.mlp_norm", self.norm(m, x, weights[f"{name}.mlp_norm.weight"]))
            x = tap(name, m.add(x, self.feed_forward(m, f"{name}.mlp", y, weights, tap)))
        return tap("final_norm", self.norm(m, x, weights["final_norm.weight"]))

    def norm(self, m, x, gamma):
        mean = m.divide_by(m.sum(x, -1), x.shape[-1])
        centered = m.center(x, mean)
        variance = m.divide_by(m.sum(m.multiply(centered, centered), -1), x.shape[-1])
        deviation = m.sqrt(m.shift(m.vary_variance(variance, mean, centered), self.epsilon))
        return m.multiply(m.divide(centered, deviation), gamma)

    def rotation(self, m, places, width, theta):
        """Return cosine and sine, (T, 1, K)."""
        angles = places[:, None, None] * theta ** -(np.arange(0, width, 2) / width)
        angles = np.concatenate([angles, angles], 2)
        # Ports compute angles in float32, so the errors of angle and cosine grow with the position.
        return [m.uncertain(m.leaf(of(angles)), 2.0**-22 * (1 + angles)) for of in (np.cos, np.sin)]

    def rotated(self, m, x, cos, sin):
        """Rotate each pair of features (B, T, H, K) by the angle of its position."""
        half = x.shape[3] // 2
        swapped = m.index(x, (..., np.r_[half : 2 * half, :half]))
        turned = m.choose(np.arange(2 * half) < half, m.scale(swapped, -1.0), swapped)
        return m.add(m.multiply(x, cos), m.multiply(turned, sin))

    def attention(self, m, name, x, weights, rotation, visible, tap):
        """Return (B, T, D); ``visible`` is (B, 1, 1 or Q, S)."""
        qkv = tap(f"{name}.Wqkv", self.linear(m, x, weights[f"{name}.Wqkv.weight"]))
        parts = m.reshape(qkv, (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads))  # (B, T, 3, H, K)
        q, k, v = (m.index(parts, (slice(None), slice(None), place)) for place in range(3))
        q, k = (self.rotated(m, y, *rotation) for y in (q, k))
        scores = m.scale(m.einsum("bqhk,bshk->bhqs", q, k), q.shape[3] ** -0.5)
        scores = m.replace(scores, visible, float(np.finfo(np.float32).min))
        sums = RowSums()
        context = m.attend(m.softmax(scores, sums=sums), v, sums)  # (B, Q, H, K)
        return tap(f"{name}.Wo", self.linear(m, m.reshape(context, x.shape), weights[f"{name}.Wo.weight"]))

    def feed_forward(self, m, name, x, weights, tap):
        inner = tap(f"{name}.Wi", self.linear(m, x, weights[f"{name}.Wi.weight"]))  # (B, T, 2 F)
        half = inner.shape[2] // 2
        x, gate = (m.index(inner, (..., part)) for part in (slice(None, half), slice(half, None)))
        erf = m.shift(m.erf(m.divide_by(x, 2**0.5)), 1.0)
        active = tap(f"{name}.act", m.multiply(m.scale(x, 0.5), erf))
        gated = tap(f"{name}.drop", m.multiply(active, gate))
        return tap(f"{name}.Wo", self.linear(m, gated, weights[f"{name}.Wo.weight"]))

    def linear(self, m, x, weight):
        rows = m.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
        return m.reshape(m.einsum("ni,oi->no", rows, weight), (*x.shape[:2], weight.shape[0]))
