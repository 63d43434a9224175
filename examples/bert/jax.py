"""BERT for classification in plain JAX with Flax, and its plug-in for Concord.

Shapes: B batch, T tokens, D width, H heads, K = D / H, C classes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from concord.spec import EncoderConfig
from examples.bert.joining import Arrays, Plain, canonical

EPSILON = 1e-12
MASKED = np.finfo(np.float32).min


class Embeddings(nnx.Module):
    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        self.position = nnx.Embed(config.max_positions, config.d_model, rngs=rngs)
        self.segment = nnx.Embed(2, config.d_model, rngs=rngs)
        self.norm = nnx.LayerNorm(config.d_model, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)

    def __call__(self, ids: Array, segments: Array) -> Array:
        token = self.token.embedding[ids]
        token = jnp.where(
            (ids == 0)[..., None], jax.lax.stop_gradient(token), token
        )  # padding is not trained
        position = self.position.embedding[jnp.arange(ids.shape[1])]
        return self.norm(token + position + self.segment.embedding[segments])  # (B, T, D)


class Attention(nnx.Module):
    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.heads = config.num_heads
        self.query = nnx.Linear(config.d_model, config.d_model, rngs=rngs)
        self.key = nnx.Linear(config.d_model, config.d_model, rngs=rngs)
        self.value = nnx.Linear(config.d_model, config.d_model, rngs=rngs)
        self.output = nnx.Linear(config.d_model, config.d_model, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        context = jax.nn.softmax(scores + mask, axis=-1) @ v  # (B, H, T, K)
        return self.output(context.swapaxes(1, 2).reshape(x.shape))

    def split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)  # (B, H, T, K)


class FeedForward(nnx.Module):
    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(config.d_model, config.d_ff, rngs=rngs)
        self.outer = nnx.Linear(config.d_ff, config.d_model, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.outer(jax.nn.gelu(self.inner(x), approximate=False))


class Layer(nnx.Module):
    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.attention = Attention(config, rngs)
        self.norm1 = nnx.LayerNorm(config.d_model, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs)
        self.norm2 = nnx.LayerNorm(config.d_model, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed_forward(x))


class Bert(nnx.Module):
    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.pooler = nnx.Linear(config.d_model, config.d_model, rngs=rngs)
        self.classifier = nnx.Linear(config.d_model, config.num_classes, rngs=rngs)

    def __call__(self, ids: Array, segments: Array) -> Array:
        x = self.embeddings(ids, segments)
        mask = jnp.where(ids == 0, MASKED, 0.0).astype(x.dtype)[:, None, None, :]  # (B, 1, 1, T)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(jnp.tanh(self.pooler(x[:, 0])))  # (B, C)


def loss_of(model: Bert, ids: Array, segments: Array, labels: Array) -> tuple[Array, Array]:
    logits = model(ids, segments)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


class Backend(Plain):
    """The model as a plug-in: ``concord check --backend examples.bert.jax:Backend --variant bert``."""

    name, version = "plain-jax", jax.__version__

    def __init__(self) -> None:
        jax.config.update("jax_enable_x64", True)  # otherwise float64 would be float32

    def compute(self, config, weights, inputs, dtype):
        model = Bert(config, nnx.Rngs(0))
        state = nnx.to_flat_state(nnx.state(model))
        loaded = [(path, value.replace(jnp.asarray(weights[canonical(path)]))) for path, value in state]
        nnx.update(model, nnx.from_flat_state(loaded))
        arguments = (jnp.asarray(inputs[name]) for name in ("input_ids", "segment_ids", "labels"))
        (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, *arguments)
        return np.asarray(logits), np.asarray(loss), as_arrays(gradients)


def as_arrays(state: nnx.State) -> Arrays:
    return {canonical(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(state)}
