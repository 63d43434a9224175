"""The model family in NumPy, in any arithmetic.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F
d_ff, C classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Ids, Mask
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import BLIND_ROWS_ZERO, Deviations
from concord.spec.leaves import Leaves
from concord.spec.masks import mask_constant, real_tokens, visible_keys
from concord.spec.parameters import Weights, trainable
from concord.spec.pooling import least_squares
from concord.spec.positions import position_ids
from concord.spec.precision import round_to_bits
from concord.spec.tape import Node, RowSums
from concord.spec.tensors import POOLED

Observer = Callable[[str, Array], None]
"""Receives taps in order, then gradients in order of the backward pass.

Gradients are named ``gradients.<name>`` and ``gradients.taps.<tap>``. Those of tables have only the used rows
(:func:`concord.spec.reference.used_rows`).
"""


Dropout = Callable[[str, tuple[int, ...]], tuple[Mask, float] | None]
"""Maps a site and its shape to the kept elements and the dropout rate, or None (SPEC DRP-2)."""


class Model:
    """One run of the model on one tape."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: Weights | Leaves,
        batch: Batch,
        dtype: str,
        arithmetic: Arithmetic,
        pinned: Mapping[str, Array],
        deviations: Deviations,
    ) -> None:
        self.config, self.batch, self.dtype, self.a = config, batch, dtype, arithmetic
        self.pinned, self.deviations = pinned, deviations
        arithmetic.narrow_bias_gradients = bool(deviations.get("narrow_bias_gradients"))
        arithmetic.blind_rows_zero = bool(deviations.get(BLIND_ROWS_ZERO))
        self.weights = weights if isinstance(weights, Leaves) else Leaves(arithmetic, weights)
        self.given = {
            n: arithmetic.leaf(x) for n, x in batch.arrays().items() if np.issubdtype(x.dtype, np.floating)
        }
        self.rows: dict[str, Ids] = {}
        self.looked_up: dict[str, Node] = {}
        self.pinned_gradients: Mapping[str, Array] = {}
        self.observer: Observer = lambda name, array: None
        self.watched: set[str] = set()
        self.slices = False
        self.dropout: Dropout = lambda site, shape: None

    def observe(self, observer: Observer, gradients: bool, part: str) -> int:
        """Report taps, and gradients on request; return the number of forward elements."""
        self.observer = observer
        self.watched = set(trainable(self.config, part)) if gradients else set()
        self.a.recording = gradients or self.a.keeping
        with np.errstate(all="ignore"):  # infinities and NaN are valid here
            loss = self.run(part)
            elements = self.a.elements
            if gradients:
                self.watch_given()
                self.a.backward(loss)
            for name in sorted(self.watched):  # zero: the loss does not depend on it
                self.observer(f"gradients.{name}", self.nothing(name))
        return elements

    def tap(self, name: str, tensor: Node) -> Node:
        """Report a tensor; return its pinned replacement, if any."""
        self.observer(name, tensor.value)
        if self.a.recording:
            tensor.completed = functools.partial(self.complete_tap, name)
        return self.a.override(tensor, self.pinned[name]) if name in self.pinned else tensor

    def complete_tap(self, name: str, tensor: Node) -> None:
        """Report a tap's gradient, and continue with its pinned replacement, if any."""
        if name == "loss":
            return
        assert tensor.gradient is not None
        self.observer(f"gradients.taps.{name}", tensor.gradient)
        # Each step of the backward pass is judged locally, from the run's own gradient (decision 0016).
        if name in self.pinned_gradients:
            tensor.gradient = self.a.given_gradient(self.pinned_gradients[name])

    def complete(self, name: str, tensor: Node) -> None:
        """Report the gradient of a parameter or input."""
        assert tensor.gradient is not None
        if name in self.watched:
            self.watched.remove(name)
            self.observer(f"gradients.{name}", tensor.gradient)
        # A large model's gradients would fill the memory, so sigma is accumulated as they arrive (decision
        # 0016).
        if not self.a.keeping:
            tensor.gradient = None

    def watch_given(self) -> None:
        """Register the parameters and inputs whose gradients are reported."""
        input_leaves = {f"inputs.{name}": leaf for name, leaf in self.given.items()}
        for name, leaf in {**self.weights, **self.looked_up, **input_leaves}.items():
            leaf.completed = functools.partial(self.complete, name)

    def nothing(self, name: str) -> Array:
        """Zero gradient of a tensor that the loss does not depend on."""
        input_name = name.removeprefix("inputs.")
        leaf = self.given[input_name] if input_name != name else self.looked_up.get(name, self.weights[name])
        return np.zeros_like(leaf.value)

    def full(self, name: str, gradient: Array) -> Array:
        """A table's gradient with all rows."""
        if name not in self.rows:
            return gradient
        table = np.zeros((*gradient.shape[: self.a.lead], *self.weights.shape(name)), gradient.dtype)
        table[..., self.rows[name], :] = gradient
        return table

    def active(self, name: str) -> Mask | None:
        """Where a ReLU had slope 1, according to its pinned result."""
        # The input may be zero up to rounding; only the result shows which side the run took.
        return self.pinned[name] > 0 if name in self.pinned else None

    def held(self, constant: float, deviation: str) -> float:
        """Round a constant to the backend's declared bits."""
        bits = self.deviations.get(deviation)
        return constant if bits is None else float(round_to_bits(np.asarray(constant), int(bits)))

    def run(self, part: str) -> Node:
        """Loss of a part (SPEC PRT-1)."""
        if part in ("attention", "dot_product"):
            attend = self.attention if part == "attention" else self.dot_product
            query, key, value = (self.given[name] for name in ("query", "key", "value"))
            return self.cotangent_loss(
                attend("attention", query, key, value, self.batch.key_mask, self.batch.query_mask)
            )
        real = real_tokens(self.config, self.batch.required("input_ids"))
        x = self.given["embeddings"] if part == "stack" else self.drop("embeddings", self.embeddings(real))
        for i in range(self.config.num_layers):
            x = self.layer(f"layers.{i}", x, real)
        if self.config.final_norm:
            x = self.tap("final_norm", self.norm("final_norm", x))
        if part not in POOLED:
            return self.cotangent_loss(x)
        pooled = self.pooled(x, real)
        return (
            self.classification_loss(self.logits(pooled)) if part == "model" else self.cotangent_loss(pooled)
        )

    # Embeddings (EMB-1 to EMB-6, POS-5).

    def embeddings(self, real: Mask) -> Node:
        """Input of the first layer: (B, T, D)."""
        config, ids = self.config, self.batch.required("input_ids")
        token = self.lookup("embeddings.token.weight", ids, config.token_padding_row)
        if config.token_padding_forward == "zero":
            token = self.a.replace(token, (ids != config.token_padding_row)[..., None], 0.0)
        if config.embedding_scale == "sqrt_d_model":
            token = self.a.scale(token, math.sqrt(config.d_model))
        token = self.tap("embeddings.token", token)
        position = self.tap(
            "embeddings.position",
            self.lookup(
                "embeddings.position.weight", position_ids(config, real), config.position_padding_row
            ),
        )
        total = self.a.add(token, position)
        if config.num_segments:
            segment = self.lookup(
                "embeddings.segment.weight", self.batch.required("segment_ids"), config.segment_padding_row
            )
            total = self.a.add(total, self.tap("embeddings.segment", segment))
        total = self.tap("embeddings.sum", total)
        return (
            self.tap("embeddings.norm", self.norm("embeddings.norm", total))
            if config.embedding_norm
            else total
        )

    def drop(self, site: str, x: Node) -> Node:
        """Drop elements and scale up the others (SPEC DRP-2)."""
        dropped = self.dropout(site, x.shape)
        if dropped is None:
            return x
        keep, rate = dropped
        return self.a.scale(self.a.replace(x, keep, 0.0), 1 / (1 - rate))

    def lookup(self, table: str, ids: Ids, padding_row: int | None) -> Node:
        """Look up rows of a table: (B, T) to (B, T, D)."""
        # Only the used rows go on the tape: the others have no gradient (decision 0016).
        self.rows[table], places = np.unique(ids, return_inverse=True)
        used = self.looked_up[table] = self.weights.rows(table, self.rows[table])
        vectors = self.a.take(used, places.reshape(ids.shape))  # (B, T, D)
        if self.slices:
            vectors.completed = lambda node: self.observer(
                f"gradients.slices.{table}", np.asarray(node.gradient)
            )
            # A separate node, since a tap sets its own callback as ``completed``.
            vectors = self.a.reshape(vectors, vectors.shape)
        return vectors if padding_row is None else self.a.freeze(vectors, (ids == padding_row)[..., None])

    # The encoder layer (NRM-1, RES-1, FFN-1).

    def layer(self, name: str, x: Node, real: Mask) -> Node:
        """Apply an encoder layer: (B, T, D)."""
        x = self.sublayer(
            name,
            1,
            x,
            lambda h: self.drop(
                f"{name}.attention", self.attention(f"{name}.attention", h, h, h, real, real)
            ),
        )
        x = self.sublayer(
            name,
            2,
            x,
            lambda h: self.drop(f"{name}.feed_forward", self.feed_forward(f"{name}.feed_forward", h)),
        )
        return self.drop(f"{name}.output", x)

    def sublayer(self, name: str, number: int, x: Node, function: Callable[[Node], Node]) -> Node:
        """Apply a sublayer with residual and norm: (B, T, D)."""
        # A shared norm has one pair of parameters and two taps (SPEC NRM-5).
        norm = f"{name}.norm" if self.config.norm_sharing == "shared" else f"{name}.norm{number}"

        def normed(y: Node) -> Node:
            return self.tap(f"{name}.norm{number}", self.norm(norm, y))

        if self.config.norm_placement == "pre":
            return self.tap(f"{name}.residual{number}", self.a.add(x, function(normed(x))))
        return normed(self.tap(f"{name}.residual{number}", self.a.add(x, function(x))))

    def norm(self, name: str, x: Node) -> Node:
        """Layer norm over D (SPEC NRM-2 to NRM-4)."""
        config, a = self.config, self.a
        mean = a.divide_by(a.sum(x, -1), config.d_model)
        centered = a.center(x, mean)
        # The derivative's closed form assumes that differences from the mean sum to zero, whatever their
        # rounding (SPEC ALG-5).
        differences = a.center(x, a.freeze(mean, np.ones(mean.shape, bool))) if a.closed else centered
        squares, count = (
            a.sum(a.multiply(differences, differences), -1),
            config.d_model - (config.norm_variance == "unbiased"),
        )
        variance = a.vary_variance(a.divide_by(squares, count), mean, centered)  # (B, T, 1)
        epsilon = self.held(config.norm_epsilon, "norm_epsilon_bits")
        deviation = (
            a.sqrt(a.shift(variance, epsilon))
            if config.norm_epsilon_placement == "inside"
            else a.shift(a.sqrt(variance), epsilon)
        )
        return a.add(
            a.multiply(a.divide(centered, deviation), self.weights[f"{name}.weight"]),
            self.weights[f"{name}.bias"],
        )

    def linear(self, name: str, x: Node) -> Node:
        """Return x W + b over the last axis (SPEC WGT-2)."""
        rows = self.a.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        y = (
            self.a.einsum("ni,io->no", rows, weight)
            if bias is None
            else self.a.affine("ni,io->no", rows, weight, bias)
        )
        return self.a.reshape(y, (*x.shape[:-1], y.shape[-1]))

    def feed_forward(self, name: str, x: Node) -> Node:
        """Apply the feed-forward sublayer: (B, T, D)."""
        inner = self.tap(f"{name}.inner", self.linear(f"{name}.inner", x))  # (B, T, F)
        active = self.tap(f"{name}.activation", self.activation(inner, self.active(f"{name}.activation")))
        return self.tap(
            f"{name}.outer", self.linear(f"{name}.outer", self.drop(f"{name}.activation", active))
        )  # (B, T, D)

    def activation(self, x: Node, active: Mask | None) -> Node:
        """Apply the feed-forward activation (SPEC FFN-2)."""
        a = self.a
        if self.config.activation == "relu":
            return a.relu(x, active)
        if self.config.activation == "gelu_erf":
            # A declared deviation multiplies by a rounded sqrt(1/2) instead of dividing by sqrt(2).
            half = self.held(math.sqrt(0.5), "gelu_constant_bits")
            inner = a.erf(a.divide_by(x, math.sqrt(2)) if half == math.sqrt(0.5) else a.scale(x, half))
        else:
            cubic = a.scale(a.multiply(a.multiply(x, x), x), self.held(0.044715, "gelu_constant_bits"))
            inner = a.tanh(a.scale(a.add(x, cubic), math.sqrt(2 / math.pi)), absolute=True)
        return a.multiply(a.scale(x, 0.5), a.shift(inner, 1.0))

    # Attention (ATT-1 to ATT-7, MSK-3 to MSK-8).

    def attention(
        self, name: str, query: Node, key: Node, value: Node, key_mask: Mask | None, query_mask: Mask | None
    ) -> Node:
        """Apply attention with its projections: (B, Q, D)."""
        q, k, v = (
            self.tap(f"{name}.{role}", self.project(f"{name}.{role}", x))
            for role, x in (("query", query), ("key", key), ("value", value))
        )
        context = self.dot_product(name, q, k, v, key_mask, query_mask)
        return (
            self.tap(f"{name}.output", self.linear(f"{name}.output", context))
            if self.config.output_projection
            else context
        )

    def project(self, name: str, x: Node) -> Node:
        """Queries, keys or values by head: (B, T, H, K)."""
        y = self.linear(name, x)
        if self.config.qkv_activation == "relu":
            y = self.a.relu(y, self.active(name))
        return self.a.reshape(y, (*y.shape[:2], self.config.num_heads, self.config.head_dim))  # (B, T, H, K)

    def dot_product(
        self, name: str, q: Node, k: Node, v: Node, key_mask: Mask | None, query_mask: Mask | None
    ) -> Node:
        """Attend, all heads at once (SPEC ATT-7): q (B, Q, H, K), k and v (B, S, H, K) to (B, Q, D)."""
        config, a = self.config, self.a
        scores = self.tap(f"{name}.scores", self.scores(q, k))
        constant = mask_constant(config, self.dtype)
        visible = None if key_mask is None else visible_keys(config, key_mask, q.shape[2])
        sums: RowSums | None = RowSums()
        if visible is not None:
            if config.mask_fill == "replace":
                scores = a.replace(scores, visible, constant)
            else:
                scores = a.add_where(scores, visible, constant, rounded=self.dtype)
            scores = self.tap(f"{name}.masked_scores", scores)
        weights = self.tap(f"{name}.weights", a.softmax(scores, self.softmax_floor(key_mask), sums))
        if config.query_mask == "overwrite" and query_mask is not None:
            weights = self.tap(
                f"{name}.masked_weights", a.replace(weights, query_mask[:, None, :, None], constant)
            )
            # Overwritten weights no longer sum to 1, so the row sums do not apply.
            sums = None
        context = a.attend(self.drop(f"{name}.weights", weights), v, sums)
        return self.tap(
            f"{name}.context", a.reshape(context, (*context.shape[:2], context.shape[2] * context.shape[3]))
        )

    def softmax_floor(self, key_mask: Mask | None) -> float | Array | None:
        """Declared lower bound of shifted scores, for all keys or (B, 1, 1, S)."""
        floor = self.deviations.get("softmax_floor")
        if floor is None or key_mask is None or not self.deviations.get("padding_left_out"):
            return floor
        # Keys that a kernel skips get no weight, so they have no bound; it always keeps the first key of each
        # sample.
        keys = key_mask | (np.arange(key_mask.shape[-1]) == 0)  # (B, S)
        return np.where(keys, floor, -np.inf)[:, None, None, :]

    def scores(self, q: Node, k: Node) -> Node:
        """Scaled products of queries and keys: (B, H, Q, S)."""
        root = math.sqrt(q.shape[-1])
        if self.config.score_scale == "multiply_query":
            q = self.a.scale(q, 1 / root)
        scores = self.a.einsum("bqhk,bshk->bhqs", q, k)
        return self.a.divide_by(scores, root) if self.config.score_scale == "divide_scores" else scores

    # Head and loss (HED-1 to HED-5, LOS-1 to LOS-5).

    def pooled(self, x: Node, real: Mask) -> Node:
        """The vector of each text: (B, D), or (B, T * D)."""
        if self.config.pooling == "flatten":
            pooled = self.a.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))  # (B, T * D)
        elif self.config.pooling == "mean":
            pooled = self.mean_of_real(x, real)
        else:
            pooled = self.a.index(x, (slice(None), 0))  # (B, D)
        pooled = self.tap("pooling", pooled)
        if self.config.pooler != "none":
            dense = self.tap("pooler.dense", self.linear("pooler", pooled))
            pooled = self.tap(
                "pooler.output",
                self.a.tanh(dense)
                if self.config.pooler == "tanh"
                else self.a.relu(dense, self.active("pooler.output")),
            )
        return (
            pooled if self.config.length_epsilon is None else self.tap("normalized", self.normalized(pooled))
        )

    def mean_of_real(self, x: Node, real: Mask) -> Node:
        """Mean of the real tokens, or zero: (B, T, D) to (B, D)."""
        total = self.a.sum(self.a.replace(x, real[..., None], 0.0), -2)  # (B, 1, D)
        # A text of only padding has the mean 0, not 0/0 (SPEC HED-1).
        count = self.a.leaf(np.maximum(real.sum(1), 1)[:, None].astype(np.float64))
        return self.a.divide(self.a.reshape(total, (x.shape[0], x.shape[2])), count)

    def normalized(self, x: Node) -> Node:
        """Divide vectors by their length, at least epsilon: (B, D)."""
        squares = self.a.sum(self.a.multiply(x, x), -1)  # (B, 1)
        # Compared before taking the root, whose derivative at a zero vector is infinite.
        least = self.a.leaf(np.full(squares.shape, least_squares(self.config, self.dtype)))
        return self.a.divide(x, self.a.sqrt(self.a.larger(squares, least)))

    def logits(self, pooled: Node) -> Node:
        """The logits: (B, C)."""
        return self.tap("logits", self.linear("classifier", self.drop("head", pooled)))

    def classification_loss(self, logits: Node) -> Node:
        """Mean cross-entropy plus the classifier's L2 term (SPEC LOS-1 to LOS-4)."""
        config, a, labels = self.config, self.a, self.batch.required("labels")
        if config.num_classes == 1:
            losses = a.reshape(
                a.sigmoid_cross_entropy(logits, labels[:, None].astype(logits.value.dtype)), labels.shape
            )
        else:
            log_probabilities = self.tap(
                "log_probabilities", a.log_softmax(logits, self.deviations.get("log_softmax_floor"))
            )
            losses = a.scale(a.index(log_probabilities, (np.arange(len(labels)), labels)), -1.0)
        losses = self.tap("losses", losses)  # (B,)
        mask = (
            labels != config.ignore_label if config.ignore_label is not None else np.ones(len(labels), bool)
        )
        loss = a.divide_by(a.sum(a.replace(losses, mask, 0.0)), float(mask.sum()))
        if config.l2_weight:
            for name in ("classifier.weight", "classifier.bias"):
                square = a.multiply(self.weights[name], self.weights[name])
                loss = a.add(loss, a.scale(a.sum(square), 0.5 * config.l2_weight))
        return self.tap("loss", loss)

    def cotangent_loss(self, output: Node) -> Node:
        """The loss sum(output * cotangent) (SPEC LOS-5)."""
        return self.tap("loss", self.a.sum(self.a.multiply(output, self.given["cotangent"])))
