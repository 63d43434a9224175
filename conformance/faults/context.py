"""What an edit of a tap sees: the operations, the taps before it, parameters, ids and masks.

The same object serves the frameworks and the NumPy arithmetic, so that a fault is written once.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim, F d_ff, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.faults.operations import Array, Operations
from spec.batch import Batch
from spec.config import EncoderConfig
from spec.masks import mask_constant, real_tokens, visible_keys
from spec.tensors import source_of

Flags = NDArray[np.bool_]


class Context:
    """One run of the model, at one tap.

    Args:
        operations: of the framework, or of the tape.
        config, batch, part, dtype: what is computed.
        parameters: gives a parameter by its canonical name, in the canonical layout.
        now: each tap before this one as the model goes on with it, and ``inputs.<name>`` for given tensors.
        memory: what edits of earlier runs left for later ones in the same process.

    Attributes:
        tap: the name of the tap that is edited.
    """

    def __init__(
        self,
        operations: Operations,
        config: EncoderConfig,
        batch: Batch,
        part: str,
        dtype: str,
        parameters: Callable[[str], Array],
        now: Mapping[str, Array],
        memory: dict[str, Any] | None = None,
    ) -> None:
        self.o, self.config, self.batch, self.part, self.dtype = operations, config, batch, part, dtype
        self.parameters, self.now = parameters, now
        self.memory: dict[str, Any] = {} if memory is None else memory
        self.tap = ""

    # Where it stands.

    @property
    def scope(self) -> str:
        """The submodule that computed the tap, such as ``layers.0.attention``."""
        return self.tap.rpartition(".")[0]

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return int(self.tap.split(".")[1])

    def weight(self, name: str) -> Array:
        """Return a parameter by its canonical name, in the canonical layout."""
        return self.parameters(name)

    def beside(self, name: str) -> Array:
        """Return another tap of the same submodule; what would be one may have been given, or stay inside a fused kernel."""
        full = f"{self.scope}.{name}"
        if full not in self.now and name in ("scores", "weights"):
            return self.scores() if name == "scores" else self.o.softmax(self.unnormalised, 3)
        return self.now[full] if full in self.now else self.now[f"inputs.{name}"]

    def source(self, which: str = "") -> Array:
        """Return what went into the step: for a residual what stands beside the sublayer, or its ``"result"``."""
        return self.now[source_of(self.config, self.tap, self.part, which)]

    # What the batch says, as NumPy arrays.

    @property
    def ids(self) -> NDArray[np.int64]:
        """Token ids, (B, T)."""
        return self.batch.required("input_ids")

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
        return visible_keys(self.config, self.real, self.config.num_heads)

    @property
    def constant(self) -> float:
        """What masked scores become, or have added."""
        return mask_constant(self.config, self.dtype)

    # Steps of the specification, to be taken in some other way.

    def linear(self, name: str, x: Array) -> Array:
        """Return what a linear layer makes of its input."""
        return self.biased(name, x @ self.weight(f"{name}.weight"))

    def biased(self, name: str, x: Array) -> Array:
        """Add the bias of a linear layer, if it has one."""
        without = not self.config.qkv_bias and name.endswith((".query", ".key", ".value"))
        return x if without else x + self.weight(f"{name}.bias")

    def norm(
        self,
        x: Array,
        center: Callable[[Array, Array], Array] = lambda x, mean: x - mean,
        variance: Callable[[Array], Array] = lambda variance: variance,
        deviation: Callable[[Array], Array] | None = None,
        gain: Callable[[Array], Array] = lambda gain: gain,
        offset: Callable[[Array], Array] = lambda offset: offset,
        axes: tuple[int, ...] = (-1,),
    ) -> Array:
        """Return the layer norm of the tap, with some of its steps taken in another way (SPEC NRM-2)."""
        count = math.prod(tuple(x.shape)[axis] for axis in axes)

        def total(values: Array) -> Array:
            for axis in axes:
                values = self.o.sum(values, axis)
            return values

        centered = center(x, total(x) / float(count))
        spread = variance(total(centered * centered) / float(count - (self.config.norm_variance == "unbiased")))
        owner = self.owner
        normed = centered / (deviation or self.deviation)(spread)
        return normed * gain(self.weight(f"{owner}.weight")) + offset(self.weight(f"{owner}.bias"))

    @property
    def owner(self) -> str:
        """What the names of the parameters of the tap's norm begin with."""
        return self.tap[:-1] if self.config.norm_sharing == "shared" and self.tap.startswith("layers.") else self.tap

    def deviation(self, variance: Array) -> Array:
        """Return what a norm divides by (SPEC NRM-3)."""
        epsilon = self.config.norm_epsilon
        return self.o.sqrt(variance + epsilon) if self.config.norm_epsilon_placement == "inside" else self.o.sqrt(variance) + epsilon

    def scores(self, q: Array | None = None, k: Array | None = None, divisor: float | None = None) -> Array:
        """Return scaled products of queries and keys, (B, H, Q, S) (SPEC ATT-4)."""
        q, k = self.beside("query") if q is None else q, self.beside("key") if k is None else k
        return self.o.einsum("bqhk,bshk->bhqs", q, k) / (math.sqrt(self.config.head_dim) if divisor is None else divisor)

    def masked(self, visible: Flags, constant: float | None = None, scores: Array | None = None) -> Array:
        """Return scores with keys hidden (SPEC MSK-3)."""
        scores = self.beside("scores") if scores is None else scores
        constant = self.constant if constant is None else constant
        return self.o.where(visible, scores, constant if self.config.mask_fill == "replace" else scores + constant)

    @property
    def unnormalised(self) -> Array:
        """What the softmax is taken of, (B, H, Q, S)."""
        full = f"{self.scope}.masked_scores"
        if full in self.now or f"{self.scope}.scores" in self.now:
            return self.now.get(full, self.now.get(f"{self.scope}.scores"))
        return self.masked(self.visible)

    @property
    def used_weights(self) -> Array:
        """The weights that values are summed by, (B, H, Q, S)."""
        full = f"{self.scope}.masked_weights"
        return self.now[full] if full in self.now else self.beside("weights")

    def context(self, weights: Array, values: Array | None = None) -> Array:
        """Return the weighted sum of values with the heads joined, (B, Q, D) (SPEC ATT-6)."""
        summed = self.o.einsum("bhqs,bshk->bqhk", weights, self.beside("value") if values is None else values)
        return self.o.reshape(summed, (*tuple(summed.shape)[:2], self.config.d_model))

    def activation(self, x: Array, kind: str | None = None) -> Array:
        """Return an activation (SPEC FFN-2)."""
        kind = kind or self.config.activation
        if kind == "relu":
            return self.o.relu(x)
        if kind == "gelu_erf":
            return x * 0.5 * (self.o.erf(x / math.sqrt(2.0)) + 1.0)
        return x * 0.5 * (self.o.tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)

    # Where something differs: NumPy flags that can be broadcast with the tap.

    def flags(self, y: Array, axis: int, *entries: int) -> Flags:
        """Return which entries of an axis are among those named; negative ones count from the end."""
        shape = tuple(y.shape)
        wanted = np.isin(np.arange(shape[axis]), [entry % shape[axis] for entry in entries])
        return wanted.reshape([shape[axis] if i == axis % len(shape) else 1 for i in range(len(shape))])


Edit = Callable[[Context, Array], Array]
"""Takes the context and what a tap rightly is; returns what it is with the fault."""
