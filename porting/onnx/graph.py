"""The model family as an ONNX graph; in the order, and with the names, of the specification.

Shapes: B batch, T tokens, D d_model, H heads, K head_dim, F d_ff, C classes. B and T are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from concord.porting.checkpoint import Checkpoint
from concord.porting.onnx.builder import INT64, KINDS, Builder, GraphValue
from concord.spec.errors import SpecError
from concord.spec.masks import mask_constant
from concord.spec.pooling import least_squares
from concord.spec.tensors import OF_IDS, POOLED, axis_sizes, output_name, taps

PARTS = OF_IDS


def write(path: Path, checkpoint: Checkpoint, every_tap: bool = False) -> None:
    """Write a model as a graph.

    Its inputs are ``input_ids`` and, where the configuration has segments, ``segment_ids``, int64 (B, T); its
    output is that of the part
    (:func:`concord.spec.tensors.output_name`).

    Args:
        path: ``*.onnx``; the weights go into ``*.onnx.data``.
        every_tap: whether every tap is an output besides, by its name.

    Raises:
        SpecError: for a part that takes no ids, or a dtype that no graph computes in.
    """
    if checkpoint.part not in PARTS:
        raise SpecError(
            f"the part {checkpoint.part!r} cannot be written as onnx, which has {' or '.join(PARTS)}"
        )
    dtypes = {
        tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if not (tensor.foreign == "" and name == "embeddings.position.weight")
    }
    if len(dtypes) != 1:
        raise SpecError(
            f"the parameters are {' and '.join(sorted(dtypes))} but an ONNX graph must have one dtype"
        )
    graph = _Graph(checkpoint, Builder(dtypes.pop()), every_tap)
    graph.run()
    segments = {"segment_ids": ("B", "T")} if checkpoint.config.num_segments else {}
    graph.b.write(path, {"input_ids": ("B", "T"), **segments})


class _Graph:
    """One model, every option of the family in it."""

    def __init__(self, checkpoint: Checkpoint, builder: Builder, every_tap: bool) -> None:
        self.checkpoint, self.config, self.b, self.every_tap = (
            checkpoint,
            checkpoint.config,
            builder,
            every_tap,
        )

    def run(self) -> None:
        b, config = self.b, self.config
        self.ids = GraphValue(b, "input_ids")
        self.real = ~b.node("Equal", self.ids, config.pad_id)  # (B, T); MSK-1
        shape = b.node("Shape", self.ids)
        self.batch, self.tokens = (b.node("Gather", shape, (axis,)) for axis in (0, 1))  # (1), (1)
        x = self.embeddings()
        for i in range(config.num_layers):
            x = self.layer(f"layers.{i}", x)
        if config.final_norm:
            x = self.tap("final_norm", self.norm("final_norm", x))
        result = self.pooled(x) if self.checkpoint.part in POOLED else x
        if self.checkpoint.part == "model":
            result = self.tap("logits", self.linear("classifier", result))  # (B, C)
        wanted = output_name(config, self.checkpoint.part)
        if wanted not in b.outputs:
            self.output(wanted, result)

    def output(self, name: str, value: GraphValue) -> GraphValue:
        """Make a value an output, with the axes that the specification gives it."""
        sizes: dict[str, int | str] = {
            **axis_sizes(self.config),
            **{"batch": "B", "tokens": "T", "query": "T", "key": "T"},
        }
        axes = taps(self.config, self.checkpoint.part)[name].shape.split()
        self.b.outputs[name] = [sizes[axis] for axis in axes]
        return self.b.named(value, name)

    def tap(self, name: str, value: GraphValue) -> GraphValue:
        """Return what the model goes on with; a tap that is wanted is an output."""
        return self.output(name, value) if self.every_tap else value

    def weight(self, name: str) -> GraphValue:
        """Return a parameter, in the dtype of the graph."""
        return self.b.weight(name, self.checkpoint.tensors[name].read().astype(self.b.dtype, copy=False))

    # Embeddings (EMB-1 to EMB-6, POS-5 to POS-7).

    def embeddings(self) -> GraphValue:
        config = self.config
        token = self.looked_up("token", self.ids)  # (B, T, D)
        if config.token_padding_forward == "zero":
            assert config.token_padding_row is not None
            kept = ~self.b.node("Equal", self.ids, config.token_padding_row)
            token = self.b.node("Where", self.b.node("Unsqueeze", kept, (2,)), token, 0.0)
        if config.embedding_scale == "sqrt_d_model":
            token *= math.sqrt(config.d_model)
        total = self.tap("embeddings.token", token)
        total += self.tap("embeddings.position", self.looked_up("position", self.positions()))
        if config.num_segments:
            segments = self.looked_up("segment", GraphValue(self.b, "segment_ids"))
            total += self.tap("embeddings.segment", segments)
        total = self.tap("embeddings.sum", total)
        if not config.embedding_norm:
            return total
        return self.tap("embeddings.norm", self.norm("embeddings.norm", total))

    def looked_up(self, name: str, rows: GraphValue) -> GraphValue:
        return self.b.node("Gather", self.weight(f"embeddings.{name}.weight"), rows)

    def positions(self) -> GraphValue:
        """Return the row of the position table of each token: (B, T)."""
        b, start, how = self.b, self.config.position_start, self.config.position_of_padding
        if how == "pad_row":
            counted = b.node("CumSum", b.node("Cast", self.real, to=INT64), 1)
            return b.node("Where", self.real, counted + (start - 1), self.config.pad_id)
        numbers = b.node("Range", start, b.node("Squeeze", self.tokens) + start, 1)
        numbers = b.node("Expand", numbers, b.node("Shape", self.ids))
        return b.node("Where", self.real, numbers, 0) if how == "zero_row" else numbers

    # The encoder layer (NRM-1 to NRM-5, RES-1, FFN-1, FFN-2).

    def layer(self, name: str, x: GraphValue) -> GraphValue:
        x = self.sublayer(name, 1, x, lambda h: self.attention(f"{name}.attention", h))
        return self.sublayer(name, 2, x, lambda h: self.feed_forward(f"{name}.feed_forward", h))

    def sublayer(
        self, name: str, number: int, x: GraphValue, function: Callable[[GraphValue], GraphValue]
    ) -> GraphValue:
        norm = f"{name}.norm" if self.config.norm_sharing == "shared" else f"{name}.norm{number}"

        def normed(y: GraphValue) -> GraphValue:
            return self.tap(f"{name}.norm{number}", self.norm(norm, y))

        if self.config.norm_placement == "pre":
            return self.tap(f"{name}.residual{number}", x + function(normed(x)))
        return normed(self.tap(f"{name}.residual{number}", x + function(x)))

    def norm(self, name: str, x: GraphValue) -> GraphValue:
        b, config = self.b, self.config
        centered = x - b.node("ReduceMean", x, axes=[-1], keepdims=1)
        variance = b.node("ReduceMean", centered * centered, axes=[-1], keepdims=1)  # (B, T, 1)
        if config.norm_variance == "unbiased":
            variance *= config.d_model / (config.d_model - 1)
        if config.norm_epsilon_placement == "inside":
            deviation = b.node("Sqrt", variance + config.norm_epsilon)
        else:
            deviation = b.node("Sqrt", variance) + config.norm_epsilon
        return centered / deviation * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def linear(self, name: str, x: GraphValue) -> GraphValue:
        y, bias = x @ self.weight(f"{name}.weight"), f"{name}.bias"
        return y + self.weight(bias) if bias in self.checkpoint.tensors else y

    def feed_forward(self, name: str, x: GraphValue) -> GraphValue:
        inner = self.tap(f"{name}.inner", self.linear(f"{name}.inner", x))  # (B, T, F)
        active = self.tap(f"{name}.activation", self.activation(inner))
        return self.tap(f"{name}.outer", self.linear(f"{name}.outer", active))  # (B, T, D)

    def activation(self, x: GraphValue) -> GraphValue:
        b = self.b
        if self.config.activation == "relu":
            return b.node("Relu", x)
        if self.config.activation == "gelu_erf":
            inner = b.node("Erf", x / math.sqrt(2))
        else:
            inner = b.node("Tanh", (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi))
        return x * 0.5 * (inner + 1.0)

    # Attention (ATT-1 to ATT-7, MSK-3 to MSK-8).

    def attention(self, name: str, x: GraphValue) -> GraphValue:
        b, config = self.b, self.config
        q, k, v = (
            self.tap(f"{name}.{role}", self.project(f"{name}.{role}", x))
            for role in ("query", "key", "value")
        )  # (B, T, H, K)
        root, to_heads = math.sqrt(config.head_dim), [0, 2, 1, 3]
        q, v = (b.node("Transpose", one, perm=to_heads) for one in (q, v))
        k = b.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = q * (1 / root) @ k if config.score_scale == "multiply_query" else (q @ k) / root
        scores = self.tap(f"{name}.scores", scores)
        scores = self.tap(f"{name}.masked_scores", self.masked(scores))  # (B, H, T, T)
        weights = self.tap(f"{name}.weights", b.node("Softmax", scores, axis=-1))
        if config.query_mask == "overwrite":
            rows = b.node("Unsqueeze", self.real, (1, 3))  # (B, 1, T, 1)
            weights = b.node("Where", rows, weights, self.constant)
            weights = self.tap(f"{name}.masked_weights", weights)
        context = b.node("Transpose", weights @ v, perm=to_heads)
        context = self.tap(f"{name}.context", b.node("Reshape", context, (0, 0, config.d_model)))
        if not config.output_projection:
            return context
        return self.tap(f"{name}.output", self.linear(f"{name}.output", context))

    def project(self, name: str, x: GraphValue) -> GraphValue:
        y = self.linear(name, x)
        if self.config.qkv_activation == "relu":
            y = self.b.node("Relu", y)
        return self.b.node("Reshape", y, (0, 0, self.config.num_heads, self.config.head_dim))

    @property
    def constant(self) -> float:
        """The mask constant as the dtype holds it (MSK-6)."""
        return mask_constant(self.config, self.b.dtype)

    def masked(self, scores: GraphValue) -> GraphValue:
        b, heads = self.b, self.config.num_heads
        if self.config.mask_assignment == "per_sample":
            visible = b.node("Unsqueeze", self.real, (1, 2))  # (B, 1, 1, T)
        else:  # head h of sample b gets the mask of sample (h B + b) // H
            first = b.constant(np.arange(heads)) * self.batch  # (H)
            samples = b.node("Range", 0, b.node("Squeeze", self.batch), 1)
            place = b.node("Unsqueeze", first, (0,)) + b.node("Unsqueeze", samples, (1,))  # (B, H)
            rows = b.node("Gather", self.real, place / heads)  # (B, H, T)
            visible = b.node("Unsqueeze", rows, (2,))
        if self.config.mask_fill == "replace":
            return b.node("Where", visible, scores, self.constant)
        return scores + b.node("Where", visible, 0.0, self.constant)

    # Pooling (HED-1, HED-2, HED-5).

    def pooled(self, x: GraphValue) -> GraphValue:
        """Return the vector of each text: (B, D), or (B, T * D)."""
        b, config = self.b, self.config
        if config.pooling == "mean":
            pooled = self.mean(x)
        elif config.pooling == "flatten":
            pooled = b.node("Flatten", x, axis=1)
        else:
            pooled = b.node("Gather", x, 0, axis=1)
        pooled = self.tap("pooling", pooled)
        if config.pooler != "none":
            dense = self.tap("pooler.dense", self.linear("pooler", pooled))
            pooled = self.tap("pooler.output", b.node(config.pooler.capitalize(), dense))
        return pooled if config.length_epsilon is None else self.tap("normalized", self.normalized(pooled))

    def mean(self, x: GraphValue) -> GraphValue:
        """Return the mean of real tokens, or zero: (B, D)."""
        b = self.b
        real = b.node("Unsqueeze", self.real, (2,))  # (B, T, 1)
        count = b.node("ReduceSum", b.node("Cast", self.real, to=KINDS[b.dtype]), (1,), keepdims=1)  # (B, 1)
        total = b.node("ReduceSum", b.node("Where", real, x, 0.0), (1,), keepdims=0)
        return total / b.node("Max", count, 1.0)

    def normalized(self, x: GraphValue) -> GraphValue:
        """Return vectors divided by their length, or by epsilon: (B, D)."""
        b = self.b
        squares = b.node("ReduceSum", x * x, (-1,), keepdims=1)
        return x / b.node("Sqrt", b.node("Max", squares, least_squares(self.config, b.dtype)))
