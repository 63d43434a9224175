"""The context of a tap's edit, for the frameworks and NumPy, so that bugs are written only once.

Its array operations have identical names in all four frameworks and on the tape. Operators, comparisons,
``~`` and ``&`` of masks, slices, ``None`` and ``.shape`` work everywhere.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, F d_ff, C classes.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Ids
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constant, real_tokens, visible_keys
from concord.spec.positions import position_ids
from concord.spec.tensors import source_of

Array = Any
"""A tensor of the framework or tape."""

SIGNIFICANT_BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}
"""Significant bits of each number format, the leading one included."""

Unary = Callable[[Array], Array]

Flags = NDArray[np.bool_]
Contraction = Callable[[Callable[[Array, Array], Array], Array, Array], Array]
"""Contracts two tensors; takes the contraction and both tensors."""


class TensorOperations(ABC):
    """The operations that bugs use.

    Attributes:
        stop_gradient: returns the same values; no gradient flows back.
    """

    dtype: str
    einsum: Callable[[str, Array, Array], Array]
    sqrt: Unary
    exp: Unary
    log: Unary
    tanh: Unary
    erf: Unary
    sigmoid: Unary
    relu: Unary
    softmax: Callable[[Array, int], Array]
    log_softmax: Callable[[Array, int], Array]
    reshape: Callable[[Array, Sequence[int]], Array]
    transpose: Callable[[Array, Sequence[int]], Array]
    concat: Callable[[Sequence[Array], int], Array]
    stop_gradient: Unary

    @abstractmethod
    def sum(self, x: Array, axis: int | None = None) -> Array:
        """Sum over an axis, kept with size 1, or over all."""

    @abstractmethod
    def max(self, x: Array, axis: int) -> Array:
        """The maximum along an axis, kept with size 1."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """Choose between two tensors, or a tensor and a constant; the condition may be a NumPy array."""

    def take(self, table: Array, ids: Array) -> Array:
        """Look up rows: (…) to (…, D)."""
        return table[ids]

    @abstractmethod
    def constant(self, values: NDArray[Any], like: Array | None = None) -> Array:
        """Convert an array to a tensor, in the precision of ``like`` if given."""

    @abstractmethod
    def with_gradient(self, x: Array, function: Unary) -> Array:
        """Keep the values, and apply a function to the gradient that flows back."""

    # Derived operations.

    def mean(self, x: Array, axis: int) -> Array:
        return self.sum(x, axis) / float(tuple(x.shape)[axis])

    def within(self, x: Array, low: float, high: float) -> Array:
        """Clamp values; no gradient flows to values beyond a limit."""
        raised = self.where(x < low, x * 0.0 + low, x)
        return self.where(raised > high, raised * 0.0 + high, raised)

    def abs(self, x: Array) -> Array:
        return self.where(x > 0.0, x, -x)

    def add_where(self, visible: Flags, x: Array, constant: float) -> Array:
        """Add a constant wherever a flag is False (SPEC MSK-5)."""
        return self.where(visible, x, x + constant)

    def squeeze(self, x: Array) -> Array:
        return self.reshape(x, [size for size in tuple(x.shape) if size != 1])

    def value_of(self, value: Array, surrogate: Array) -> Array:
        """Return one tensor's values with another's gradient, unrounded."""
        return self.stop_gradient(value) + (surrogate - self.stop_gradient(surrogate))

    def with_zero_gradient_to(self, wrong: Array, right: Array) -> Array:
        """Return ``wrong``, with a zero gradient to ``right``.

        Some frameworks cannot differentiate with respect to unused tensors.
        """
        shape = tuple(right.shape)
        return self.where(np.zeros(shape, bool), right, wrong) if shape == tuple(wrong.shape) else wrong

    def round_to(self, x: Array, number_format: str) -> Array:
        """Round to a shorter format, ignoring its range; the gradient is unchanged."""
        return x + self.stop_gradient(self.rounded(x, number_format) - x)

    def cut_to(self, x: Array, number_format: str) -> Array:
        """Truncate to a shorter format, ignoring its range; the gradient is unchanged."""
        return x + self.stop_gradient(self.cut_off(x, number_format) - x)

    def cut_off(self, x: Array, number_format: str) -> Array:
        """Truncate to a shorter format, ignoring its range."""
        # Where rounding went away from zero, take the preceding value. It is nearest to the value reduced by
        # 1.25 units of 2^-bits, at any place in its binade.
        nearest = self.rounded(x, number_format)
        before = self.rounded(nearest * (1.0 - 1.25 * 2.0 ** -SIGNIFICANT_BITS[number_format]), number_format)
        return self.where(
            (nearest > x) & (x > 0.0), before, self.where((nearest < x) & (x < 0.0), before, nearest)
        )

    def rounded(self, x: Array, number_format: str) -> Array:
        """Round to a shorter format, ignoring its range, with Dekker and Veltkamp's splitting."""
        cut = {"float64": 53, "float32": 24}[self.dtype] - SIGNIFICANT_BITS[number_format]
        if cut <= 0:
            return x
        swollen = x * float(2**cut + 1)
        return swollen - (swollen - x)


