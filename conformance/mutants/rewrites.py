"""The backends' methods once more, each as steps that a mutant can replace. With none replaced they compute the same.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, F d_ff, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from conformance.faults.operations import Array
from conformance.mutants.surgery import CALL, Steps, Target

Tap = Callable[[str, Array], Array]


class TokenVectors(Steps):
    """SPEC EMB-1 to EMB-4: (B, T) to (B, T, D)."""

    target = Target("layers", "Embeddings", "embed_tokens")

    def run(self, layer: Any, input_ids: Array) -> Array:
        vectors = self.freeze(layer, self.look_up(layer, input_ids), input_ids)
        return self.scale(layer, self.blank(layer, vectors, input_ids))

    def look_up(self, layer: Any, ids: Array) -> Array:
        return self.o.take(self.o.table(layer.token), ids)

    def freeze(self, layer: Any, vectors: Array, ids: Array) -> Array:
        row = layer.token_padding_row
        return vectors if row is None else self.o.where((ids == row)[..., None], self.o.stop_gradient(vectors), vectors)

    def blank(self, layer: Any, vectors: Array, ids: Array) -> Array:
        return self.o.where((ids != layer.token_padding_row)[..., None], vectors, 0.0) if layer.zero_padding else vectors

    def scale(self, layer: Any, vectors: Array) -> Array:
        return vectors if layer.scale is None else vectors * layer.scale


class PositionNumbers(Steps):
    """SPEC POS-5, POS-6: (B, T) to (B, T)."""

    target = Target("layers", "Embeddings", "position_ids")


class Embed(Steps):
    """SPEC EMB-6: (B, T) to (B, T, D)."""

    target = Target("layers", "Embeddings", CALL)

    def run(self, layer: Any, input_ids: Array, segment_ids: Array | None, real: Array, tap: Tap) -> Array:
        token = tap(f"{layer.name}.token", layer.embed_tokens(input_ids))
        position = tap(f"{layer.name}.position", self.position(layer, real))
        if layer.segment is None:
            total = self.add(layer, token, position)
        else:
            total = self.add(layer, token, position, tap(f"{layer.name}.segment", self.segment(layer, segment_ids)))
        total = tap(f"{layer.name}.sum", total)
        return total if layer.norm is None else tap(f"{layer.name}.norm", self.norm(layer, total))

    def position(self, layer: Any, real: Array) -> Array:
        return self.o.take(self.o.table(layer.position), layer.position_ids(real))

    def segment(self, layer: Any, ids: Array) -> Array:
        return self.o.modules["layers"].freeze_row(self.o.take(self.o.table(layer.segment), ids), ids, layer.segment_padding_row)

    def add(self, layer: Any, token: Array, position: Array, *segment: Array) -> Array:
        return sum(segment, start=token + position)

    def norm(self, layer: Any, total: Array) -> Array:
        return layer.norm(total)


class Norm(Steps):
    """SPEC NRM-2 to NRM-4: (B, T, D) to (B, T, D)."""

    target = Target("layers", "LayerNorm", CALL)

    def run(self, layer: Any, x: Array) -> Array:
        centered = self.center(layer, x)
        normed = centered / self.deviation(layer, self.variance(layer, x, centered))
        return self.shift(layer, self.gain(layer, normed))

    def center(self, layer: Any, x: Array) -> Array:
        return x - self.o.mean(x, -1)

    def variance(self, layer: Any, x: Array, centered: Array) -> Array:
        return self.o.sum(centered * centered, -1) / float(layer.count)  # (B, T, 1)

    def deviation(self, layer: Any, variance: Array) -> Array:
        return layer.deviation(variance, layer.epsilon)

    def gain(self, layer: Any, normed: Array) -> Array:
        return normed * self.o.gain(layer)

    def shift(self, layer: Any, gained: Array) -> Array:
        return gained + self.o.offset(layer)


class Attend(Steps):
    """SPEC ATT-3 to ATT-7, MSK-3 to MSK-8: (B, Q, H, K), 2 x (B, S, H, K) to (B, Q, D)."""

    target = Target("layers", "DotProductAttention", CALL)

    def run(self, layer: Any, q: Array, k: Array, v: Array, key_mask: Array | None, query_mask: Array | None, tap: Tap) -> Array:
        constant = layer.constants[self.o.dtype(q)]

        def score(q: Array, k: Array) -> Array:
            return self.scale(layer, self.product("bqhk,bshk->bhqs", self.scale_query(layer, q), k), q)

        def mask(scores: Array, q: Array) -> Array:
            return self.mask(layer, scores, self.visible(layer, key_mask, q), constant)

        def softmax(scores: Array, unmasked: Array, q: Array) -> Array:
            return self.softmax(layer, scores, unmasked, None if key_mask is None else self.visible(layer, key_mask, q))

        scores = unmasked = tap(f"{layer.name}.scores", layer.each_head(score, (q, 2), (k, 2), axis=1))  # (B, H, Q, S)
        if key_mask is not None:
            scores = tap(f"{layer.name}.masked_scores", layer.each_head(mask, (scores, 1), (q, 2), axis=1))
        weights = tap(f"{layer.name}.weights", layer.each_head(softmax, (scores, 1), (unmasked, 1), (q, 2), axis=1))
        if layer.overwrite_queries and query_mask is not None:
            queries = query_mask[:, None, :, None]
            weights = layer.each_head(lambda w: self.overwrite(layer, w, queries, constant), (weights, 1), axis=1)
            weights = tap(f"{layer.name}.masked_weights", weights)
        context = layer.each_head(lambda w, v, k: self.context(layer, w, v, k), (weights, 1), (v, 2), (k, 2), axis=2)
        return tap(f"{layer.name}.context", self.join(layer, context))

    def scale_query(self, layer: Any, q: Array) -> Array:
        return q if layer.scale_query is None else q * layer.scale_query

    def scale(self, layer: Any, scores: Array, q: Array) -> Array:
        return scores if layer.divide_scores is None else scores / layer.divide_scores

    def visible(self, layer: Any, key_mask: Array, q: Array) -> Array:
        per_query = key_mask[:, None, :] if len(tuple(key_mask.shape)) == 2 else key_mask  # (B, 1 or Q, S)
        return layer.assign(per_query, tuple(q.shape)[2])  # (B, 1 or H, 1 or Q, S)

    def mask(self, layer: Any, scores: Array, visible: Array, constant: float) -> Array:
        return layer.fill(scores, visible, constant)

    def softmax(self, layer: Any, scores: Array, unmasked: Array, visible: Array | None) -> Array:
        return self.o.softmax(scores, -1)

    def overwrite(self, layer: Any, weights: Array, queries: Array, constant: float) -> Array:
        return self.o.where(queries, weights, constant)

    def context(self, layer: Any, weights: Array, v: Array, k: Array) -> Array:
        return self.product("bhqs,bshk->bqhk", weights, v)

    def join(self, layer: Any, context: Array) -> Array:
        batch, queries, heads, width = tuple(context.shape)
        return self.o.reshape(context, (batch, queries, heads * width))  # (B, Q, D)


class MultiHead(Steps):
    """SPEC ATT-1, ATT-2, ATT-6: (B, Q, D), 2 x (B, S, D) to (B, Q, D)."""

    target = Target("layers", "MultiHeadAttention", CALL)

    def run(self, layer: Any, query: Array, key: Array, value: Array, key_mask: Array | None, query_mask: Array | None, tap: Tap) -> Array:
        given = {"query": query, "key": key, "value": value}
        q, k, v = (tap(f"{layer.name}.{role}", layer.split_heads(self.project(layer, role, x))) for role, x in given.items())
        context = layer.dot_product(q, k, v, key_mask=key_mask, query_mask=query_mask, tap=tap)
        projection = self.o.projection(layer)
        return context if projection is None else tap(f"{layer.name}.output", self.output(projection, context))

    def project(self, layer: Any, role: str, x: Array) -> Array:
        return layer.activation(self.linear(getattr(layer, role), x))

    def output(self, projection: Any, context: Array) -> Array:
        return self.linear(projection, context)


class SplitHeads(Steps):
    """SPEC ATT-2: (B, T, D) to (B, T, H, K)."""

    target = Target("layers", "MultiHeadAttention", "split_heads")

    def run(self, layer: Any, x: Array) -> Array:
        return self.o.reshape(x, (*tuple(x.shape)[:2], *layer.heads))


class FeedForward(Steps):
    """SPEC FFN-1, FFN-2: (B, T, D) to (B, T, D)."""

    target = Target("layers", "FeedForward", CALL)

    def run(self, layer: Any, x: Array, tap: Tap) -> Array:
        inner = tap(f"{layer.name}.inner", self.linear(layer.inner, x))  # (B, T, F)
        active = tap(f"{layer.name}.activation", self.activate(layer, inner))
        return tap(f"{layer.name}.outer", self.outer(layer, active))

    def activate(self, layer: Any, inner: Array) -> Array:
        return layer.activation(inner)

    def outer(self, layer: Any, active: Array) -> Array:
        return self.linear(layer.outer, active)


class EncoderLayer(Steps):
    """One layer: (B, T, D) to (B, T, D)."""

    target = Target("layers", "EncoderLayer", CALL)


class PostNorm(Steps):
    """SPEC NRM-1, NRM-5, RES-1, a sublayer whose sum is normed: (B, T, D) to (B, T, D)."""

    target = Target("layers", "EncoderLayer", "post_norm")

    def run(self, layer: Any, number: int, x: Array, function: Callable[[Array], Array], tap: Tap) -> Array:
        total = tap(f"{layer.name}.residual{number}", self.residual(number, x, function(x)))
        return tap(f"{layer.name}.norm{number}", self.norm(layer, number, total))

    def residual(self, number: int, x: Array, y: Array) -> Array:
        return x + y

    def norm(self, layer: Any, number: int, x: Array) -> Array:
        return getattr(layer, layer.norm_names[number - 1])(x)


class PreNorm(Steps):
    """SPEC NRM-1, NRM-5, RES-1, a sublayer whose input is normed: (B, T, D) to (B, T, D)."""

    target = Target("layers", "EncoderLayer", "pre_norm")

    def run(self, layer: Any, number: int, x: Array, function: Callable[[Array], Array], tap: Tap) -> Array:
        normed = tap(f"{layer.name}.norm{number}", self.norm(layer, number, x))
        return tap(f"{layer.name}.residual{number}", self.residual(number, x, function(normed), normed))

    def residual(self, number: int, x: Array, y: Array, normed: Array) -> Array:
        return x + y

    def norm(self, layer: Any, number: int, x: Array) -> Array:
        return getattr(layer, layer.norm_names[number - 1])(x)


class RealTokens(Steps):
    """SPEC MSK-1: (B, T) to (B, T)."""

    target = Target("model", "EncoderStack", "real_tokens")


class Encode(Steps):
    """SPEC NRM-6: (B, T, D) to (B, T, D)."""

    target = Target("model", "EncoderStack", "encode")

    def run(self, model: Any, x: Array, real: Array, tap: Tap) -> Array:
        for layer in model.layers:
            x = layer(x, real, tap=tap)
        return x if model.final_norm is None else tap("final_norm", self.norm(model, x))

    def norm(self, model: Any, x: Array) -> Array:
        return model.final_norm(x)


class Head(Steps):
    """SPEC HED-1 to HED-3: (B, T) to (B, C)."""

    target = Target("model", "TextClassifier", CALL)

    def run(self, model: Any, inputs: Mapping[str, Array], tap: Tap) -> Array:
        x = getattr(self.o.modules["model"].Encoder, self.o.call)(model, inputs, tap)  # (B, T, D)
        pooled = tap("pooling", self.pool(model, x, inputs["input_ids"]))  # (B, D) or (B, T * D)
        if model.pooler is not None:
            dense = tap("pooler.dense", self.dense(model, pooled))
            pooled = tap("pooler.output", self.activate(dense))
        return tap("logits", self.classify(model, pooled))

    def pool(self, model: Any, x: Array, ids: Array) -> Array:
        batch, tokens, width = tuple(x.shape)
        return self.o.reshape(x, (batch, tokens * width)) if model.flatten else x[:, 0]

    def dense(self, model: Any, pooled: Array) -> Array:
        return self.linear(model.pooler, pooled)

    def activate(self, dense: Array) -> Array:
        return self.o.tanh(dense)

    def classify(self, model: Any, pooled: Array) -> Array:
        return self.linear(model.classifier, pooled)


class SoftmaxLosses(Steps):
    """SPEC LOS-1: (B, C), (B,) to (B,)."""

    target = Target("training", "", "softmax_losses")

    def run(self, logits: Array, labels: Array, tap: Tap) -> Array:
        return -self.pick(tap("log_probabilities", self.log_softmax(logits)), labels)

    def log_softmax(self, logits: Array) -> Array:
        return self.o.log_softmax(logits, -1)

    def pick(self, log_probabilities: Array, labels: Array) -> Array:
        return self.o.pick(log_probabilities, labels)


class SigmoidLosses(Steps):
    """SPEC LOS-1: (B, 1), (B,) to (B,)."""

    target = Target("training", "", "sigmoid_losses")


class Loss(Steps):
    """SPEC LOS-2 to LOS-4: (B, C) to a scalar."""

    target = Target("training", "ClassificationLoss", "__call__")

    def run(self, loss: Any, model: Any, logits: Array, inputs: Mapping[str, Array], tap: Tap) -> Array:
        losses = tap("losses", loss.losses(logits, inputs["labels"], tap))  # (B,)
        counted = self.o.numpy(inputs["labels"]) != (-1 if loss.ignore_label is None else loss.ignore_label)
        total = self.reduce(losses, self.o.constant(counted), float(counted.sum()))
        return tap("loss", total + self.penalty(loss.l2_weight, model.classifier) if loss.l2_weight else total)

    def reduce(self, losses: Array, counted: Array, count: float) -> Array:
        return self.o.sum(self.o.where(counted, losses, 0.0)) / count

    def penalty(self, factor: float, classifier: Any) -> Array:
        weight, bias = self.o.weight(classifier), self.o.bias(classifier)
        return (self.o.sum(weight * weight) + self.o.sum(bias * bias)) * (0.5 * factor)


class Gradients(Steps):
    """SPEC GRD-1: output, loss, taps and gradients by native name."""

    target = Target("adapter", "", "differentiate")

    def run(self, *arguments: Any) -> tuple[Array, Array, dict[str, Array], dict[str, Array]]:
        output, loss, taps, gradients = self.original(*arguments)
        of_taps = {name: gradient for name, gradient in gradients.items() if name.startswith("taps.")}
        changed = self.change({name: gradient for name, gradient in gradients.items() if name not in of_taps})
        return output, loss, taps, changed | of_taps

    def change(self, gradients: dict[str, Array]) -> dict[str, Array]:
        return gradients


class GeluErf(Steps):
    """FFN-2."""

    target = Target("layers", "ACTIVATIONS", "gelu_erf")

    def run(self, x: Array) -> Array:
        return x * 0.5 * (self.o.erf(x / math.sqrt(2)) + 1.0)


class GeluTanh(Steps):
    """FFN-2."""

    target = Target("layers", "ACTIVATIONS", "gelu_tanh")

    def run(self, x: Array) -> Array:
        return x * 0.5 * (self.o.tanh((x + x * x * x * self.cubic()) * math.sqrt(2 / math.pi)) + 1.0)

    def cubic(self) -> float:
        return 0.044715


FAMILIES: dict[str, type[Steps]] = {
    family.__name__: family
    for family in (
        TokenVectors, PositionNumbers, Embed, Norm, Attend, MultiHead, SplitHeads, FeedForward, EncoderLayer, PostNorm, PreNorm,
        RealTokens, Encode, Head, SoftmaxLosses, SigmoidLosses, Loss, Gradients, GeluErf, GeluTanh,
    )
}  # fmt: skip
"""Every family of steps by name. Each with nothing changed is a null mutant: ``null:NAME`` must conform."""
