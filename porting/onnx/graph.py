"""The model family as an ONNX graph; in the order, and with the names, of the specification.

Shapes: B batch, T tokens, D d_model, H heads, K head_dim, F d_ff, C classes. B and T are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from concord.porting.checkpoint import Checkpoint
from concord.porting.onnx.builder import INT64, KINDS, Builder
from concord.porting.stored import Stored
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
        self.real = b.node("Not", b.node("Equal", "input_ids", b.scalar(config.pad_id)))  # (B, T); MSK-1
        shape = b.node("Shape", "input_ids")
        self.batch, self.tokens = (
            b.node("Gather", shape, b.whole(0)),
            b.node("Gather", shape, b.whole(1)),
        )  # (1), (1)
        x = self.embeddings()
        for i in range(config.num_layers):
            x = self.layer(f"layers.{i}", x)
        if config.final_norm:
            x = self.tap("final_norm", self.norm("final_norm", x))
        result = self.pooled(x) if self.checkpoint.part in POOLED else x
        if self.checkpoint.part == "model":
            result = self.tap("logits", self.linear("classifier", result))  # (B, C)
        wanted = output_name(config, self.checkpoint.part)
        if wanted not in self.b.outputs:
            self.output(wanted, result)

    def output(self, name: str, value: str) -> None:
        """Make a value an output, with the axes that the specification gives it."""
        sizes: dict[str, int | str] = {
            **axis_sizes(self.config),
            "batch": "B",
            "tokens": "T",
            "query": "T",
            "key": "T",
        }
        axes = taps(self.config, self.checkpoint.part)[name].shape.split()
        self.b.outputs[self.b.named(value, name)] = [sizes[axis] for axis in axes]

    def tap(self, name: str, value: str) -> str:
        """Return what the model goes on with; a tap that is wanted is an output."""
        if not self.every_tap:
            return value
        self.output(name, value)
        return name

    def weight(self, name: str) -> str:
        """Return a parameter, in the dtype of the graph."""
        tensor = self.checkpoint.tensors[name]
        if tensor.dtype == self.b.dtype:
            return self.b.weight(name, Stored(tensor.dtype, tensor.shape, tensor.bits))
        return self.b.weight(
            name, Stored(self.b.dtype, tensor.shape, lambda: tensor.read().astype(self.b.dtype))
        )

    # Embeddings (EMB-1 to EMB-6, POS-5 to POS-7).

    def embeddings(self) -> str:
        b, config = self.b, self.config
        token = b.node("Gather", self.weight("embeddings.token.weight"), "input_ids")  # (B, T, D)
        if config.token_padding_forward == "zero":
            assert config.token_padding_row is not None
            kept = b.node("Not", b.node("Equal", "input_ids", b.scalar(config.token_padding_row)))
            token = b.node("Where", b.node("Unsqueeze", kept, b.whole(2)), token, b.number(0.0))
        if config.embedding_scale == "sqrt_d_model":
            token = b.node("Mul", token, b.number(math.sqrt(config.d_model)))
        total = self.tap("embeddings.token", token)
        total = b.node(
            "Add",
            total,
            self.tap(
                "embeddings.position",
                b.node("Gather", self.weight("embeddings.position.weight"), self.positions()),
            ),
        )
        if config.num_segments:
            total = b.node(
                "Add",
                total,
                self.tap(
                    "embeddings.segment",
                    b.node("Gather", self.weight("embeddings.segment.weight"), "segment_ids"),
                ),
            )
        total = self.tap("embeddings.sum", total)
        return (
            self.tap("embeddings.norm", self.norm("embeddings.norm", total))
            if config.embedding_norm
            else total
        )

    def positions(self) -> str:
        """Return the row of the position table of each token: (B, T)."""
        b, config = self.b, self.config
        if config.position_of_padding == "pad_row":
            counted = b.node("CumSum", b.node("Cast", self.real, to=INT64), b.scalar(1))
            return b.node(
                "Where",
                self.real,
                b.node("Add", counted, b.scalar(config.position_start - 1)),
                b.scalar(config.pad_id),
            )
        end = b.node("Squeeze", b.node("Add", self.tokens, b.whole(config.position_start)))
        numbers = b.node("Range", b.scalar(config.position_start), end, b.scalar(1))
        numbers = b.node("Expand", numbers, b.node("Shape", "input_ids"))
        return (
            b.node("Where", self.real, numbers, b.scalar(0))
            if config.position_of_padding == "zero_row"
            else numbers
        )

    # The encoder layer (NRM-1 to NRM-5, RES-1, FFN-1, FFN-2).

    def layer(self, name: str, x: str) -> str:
        x = self.sublayer(name, 1, x, lambda h: self.attention(f"{name}.attention", h))
        return self.sublayer(name, 2, x, lambda h: self.feed_forward(f"{name}.feed_forward", h))

    def sublayer(self, name: str, number: int, x: str, function: Callable[[str], str]) -> str:
        norm = f"{name}.norm" if self.config.norm_sharing == "shared" else f"{name}.norm{number}"

        def normed(y: str) -> str:
            return self.tap(f"{name}.norm{number}", self.norm(norm, y))

        if self.config.norm_placement == "pre":
            return self.tap(f"{name}.residual{number}", self.b.node("Add", x, function(normed(x))))
        return normed(self.tap(f"{name}.residual{number}", self.b.node("Add", x, function(x))))

    def norm(self, name: str, x: str) -> str:
        b, config = self.b, self.config
        centered = b.node("Sub", x, b.node("ReduceMean", x, axes=[-1], keepdims=1))
        variance = b.node("ReduceMean", b.node("Mul", centered, centered), axes=[-1], keepdims=1)  # (B, T, 1)
        if config.norm_variance == "unbiased":
            variance = b.node("Mul", variance, b.number(config.d_model / (config.d_model - 1)))
        epsilon = b.number(config.norm_epsilon)
        if config.norm_epsilon_placement == "inside":
            deviation = b.node("Sqrt", b.node("Add", variance, epsilon))
        else:
            deviation = b.node("Add", b.node("Sqrt", variance), epsilon)
        return b.node(
            "Add",
            b.node("Mul", b.node("Div", centered, deviation), self.weight(f"{name}.weight")),
            self.weight(f"{name}.bias"),
        )

    def linear(self, name: str, x: str) -> str:
        y = self.b.node("MatMul", x, self.weight(f"{name}.weight"))
        return (
            self.b.node("Add", y, self.weight(f"{name}.bias"))
            if f"{name}.bias" in self.checkpoint.tensors
            else y
        )

    def feed_forward(self, name: str, x: str) -> str:
        inner = self.tap(f"{name}.inner", self.linear(f"{name}.inner", x))  # (B, T, F)
        active = self.tap(f"{name}.activation", self.activation(inner))
        return self.tap(f"{name}.outer", self.linear(f"{name}.outer", active))  # (B, T, D)

    def activation(self, x: str) -> str:
        b = self.b
        if self.config.activation == "relu":
            return b.node("Relu", x)
        if self.config.activation == "gelu_erf":
            inner = b.node("Erf", b.node("Div", x, b.number(math.sqrt(2))))
        else:
            cubic = b.node("Mul", b.node("Mul", b.node("Mul", x, x), x), b.number(0.044715))
            inner = b.node("Tanh", b.node("Mul", b.node("Add", x, cubic), b.number(math.sqrt(2 / math.pi))))
        return b.node("Mul", b.node("Mul", x, b.number(0.5)), b.node("Add", inner, b.number(1.0)))

    # Attention (ATT-1 to ATT-7, MSK-3 to MSK-8).

    def attention(self, name: str, x: str) -> str:
        b, config = self.b, self.config
        q, k, v = (
            self.tap(f"{name}.{role}", self.project(f"{name}.{role}", x))
            for role in ("query", "key", "value")
        )  # (B, T, H, K)
        root = b.number(math.sqrt(config.head_dim))
        q, k, v = (
            b.node("Transpose", q, perm=[0, 2, 1, 3]),
            b.node("Transpose", k, perm=[0, 2, 3, 1]),
            b.node("Transpose", v, perm=[0, 2, 1, 3]),
        )
        if config.score_scale == "multiply_query":
            scores = b.node("MatMul", b.node("Mul", q, b.number(1 / math.sqrt(config.head_dim))), k)
        else:
            scores = b.node("Div", b.node("MatMul", q, k), root)
        scores = self.tap(
            f"{name}.masked_scores", self.masked(self.tap(f"{name}.scores", scores))
        )  # (B, H, T, T)
        weights = self.tap(f"{name}.weights", b.node("Softmax", scores, axis=-1))
        if config.query_mask == "overwrite":
            rows = b.node("Unsqueeze", self.real, b.whole(1, 3))  # (B, 1, T, 1)
            weights = self.tap(
                f"{name}.masked_weights", b.node("Where", rows, weights, b.number(self.constant))
            )
        context = b.node("Transpose", b.node("MatMul", weights, v), perm=[0, 2, 1, 3])
        context = self.tap(f"{name}.context", b.node("Reshape", context, b.whole(0, 0, config.d_model)))
        return (
            self.tap(f"{name}.output", self.linear(f"{name}.output", context))
            if config.output_projection
            else context
        )

    def project(self, name: str, x: str) -> str:
        y = self.linear(name, x)
        if self.config.qkv_activation == "relu":
            y = self.b.node("Relu", y)
        return self.b.node("Reshape", y, self.b.whole(0, 0, self.config.num_heads, self.config.head_dim))

    @property
    def constant(self) -> float:
        """The mask constant as the dtype holds it (MSK-6)."""
        return mask_constant(self.config, self.b.dtype)

    def masked(self, scores: str) -> str:
        b = self.b
        if self.config.mask_assignment == "per_sample":
            visible = b.node("Unsqueeze", self.real, b.whole(1, 2))  # (B, 1, 1, T)
        else:  # head h of sample b gets the mask of sample (h B + b) // H
            heads = b.node("Mul", b.constant_range(self.config.num_heads), self.batch)  # (H)
            samples = b.node("Range", b.scalar(0), b.node("Squeeze", self.batch), b.scalar(1))
            slot = b.node(
                "Add", b.node("Unsqueeze", heads, b.whole(0)), b.node("Unsqueeze", samples, b.whole(1))
            )  # (B, H)
            rows = b.node(
                "Gather", self.real, b.node("Div", slot, b.scalar(self.config.num_heads))
            )  # (B, H, T)
            visible = b.node("Unsqueeze", rows, b.whole(2))
        if self.config.mask_fill == "replace":
            return b.node("Where", visible, scores, b.number(self.constant))
        return b.node("Add", scores, b.node("Where", visible, b.number(0.0), b.number(self.constant)))

    # Pooling (HED-1, HED-2, HED-5).

    def pooled(self, x: str) -> str:
        """Return the vector of each text: (B, D), or (B, T * D)."""
        b, config = self.b, self.config
        if config.pooling == "mean":
            pooled = self.mean(x)
        else:
            pooled = (
                b.node("Flatten", x, axis=1)
                if config.pooling == "flatten"
                else b.node("Gather", x, b.scalar(0), axis=1)
            )
        pooled = self.tap("pooling", pooled)
        if config.pooler != "none":
            pooled = self.tap(
                "pooler.output",
                b.node(
                    {"tanh": "Tanh", "relu": "Relu"}[config.pooler],
                    self.tap("pooler.dense", self.linear("pooler", pooled)),
                ),
            )
        return pooled if config.length_epsilon is None else self.tap("normalized", self.normalized(pooled))

    def mean(self, x: str) -> str:
        """Return the mean of real tokens, or zero: (B, D)."""
        b = self.b
        real = b.node("Unsqueeze", self.real, b.whole(2))  # (B, T, 1)
        count = b.node(
            "ReduceSum", b.node("Cast", self.real, to=KINDS[b.dtype]), b.whole(1), keepdims=1
        )  # (B, 1)
        total = b.node("ReduceSum", b.node("Where", real, x, b.number(0.0)), b.whole(1), keepdims=0)
        return b.node("Div", total, b.node("Max", count, b.number(1.0)))

    def normalized(self, x: str) -> str:
        """Return vectors divided by their length, or by epsilon: (B, D)."""
        b = self.b
        squares = b.node("ReduceSum", b.node("Mul", x, x), b.whole(-1), keepdims=1)
        return b.node(
            "Div", x, b.node("Sqrt", b.node("Max", squares, b.number(least_squares(self.config, b.dtype))))
        )
