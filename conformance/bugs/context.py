"""What an edit of a tap sees: the operations, the taps before it, parameters, ids and masks.

The same object serves the frameworks and the NumPy arithmetic, so that a bug is written once.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, F d_ff, C classes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.operations import Array, TensorOperations, Unary
from concord.spec.arrays import Ids
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constant, real_tokens, visible_keys
from concord.spec.positions import position_ids
from concord.spec.tensors import source_of

Flags = NDArray[np.bool_]
Contraction = Callable[[Callable[[Array, Array], Array], Array, Array], Array]
"""Takes what contracts two tensors, and the two tensors."""


def directly(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """Take a product as it is."""
    return multiply(a, b)


def parameters_of(tap: str) -> str:
    """Return what the names of a linear layer's parameters begin with."""
    return {"pooler.dense": "pooler", "logits": "classifier"}.get(tap, tap)


def norm_of(sharing: str, tap: str) -> str:
    """Return what the names of a norm's parameters begin with."""
    return tap[:-1] if sharing == "shared" and tap.startswith("layers.") else tap


class Context(TensorOperations):
    """One run of the model, at one tap, with the operations of what computes it.

    Args:
        config, batch, part, dtype: what is computed.
        now: each tap before this one as the model goes on with it, ``inputs.<name>`` for given tensors, and
            parameters by their canonical names, in the canonical layout.
        memory: what edits of earlier runs left for later ones in the same process.

    Attributes:
        tap: the name of the tap that is edited.
        y: what it rightly is.
        contract: how steps take their products.
    """

    tap = ""
    y: Array
    contract: Contraction

    def __init__(
        self,
        config: EncoderConfig,
        batch: Batch,
        part: str,
        dtype: str,
        now: Mapping[str, Array],
        memory: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.batch, self.part, self.dtype, self.now = config, batch, part, dtype, now
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.contract = directly

    # Where it stands.

    @property
    def scope(self) -> str:
        """The submodule that computed the tap, such as ``layers.0.attention``."""
        return self.tap.rpartition(".")[0]

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return int(self.tap.split(".")[1])

    def size(self, **powers: float) -> float:
        """Return the product of powers of sizes of the configuration."""
        return math.prod(float(getattr(self.config, name) ** power) for name, power in powers.items())

    def weight(self, name: str) -> Array:
        """Return a parameter by its canonical name, in the canonical layout."""
        return self.now[name]

    def beside(self, name: str) -> Array:
        """Return another tap of the same submodule.

        What would be one may have been given, or stay inside a fused kernel.
        """
        full = f"{self.scope}.{name}"
        if full not in self.now and name in ("scores", "weights"):
            return self.scores() if name == "scores" else self.softmax(self.unnormalised, 3)
        return self.now[full] if full in self.now else self.now[f"inputs.{name}"]

    def source(self, which: str = "", of: str = "") -> Array:
        """Return what went into the step of the tap, or of another.

        For a residual what stands beside the sublayer, or its ``"result"``.
        """
        return self.now[source_of(self.config, of or self.tap, self.part, which)]

    @property
    def x(self) -> Array:
        """What went into the step of the tap."""
        return self.source()

    # What the batch says, as NumPy arrays.

    @property
    def ids(self) -> Ids:
        """Token ids, (B, T)."""
        return self.batch.required("input_ids")

    @property
    def segments(self) -> Ids:
        """Segment ids, (B, T)."""
        return self.batch.required("segment_ids")

    @property
    def rows(self) -> Ids:
        """The row of the position table that each token takes, (B, T)."""
        return position_ids(self.config, self.real)

    @property
    def labels(self) -> Ids:
        """Labels, (B,)."""
        return self.batch.required("labels")

    @property
    def counted(self) -> Flags:
        """Which samples the loss is of, (B,)."""
        counted: Flags = self.labels != (-1 if self.config.ignore_label is None else self.config.ignore_label)
        return counted

    @property
    def real(self) -> Flags:
        """Which tokens are real, (B, T); in attention alone, which keys are visible, (B, S) or (B, Q, S)."""
        return real_tokens(self.config, self.ids) if self.batch.key_mask is None else self.batch.key_mask

    @property
    def real_queries(self) -> Flags:
        """Which queries are real, (B, Q)."""
        return real_tokens(self.config, self.ids) if self.batch.query_mask is None else self.batch.query_mask

    @property
    def visible(self) -> Flags:
        """Which keys each query sees, (B, 1 or H, 1 or Q, S)."""
        return self.visible_of(self.real)

    def visible_of(self, real: Flags) -> Flags:
        """Return the same where these tokens are real."""
        return visible_keys(self.config, real, self.config.num_heads)

    @property
    def mask_constant(self) -> float:
        """What masked scores become, or have added."""
        return mask_constant(self.config, self.dtype)

    # Steps of the specification, to be taken in some other way.

    def rows_of(self, table: str, ids: Ids) -> Array:
        """Look up rows of an embedding, (B, T, D).

        Ids beyond its ends take the last one there (SPEC EMB-1, POS-5).
        """
        count = {
            "token": self.config.vocab_size,
            "position": self.config.max_positions,
            "segment": self.config.num_segments,
        }[table]
        return self.take(self.weight(f"embeddings.{table}.weight"), self.constant(np.clip(ids, 0, count - 1)))

    def linear(self, name: str, x: Array) -> Array:
        """Return what a linear layer makes of its input, with its bias if it has one."""
        product = self.contract(operator.matmul, x, self.weight(f"{name}.weight"))
        without = not self.config.qkv_bias and name.endswith((".query", ".key", ".value"))
        return product if without else product + self.weight(f"{name}.bias")

    def projected(self) -> Array:
        """Return what the linear layer of the tap makes of its input, in the tap's shape.

        It is what comes before any activation (SPEC ATT-1, FFN-1, HED-2).
        """
        return self.reshape(self.linear(parameters_of(self.tap), self.x), tuple(self.y.shape))

    def norm(
        self,
        x: Array,
        center: Callable[[Array, Array], Array] = lambda x, mean: x - mean,
        variance: Unary = lambda variance: variance,
        deviation: Unary | None = None,
        gain: Unary = lambda gain: gain,
        offset: Unary = lambda offset: offset,
        axes: tuple[int, ...] = (-1,),
    ) -> Array:
        """Return the layer norm of the tap, with some of its steps taken in another way (SPEC NRM-2)."""
        count = math.prod([tuple(x.shape)[axis] for axis in axes])

        def total(values: Array) -> Array:
            for axis in axes:
                values = self.sum(values, axis)
            return values

        centered = center(x, total(x) / float(count))
        variance_of_row = variance(
            total(centered * centered) / float(count - (self.config.norm_variance == "unbiased"))
        )
        owner = self.owner
        normed = centered / (deviation or self.deviation)(variance_of_row)
        return normed * gain(self.weight(f"{owner}.weight")) + offset(self.weight(f"{owner}.bias"))

    @property
    def owner(self) -> str:
        """What the names of the parameters of the tap's norm begin with."""
        return norm_of(self.config.norm_sharing, self.tap)

    def deviation(self, variance: Array) -> Array:
        """Return what a norm divides by (SPEC NRM-3)."""
        epsilon = self.config.norm_epsilon
        return (
            self.sqrt(variance + epsilon)
            if self.config.norm_epsilon_placement == "inside"
            else self.sqrt(variance) + epsilon
        )

    def scores(self, q: Array | None = None, k: Array | None = None, divisor: float | None = None) -> Array:
        """Return scaled products of queries and keys, (B, H, Q, S) (SPEC ATT-4)."""
        q, k = self.beside("query") if q is None else q, self.beside("key") if k is None else k
        multiply = partial(self.einsum, "bqhk,bshk->bhqs")
        if divisor is None and self.config.score_scale == "multiply_query":
            return self.contract(multiply, q * self.config.head_dim**-0.5, k)
        return self.contract(multiply, q, k) / (
            math.sqrt(self.config.head_dim) if divisor is None else divisor
        )

    def masked(self, visible: Flags, constant: float | None = None, scores: Array | None = None) -> Array:
        """Return scores with keys hidden (SPEC MSK-3)."""
        scores = self.beside("scores") if scores is None else scores
        constant = self.mask_constant if constant is None else constant
        if self.config.mask_fill == "replace":
            return self.where(visible, scores, constant)
        return self.add_where(visible, scores, constant)

    @property
    def unnormalised(self) -> Array:
        """What the softmax is taken of, (B, H, Q, S)."""
        full = f"{self.scope}.masked_scores"
        if full in self.now or f"{self.scope}.scores" in self.now:
            return self.now.get(full, self.now.get(f"{self.scope}.scores"))
        return self.masked(self.visible)

    def softmax_by(
        self,
        exponential: Unary | None = None,
        powers: Unary = lambda powers: powers,
        total: Unary = lambda total: total,
    ) -> Array:
        """Return the weights of the tap, with some of their steps taken in another way (SPEC ATT-5)."""
        scores = self.unnormalised
        made = powers((exponential or self.exp)(scores - self.max(scores, -1)))
        return made / total(self.sum(made, -1))

    @property
    def used_weights(self) -> Array:
        """The weights that values are summed by, (B, H, Q, S)."""
        full = f"{self.scope}.masked_weights"
        return self.now[full] if full in self.now else self.beside("weights")

    def context(self, weights: Array, values: Array | None = None) -> Array:
        """Return the weighted sum of values with the heads joined, (B, Q, D) (SPEC ATT-6)."""
        multiply = partial(self.einsum, "bhqs,bshk->bqhk")
        summed = self.contract(multiply, weights, self.beside("value") if values is None else values)
        return self.reshape(summed, (*tuple(summed.shape)[:2], self.config.d_model))

    def by_heads(self, x: Array) -> Array:
        """Return features with the heads apart.

        (B, T, D), or (B, T, H, K) as it is, to (B, T, H, K) (SPEC ATT-2).
        """
        return self.reshape(x, (*tuple(x.shape)[:2], self.config.num_heads, self.config.head_dim))

    def with_heads(self, x: Array, order: Iterable[int]) -> Array:
        """Return features, (B, T, D) or (B, T, H, K), whose heads are others, in the same shape."""
        apart = self.by_heads(x)
        return self.reshape(self.concat([apart[:, :, h : h + 1] for h in order], 2), tuple(x.shape))

    def dropped(self, x: Array, each: int) -> Array:
        """Return a tensor less each of so many numbers, the others enlarged (SPEC DRP-1)."""
        shape = tuple(x.shape)
        kept = (np.arange(math.prod(shape)) % each > 0).reshape(shape) * (each / (each - 1))
        return x * self.constant(kept, x)

    def activation(self, x: Array, kind: str | None = None) -> Array:
        """Return an activation (SPEC ATT-1, FFN-2)."""
        kind = kind or self.config.activation
        if kind in ("none", "relu"):
            return self.relu(x) if kind == "relu" else x
        if kind == "gelu_erf":
            return x * 0.5 * (self.erf(x / math.sqrt(2.0)) + 1.0)
        return self.gelu_tanh(x)

    def gelu_tanh(
        self,
        x: Array,
        cubic: float = 0.044715,
        factor: float = math.sqrt(2.0 / math.pi),
        tanh: Unary | None = None,
    ) -> Array:
        """Return GELU by its approximation (SPEC FFN-2)."""
        return x * 0.5 * ((tanh or self.tanh)((x + x * x * x * cubic) * factor) + 1.0)

    def flags(self, axis: int, *entries: int) -> Flags:
        """Return which entries of an axis of the tap are among those named, to be broadcast with it.

        Negative ones count from the end.
        """
        shape = tuple(self.y.shape)
        wanted = np.isin(np.arange(shape[axis]), [entry % shape[axis] for entry in entries])
        return wanted.reshape([shape[axis] if i == axis % len(shape) else 1 for i in range(len(shape))])


Edit = Callable[[Context], Array]
"""Takes the context of a tap; returns what it is with the bug.

Where gradients flow back the context stands elsewhere: what changes one of them keeps what it needs.
"""
