"""BERT for classification in plain TensorFlow with Keras, and its plug-in for Concord.

Shapes: B batch, T tokens, D width, H heads, K = D / H, C classes.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from tensorflow import Tensor

from concord.spec import EncoderConfig
from examples.bert.joining import Plain, canonical

EPSILON = 1e-12
MASKED = float(np.finfo(np.float32).min)


class Embeddings(layers.Layer):
    def __init__(self, config: EncoderConfig, **options) -> None:
        super().__init__(**options)
        self.token = layers.Embedding(config.vocab_size, config.d_model, name="token")
        self.position = layers.Embedding(config.max_positions, config.d_model, name="position")
        self.segment = layers.Embedding(2, config.d_model, name="segment")
        self.norm = layers.LayerNormalization(epsilon=EPSILON, name="norm")

    def call(self, ids: Tensor, segments: Tensor) -> Tensor:
        token = self.token(ids)
        token = ops.where((ids == 0)[..., None], ops.stop_gradient(token), token)  # padding is not trained
        positions = ops.arange(ids.shape[1])
        return self.norm(token + self.position(positions) + self.segment(segments))  # (B, T, D)


class Attention(layers.Layer):
    def __init__(self, config: EncoderConfig, **options) -> None:
        super().__init__(**options)
        self.heads = config.num_heads
        self.query = layers.Dense(config.d_model, name="query")
        self.key = layers.Dense(config.d_model, name="key")
        self.value = layers.Dense(config.d_model, name="value")
        self.out = layers.Dense(config.d_model, name="output")

    def call(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ ops.swapaxes(k, 2, 3) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        context = ops.softmax(scores + mask, axis=-1) @ v  # (B, H, T, K)
        return self.out(ops.reshape(ops.swapaxes(context, 1, 2), x.shape))

    def split(self, x: Tensor) -> Tensor:
        return ops.swapaxes(ops.reshape(x, (*x.shape[:2], self.heads, -1)), 1, 2)  # (B, H, T, K)


class FeedForward(layers.Layer):
    def __init__(self, config: EncoderConfig, **options) -> None:
        super().__init__(**options)
        self.inner = layers.Dense(config.d_ff, name="inner")
        self.outer = layers.Dense(config.d_model, name="outer")

    def call(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.outer(
            0.5 * x * (1.0 + ops.erf(x / math.sqrt(2.0)))
        )  # tf.nn.gelu uses 1.4142135 even in float64


class Layer(layers.Layer):
    def __init__(self, config: EncoderConfig, **options) -> None:
        super().__init__(**options)
        self.attention = Attention(config, name="attention")
        self.norm1 = layers.LayerNormalization(epsilon=EPSILON, name="norm1")
        self.feed_forward = FeedForward(config, name="feed_forward")
        self.norm2 = layers.LayerNormalization(epsilon=EPSILON, name="norm2")

    def call(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed_forward(x))


class Bert(keras.Model):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, name="embeddings")
        self.encoder_layers = [Layer(config, name=f"layers.{i}") for i in range(config.num_layers)]
        self.pooler = layers.Dense(config.d_model, activation="tanh", name="pooler")
        self.classifier = layers.Dense(config.num_classes, name="classifier")

    def call(self, ids: Tensor, segments: Tensor) -> Tensor:
        x = self.embeddings(ids, segments)
        mask = ops.cast(ids == 0, x.dtype)[:, None, None, :] * MASKED  # (B, 1, 1, T)
        for layer in self.encoder_layers:
            x = layer(x, mask)
        return self.classifier(self.pooler(x[:, 0]))  # (B, C)


class Backend(Plain):
    """The model as a plug-in: ``concord check --backend examples.bert.tf:Backend --variant bert``."""

    name, version = "plain-tf", f"{tf.__version__} (keras {keras.__version__})"

    def compute(self, config, weights, inputs, dtype):
        keras.config.set_dtype_policy(dtype)
        model = Bert(config)
        ids, segments, labels = (tf.constant(inputs[name]) for name in ("input_ids", "segment_ids", "labels"))
        model(ids, segments)  # the first call builds the model
        names = [canonical(variable.path.split("/")[1:]) for variable in model.trainable_variables]
        for name, variable in zip(names, model.trainable_variables, strict=True):
            variable.assign(weights[name])
        with tf.GradientTape() as tape:
            logits = model(ids, segments)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = ops.mean(losses)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        arrays = [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]
        return logits.numpy(), loss.numpy(), dict(zip(names, arrays, strict=True))