def directly(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    return multiply(a, b)


def parameters_of(tap: str) -> str:
    """Prefix of a linear layer's parameter names."""
    return {"pooler.dense": "pooler", "logits": "classifier"}.get(tap, tap)


def norm_of(sharing: str, tap: str) -> str:
    """Prefix of a norm's parameter names."""
    return tap[:-1] if sharing == "shared" and tap.startswith("layers.") else tap


class Context(TensorOperations):
    """A run of the model, at one tap.

    Args:
        now: preceding taps as later steps see them, ``inputs.<name>``, and parameters in canonical names and
            layouts.

    Attributes:
        y: its correct value.
        contract: the function that computes products.
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

    # Location.

    @property
    def scope(self) -> str:
        """Submodule of the tap, such as ``layers.0.attention``."""
        return self.tap.rpartition(".")[0]

    @property
    def layer(self) -> int:
        return int(self.tap.split(".")[1])

    def size(self, **powers: float) -> float:
        """Product of powers of configuration sizes."""
        return math.prod(float(getattr(self.config, name) ** power) for name, power in powers.items())

    def weight(self, name: str) -> Array:
        return self.now[name]

    def beside(self, name: str) -> Array:
        """Another tap of the same submodule, even an input or one hidden in a fused kernel."""
        full = f"{self.scope}.{name}"
        if full not in self.now and name in ("scores", "weights"):
            return self.scores() if name == "scores" else self.softmax(self.unnormalised, 3)
        return self.now[full] if full in self.now else self.now[f"inputs.{name}"]

    def source(self, which: str = "", of: str = "") -> Array:
        """Input of the tap's step, or of another tap's; ``"result"`` selects a residual's sublayer."""
        return self.now[source_of(self.config, of or self.tap, self.part, which)]

    @property
    def x(self) -> Array:
        return self.source()

    # Contents of the batch, as NumPy arrays.

    @property
    def ids(self) -> Ids:
        """Token ids, (B, T)."""
        return self.batch.required("input_ids")

    @property
    def segments(self) -> Ids:
        return self.batch.required("segment_ids")

    @property
    def rows(self) -> Ids:
        """Row of the position table for each token, (B, T)."""
        return position_ids(self.config, self.real)

    @property
    def labels(self) -> Ids:
        """Labels, (B,)."""
        return self.batch.required("labels")

    @property
    def counted(self) -> Flags:
        """Samples whose loss counts, (B,)."""
        flags: Flags = self.labels != (-1 if self.config.ignore_label is None else self.config.ignore_label)
        return flags

    @property
    def real(self) -> Flags:
        """Real tokens, (B, T); in separate attention, visible keys, (B, S) or (B, Q, S)."""
        return real_tokens(self.config, self.ids) if self.batch.key_mask is None else self.batch.key_mask

    @property
    def real_queries(self) -> Flags:
        """Real queries, (B, Q)."""
        return real_tokens(self.config, self.ids) if self.batch.query_mask is None else self.batch.query_mask

    @property
    def visible(self) -> Flags:
        """Keys visible to each query, (B, 1 or H, 1 or Q, S)."""
        return self.visible_of(self.real)

    def visible_of(self, real: Flags) -> Flags:
        return visible_keys(self.config, real, self.config.num_heads)

    @property
    def mask_constant(self) -> float:
        return mask_constant(self.config, self.dtype)

    # Steps of the specification that a bug may replace.

    def rows_of(self, table: str, ids: Ids) -> Array:
        """Look up rows of an embedding, (B, T, D); ids out of range are clamped (SPEC EMB-1, POS-5)."""
        count = {
            "token": self.config.vocab_size,
            "position": self.config.max_positions,
            "segment": self.config.num_segments,
        }[table]
        return self.take(self.weight(f"embeddings.{table}.weight"), self.constant(np.clip(ids, 0, count - 1)))

    def linear(self, name: str, x: Array) -> Array:
        product = self.contract(operator.matmul, x, self.weight(f"{name}.weight"))
        without = not self.config.qkv_bias and name.endswith((".query", ".key", ".value"))
        return product if without else product + self.weight(f"{name}.bias")

    def projected(self) -> Array:
        """Apply the tap's linear layer, without activation, in the tap's shape (SPEC ATT-1, FFN-1, HED-2)."""
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
        """The tap's layer norm; each argument replaces one step (SPEC NRM-2)."""
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
        """Prefix of parameter names of the tap's norm."""
        return norm_of(self.config.norm_sharing, self.tap)

    def deviation(self, variance: Array) -> Array:
        """A norm's divisor (SPEC NRM-3)."""
        epsilon = self.config.norm_epsilon
        return (
            self.sqrt(variance + epsilon)
            if self.config.norm_epsilon_placement == "inside"
            else self.sqrt(variance) + epsilon
        )

    def scores(self, q: Array | None = None, k: Array | None = None, divisor: float | None = None) -> Array:
        """Scaled products of queries and keys, (B, H, Q, S) (SPEC ATT-4)."""
        q, k = self.beside("query") if q is None else q, self.beside("key") if k is None else k
        multiply = partial(self.einsum, "bqhk,bshk->bhqs")
        if divisor is None and self.config.score_scale == "multiply_query":
            return self.contract(multiply, q * self.config.head_dim**-0.5, k)
        return self.contract(multiply, q, k) / (
            math.sqrt(self.config.head_dim) if divisor is None else divisor
        )

    def masked(self, visible: Flags, constant: float | None = None, scores: Array | None = None) -> Array:
        """Scores with keys hidden (SPEC MSK-3)."""
        scores = self.beside("scores") if scores is None else scores
        constant = self.mask_constant if constant is None else constant
        if self.config.mask_fill == "replace":
            return self.where(visible, scores, constant)
        return self.add_where(visible, scores, constant)

    @property
    def unnormalised(self) -> Array:
        """Input of the softmax, (B, H, Q, S)."""
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
        """The softmax; each argument replaces one step (SPEC ATT-5)."""
        scores = self.unnormalised
        exponentials = powers((exponential or self.exp)(scores - self.max(scores, -1)))
        return exponentials / total(self.sum(exponentials, -1))

    @property
    def used_weights(self) -> Array:
        """Weights for the sum of values, (B, H, Q, S)."""
        full = f"{self.scope}.masked_weights"
        return self.now[full] if full in self.now else self.beside("weights")

    def context(self, weights: Array, values: Array | None = None) -> Array:
        """Weighted sum of values with joined heads, (B, Q, D) (SPEC ATT-6)."""
        multiply = partial(self.einsum, "bhqs,bshk->bqhk")
        summed = self.contract(multiply, weights, self.beside("value") if values is None else values)
        return self.reshape(summed, (*tuple(summed.shape)[:2], self.config.d_model))

    def by_heads(self, x: Array) -> Array:
        """Split features, (B, T, D) or (B, T, H, K), into heads, (B, T, H, K) (SPEC ATT-2)."""
        return self.reshape(x, (*tuple(x.shape)[:2], self.config.num_heads, self.config.head_dim))

    def with_heads(self, x: Array, order: Iterable[int]) -> Array:
        heads = self.by_heads(x)
        return self.reshape(self.concat([heads[:, :, h : h + 1] for h in order], 2), tuple(x.shape))

    def dropped(self, x: Array, each: int) -> Array:
        """Drop every ``each``-th element, and scale up the others (SPEC DRP-1)."""
        shape = tuple(x.shape)
        factors = (np.arange(math.prod(shape)) % each > 0).reshape(shape) * (each / (each - 1))
        return x * self.constant(factors, x)

    def activation(self, x: Array, kind: str | None = None) -> Array:
        """Apply an activation (SPEC ATT-1, FFN-2)."""
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
        """Tanh approximation of GELU (SPEC FFN-2)."""
        return x * 0.5 * ((tanh or self.tanh)((x + x * x * x * cubic) * factor) + 1.0)

    def flags(self, axis: int, *entries: int) -> Flags:
        """Flag entries of an axis, in a broadcastable shape; negative indices count from the end."""
        shape = tuple(self.y.shape)
        selection = np.isin(np.arange(shape[axis]), [entry % shape[axis] for entry in entries])
        return selection.reshape([shape[axis] if i == axis % len(shape) else 1 for i in range(len(shape))])


Edit = Callable[[Context], Array]
"""Takes the context of a tap and returns its value with the bug.

The context moves on before gradients flow back, so an edit of a gradient keeps the values that it needs.
"""

Edits = Mapping[str, Any]
"""Edits by name of their bug; each takes the context of a tap, or the arguments of a training place."""


def only(there: Callable[[Context], bool], edit: Edit) -> Edit:
    return lambda m: edit(m) if there(m) else m.y


def in_last_layer(edit: Edit) -> Edit:
    return only(lambda m: m.layer == m.config.num_layers - 1, edit)
