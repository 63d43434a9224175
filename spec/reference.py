"""The reference: the whole model family, forward and gradients, in NumPy.

Shapes: B batch, T tokens, Q queries, S keys (Q = S = T inside the encoder), D d_model, H heads, K head_dim, F d_ff,
C classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from concord.spec.arithmetic import Arithmetic, Leaves
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.masks import mask_constant, real_tokens, visible_keys
from concord.spec.parameters import Weights, trainable, validate_weights
from concord.spec.positions import position_ids
from concord.spec.precision import round_to_bits
from concord.spec.tape import RowSums, Tensor
from concord.spec.tensors import output_name

Array = NDArray[np.floating]
Mask = NDArray[np.bool_] | None


@dataclass
class Truth:
    """What the reference computed.

    Attributes:
        output: the result of the part: logits (B, C), or (B, T, D), or (B, Q, D).
        loss: scalar (SPEC LOS-1 to LOS-5).
        taps: every intermediate tensor by name, in the order of computation.
        gradients: of the loss, for each trainable parameter, and ``inputs.<name>`` for given tensors, in the order in which the
            backward pass completes them.
        tap_gradients: of the loss, for each tap that it depends on, in the same order.
        backward: names of all gradients in that order, ``taps.<tap>`` for those of taps.
    """

    output: Array
    loss: Array
    taps: dict[str, Array]
    gradients: dict[str, Array] = field(default_factory=dict)
    tap_gradients: dict[str, Array] = field(default_factory=dict)
    backward: list[str] = field(default_factory=list)

    @property
    def logits(self) -> Array:
        """The output under the name that it has in the whole model."""
        return self.output


def reference(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    gradients: bool = False,
    part: str = "model",
    dtype: str = "float64",
    arithmetic: str = "float64",
    corner: float = 0.0,
    shuffle: int | None = None,
    fused: bool = False,
    forced: Mapping[str, Array] | None = None,
    deviations: Deviations = NONE,
) -> Truth:
    """Compute a part of the model.

    Args:
        config: the member of the family.
        weights: canonical name to array; exactly the parameters of the part.
        batch: the inputs of the part.
        gradients: whether to differentiate the loss too.
        part: one of :data:`concord.spec.tensors.PARTS`.
        dtype: the precision whose *model* is computed: weights, inputs and mask constants are rounded to it once, and
            the sum with an additive mask constant is rounded as it rounds (SPEC PRC-2, MSK-5, MSK-6).
        arithmetic: the precision in which it is computed. ``float64`` gives the truth for ``dtype``; ``dtype``
            itself gives an example of what correct arithmetic of that precision makes of it.
        corner, shuffle, fused: see :class:`concord.spec.arithmetic.Arithmetic`.
        forced: tap name to array. Each tap is computed from the forced taps before it, where there are any, and what
            follows goes on from the forced one (SPEC PRT-2). Gradients flow through, by the forced values.
        deviations: in what a backend says that it deviates from the specification (:mod:`concord.spec.deviations`).

    Raises:
        WeightsError, BatchError: for input that does not fit, listing everything that is wrong.
        UnknownNameError: for an unknown part or precision.
    """
    return compute(config, weights, batch, Arithmetic(arithmetic, corner, shuffle, fused), gradients, part, dtype, forced, deviations)


Observer = Callable[[str, Array], None]
"""Takes each tensor as it is computed: taps in order, then gradients in the order of the backward pass, as ``gradients.<name>``
and ``gradients.taps.<tap>``. Those of tables have the rows that are used alone (:func:`used_rows`)."""


def compute(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    arithmetic: Arithmetic,
    gradients: bool = False,
    part: str = "model",
    dtype: str = "float64",
    forced: Mapping[str, Array] | None = None,
    deviations: Deviations = NONE,
    model: Callable[..., _Reference] | None = None,
) -> Truth:
    """Compute a part of the model in any kind of arithmetic; the other arguments are those of :func:`reference`.

    ``model`` stands in for the model that is specified, as something that goes wrong in one of its steps.

    The arrays of a :class:`concord.spec.montecarlo.MonteCarlo` arithmetic have a leading axis of samples, of size 1 where no
    sample can differ from another.
    """
    validate_weights(config, weights, part)
    validate_batch(config, batch, part)
    rounded_weights, rounded_batch = round_inputs(weights, batch, dtype)
    taps, found = dict[str, Array](), dict[str, Array]()

    def store(name: str, array: Array) -> None:
        if name.startswith("gradients."):
            found[name.removeprefix("gradients.")] = run.full(name.removeprefix("gradients."), array)
        else:
            taps[name] = array

    run = (model or _Reference)(config, rounded_weights, rounded_batch, dtype, arithmetic, forced or {}, deviations)
    run.observe(store, gradients, part)
    by_taps = {name.removeprefix("taps."): array for name, array in found.items() if name.startswith("taps.")}
    return Truth(taps[output_name(config, part)], taps["loss"], taps, {n: g for n, g in found.items() if not n.startswith("taps.")}, by_taps, list(found))


def observe(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    arithmetic: Arithmetic,
    observer: Observer,
    gradients: bool = True,
    part: str = "model",
    dtype: str = "float64",
    forced: Mapping[str, Array] | None = None,
    forced_gradients: Mapping[str, Array] | None = None,
    unrounded: Callable[[str], bool] = lambda name: False,
    deviations: Deviations = NONE,
) -> int:
    """Compute a part of the model and keep nothing: each tensor is handed on as soon as it is there.

    Args:
        weights, batch: valid, and rounded to ``dtype`` already.
        observer: takes the tensors.
        forced_gradients: tap name to the gradient of the loss by it. What flows back further goes on from the forced one.
        unrounded: says of which forced taps what follows may have seen the values before they were rounded.

    Returns:
        How many elements were computed on the way forward: what a sample takes up in memory, but for a factor.
    """
    run = _Reference(config, weights, batch, dtype, arithmetic, forced or {}, deviations)
    run.forced_gradients, run.unrounded = forced_gradients or {}, unrounded
    return run.observe(observer, gradients, part)


def used_rows(config: EncoderConfig, batch: Batch, part: str = "model") -> dict[str, NDArray[np.int64]]:
    """Return which rows of each table a batch looks up, in ascending order: those of the others have no gradient."""
    if part not in ("model", "encoder"):
        return {}
    tokens = batch.required("input_ids")
    ids = {"embeddings.token.weight": tokens, "embeddings.position.weight": position_ids(config, real_tokens(config, tokens))}
    if config.num_segments:
        ids["embeddings.segment.weight"] = batch.required("segment_ids")
    return {name: np.unique(rows) for name, rows in ids.items()}


def predict(config: EncoderConfig, logits: Array) -> NDArray[np.int64]:
    """Return the predicted label of each sample (SPEC HED-4): (B, C) to (B,)."""
    return (logits[:, 0] >= 0).astype(np.int64) if config.num_classes == 1 else np.argmax(logits, axis=-1)


class _Reference:
    """One run of the model on one tape."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: Weights,
        batch: Batch,
        dtype: str,
        arithmetic: Arithmetic,
        forced: Mapping[str, Array],
        deviations: Deviations,
    ) -> None:
        self.config, self.batch, self.dtype, self.a = config, batch, dtype, arithmetic
        self.forced, self.deviations = forced, deviations
        self.weights = Leaves(arithmetic, weights)
        self.given = {n: arithmetic.leaf(x) for n, x in batch.arrays().items() if np.issubdtype(x.dtype, np.floating)}
        self.rows: dict[str, NDArray[np.int64]] = {}
        self.looked_up: dict[str, Tensor] = {}
        self.forced_gradients: Mapping[str, Array] = {}
        self.unrounded: Callable[[str], bool] = lambda name: False
        self.observer: Observer = lambda name, array: None
        self.watched: set[str] = set()

    def observe(self, observer: Observer, gradients: bool, part: str) -> int:
        """Hand on every tap, and every gradient if they are wanted; return how many elements the forward pass computed."""
        self.observer = observer
        self.watched = set(trainable(self.config, part)) if gradients else set()
        self.a.recording = gradients or self.a.keeping
        with np.errstate(all="ignore"):  # infinities and NaN are results here, and are judged
            loss = self.run(part)
            elements = self.a.elements
            if gradients:
                self.watch_given()
                self.a.backward(loss)
            for name in sorted(self.watched):  # the loss does not depend on it
                self.observer(f"gradients.{name}", self.nothing(name))
        return elements

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        self.observer(name, tensor.value)
        if self.a.recording:
            tensor.completed = functools.partial(self.complete_tap, name)
        return self.a.override(tensor, self.forced[name], self.unrounded(name)) if name in self.forced else tensor

    def complete_tap(self, name: str, tensor: Tensor) -> None:
        """Hand on the gradient by a tap, and let what flows back further go on from the forced one."""
        if name == "loss":
            return
        assert tensor.gradient is not None
        self.observer(f"gradients.taps.{name}", tensor.gradient)
        if name in self.forced_gradients:
            tensor.gradient = self.a.given_gradient(self.forced_gradients[name])

    def complete(self, name: str, tensor: Tensor) -> None:
        """Hand on the gradient by a parameter or a given tensor."""
        assert tensor.gradient is not None
        if name in self.watched:
            self.watched.remove(name)
            self.observer(f"gradients.{name}", tensor.gradient)
        if not self.a.keeping:
            tensor.gradient = None

    def watch_given(self) -> None:
        """Have all gradients that are wanted handed on as they are completed."""
        given = {f"inputs.{name}": leaf for name, leaf in self.given.items()}
        for name, leaf in {**self.weights, **self.looked_up, **given}.items():
            leaf.completed = functools.partial(self.complete, name)

    def nothing(self, name: str) -> Array:
        """Return the gradient of what the loss does not depend on."""
        given = name.removeprefix("inputs.")
        leaf = self.given[given] if given != name else self.looked_up.get(name, self.weights[name])
        return np.zeros_like(leaf.value)

    def full(self, name: str, gradient: Array) -> Array:
        """Return a gradient with the rows of its table that no id looked up."""
        if name not in self.rows:
            return gradient
        whole = np.zeros((*gradient.shape[: self.a.lead], *self.weights.arrays[name].shape), gradient.dtype)
        whole[..., self.rows[name], :] = gradient
        return whole

    def active(self, name: str) -> NDArray[np.bool_] | None:
        """Return where a forced tap that a ReLU gave is not zero: there, and only there, its slope was 1."""
        return self.forced[name] > 0 if name in self.forced else None

    def held(self, constant: float, deviation: str) -> float:
        """Return a constant as the backend holds it: rounded to as many bits as it declares."""
        bits = self.deviations.get(deviation)
        return constant if bits is None else float(round_to_bits(np.asarray(constant), int(bits)))

    def run(self, part: str) -> Tensor:
        if part in ("attention", "dot_product"):
            attend = self.attention if part == "attention" else self.dot_product
            query, key, value = (self.given[name] for name in ("query", "key", "value"))
            return self.cotangent_loss(attend("attention", query, key, value, self.batch.key_mask, self.batch.query_mask))
        real = real_tokens(self.config, self.batch.required("input_ids"))
        x = self.given["embeddings"] if part == "stack" else self.embeddings(real)
        for i in range(self.config.num_layers):
            x = self.layer(f"layers.{i}", x, real)
        if self.config.final_norm:
            x = self.tap("final_norm", self.norm("final_norm", x))
        return self.classification_loss(self.head(x)) if part == "model" else self.cotangent_loss(x)

    # Embeddings (EMB-1 to EMB-6, POS-5).

    def embeddings(self, real: NDArray[np.bool_]) -> Tensor:
        config, ids = self.config, self.batch.required("input_ids")
        token = self.lookup("embeddings.token.weight", ids, config.token_padding_row)
        if config.token_padding_forward == "zero":
            token = self.a.replace(token, (ids != config.token_padding_row)[..., None], 0.0)
        if config.embedding_scale == "sqrt_d_model":
            token = self.a.scale(token, math.sqrt(config.d_model))
        token = self.tap("embeddings.token", token)
        position = self.tap("embeddings.position", self.lookup("embeddings.position.weight", position_ids(config, real), None))
        total = self.a.add(token, position)
        if config.num_segments:
            segment = self.lookup("embeddings.segment.weight", self.batch.required("segment_ids"), config.segment_padding_row)
            total = self.a.add(total, self.tap("embeddings.segment", segment))
        total = self.tap("embeddings.sum", total)
        return self.tap("embeddings.norm", self.norm("embeddings.norm", total)) if config.embedding_norm else total

    def lookup(self, table: str, ids: NDArray[np.int64], padding_row: int | None) -> Tensor:
        self.rows[table], places = np.unique(ids, return_inverse=True)
        used = self.looked_up[table] = self.a.leaf(self.weights.arrays[table][self.rows[table]])
        vectors = self.a.take(used, places.reshape(ids.shape))  # (B, T, D)
        return vectors if padding_row is None else self.a.freeze(vectors, (ids == padding_row)[..., None])

    # The encoder layer (NRM-1, RES-1, FFN-1).

    def layer(self, name: str, x: Tensor, real: NDArray[np.bool_]) -> Tensor:
        x = self.sublayer(name, 1, x, lambda h: self.attention(f"{name}.attention", h, h, h, real, real))
        return self.sublayer(name, 2, x, lambda h: self.feed_forward(f"{name}.feed_forward", h))

    def sublayer(self, name: str, number: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        norm = f"{name}.norm" if self.config.norm_sharing == "shared" else f"{name}.norm{number}"

        def normed(y: Tensor) -> Tensor:
            return self.tap(f"{name}.norm{number}", self.norm(norm, y))

        if self.config.norm_placement == "pre":
            return self.tap(f"{name}.residual{number}", self.a.add(x, function(normed(x))))
        return normed(self.tap(f"{name}.residual{number}", self.a.add(x, function(x))))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Layer norm over D (NRM-2 to NRM-4)."""
        config, a = self.config, self.a
        mean = a.divide_by(a.sum(x, -1), config.d_model)
        centered = a.center(x, mean)
        # A derivative in closed form takes differences from the mean to add up to zero, whatever its rounding (ALG-5).
        differences = a.center(x, a.freeze(mean, np.ones(mean.shape, bool))) if a.closed else centered
        squares, count = a.sum(a.multiply(differences, differences), -1), config.d_model - (config.norm_variance == "unbiased")
        variance = a.vary_variance(a.divide_by(squares, count), mean)  # (B, T, 1)
        epsilon = self.held(config.norm_epsilon, "norm_epsilon_bits")
        deviation = a.sqrt(a.shift(variance, epsilon)) if config.norm_epsilon_placement == "inside" else a.shift(a.sqrt(variance), epsilon)
        return a.add(a.multiply(a.divide(centered, deviation), self.weights[f"{name}.weight"]), self.weights[f"{name}.bias"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        rows = self.a.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        y = self.a.einsum("ni,io->no", rows, weight) if bias is None else self.a.affine("ni,io->no", rows, weight, bias)
        return self.a.reshape(y, (*x.shape[:-1], y.shape[-1]))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = self.tap(f"{name}.inner", self.linear(f"{name}.inner", x))  # (B, T, F)
        active = self.tap(f"{name}.activation", self.activation(inner, self.active(f"{name}.activation")))
        return self.tap(f"{name}.outer", self.linear(f"{name}.outer", active))  # (B, T, D)

    def activation(self, x: Tensor, active: NDArray[np.bool_] | None) -> Tensor:
        """FFN-2."""
        a = self.a
        if self.config.activation == "relu":
            return a.relu(x, active)
        if self.config.activation == "gelu_erf":
            half = self.held(math.sqrt(0.5), "gelu_constant_bits")
            inner = a.erf(a.divide_by(x, math.sqrt(2)) if half == math.sqrt(0.5) else a.scale(x, half))
        else:
            cubic = a.scale(a.multiply(a.multiply(x, x), x), self.held(0.044715, "gelu_constant_bits"))
            inner = a.tanh(a.scale(a.add(x, cubic), math.sqrt(2 / math.pi)), absolute=True)
        return a.multiply(a.scale(x, 0.5), a.shift(inner, 1.0))

    # Attention (ATT-1 to ATT-7, MSK-3 to MSK-8).

    def attention(self, name: str, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask, query_mask: Mask) -> Tensor:
        q, k, v = (
            self.tap(f"{name}.{role}", self.project(f"{name}.{role}", x))
            for role, x in (("query", query), ("key", key), ("value", value))
        )
        context = self.dot_product(name, q, k, v, key_mask, query_mask)
        return self.tap(f"{name}.output", self.linear(f"{name}.output", context)) if self.config.output_projection else context

    def project(self, name: str, x: Tensor) -> Tensor:
        y = self.linear(name, x)
        if self.config.qkv_activation == "relu":
            y = self.a.relu(y, self.active(name))
        return self.a.reshape(y, (*y.shape[:2], self.config.num_heads, self.config.head_dim))  # (B, T, H, K)

    def dot_product(self, name: str, q: Tensor, k: Tensor, v: Tensor, key_mask: Mask, query_mask: Mask) -> Tensor:
        """Scores, softmax and weighted sum: q (B, Q, H, K), k and v (B, S, H, K) to (B, Q, D).

        All heads at once: one after the other gives the same (ATT-7).
        """
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
        weights = self.tap(f"{name}.weights", a.softmax(scores, self.softmax_floor(key_mask), visible, sums))
        if config.query_mask == "overwrite" and query_mask is not None:
            weights = self.tap(f"{name}.masked_weights", a.replace(weights, query_mask[:, None, :, None], constant))
            sums = None  # of weights that are none no more
        context = a.attend(weights, v, sums)
        return self.tap(f"{name}.context", a.reshape(context, (*context.shape[:2], context.shape[2] * context.shape[3])))

    def softmax_floor(self, key_mask: Mask) -> float | Array | None:
        """Return where the softmax clips: everywhere alike, or for each key (B, 1, 1, S); one that was left out nowhere."""
        floor = self.deviations.get("softmax_floor")
        if floor is None or key_mask is None or not self.deviations.get("padding_left_out"):
            return floor
        kept = key_mask | (np.arange(key_mask.shape[-1]) == 0)  # (B, S)
        return np.where(kept, floor, -np.inf)[:, None, None, :]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        root = math.sqrt(q.shape[-1])
        if self.config.score_scale == "multiply_query":
            q = self.a.scale(q, 1 / root)
        scores = self.a.einsum("bqhk,bshk->bhqs", q, k)
        return self.a.divide_by(scores, root) if self.config.score_scale == "divide_scores" else scores

    # Head and loss (HED-1 to HED-3, LOS-1 to LOS-5).

    def head(self, x: Tensor) -> Tensor:
        if self.config.pooling == "flatten":
            pooled = self.a.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))  # (B, T * D)
        else:
            pooled = self.a.index(x, (slice(None), 0))  # (B, D)
        pooled = self.tap("pooling", pooled)
        if self.config.pooler == "tanh":
            pooled = self.tap("pooler.output", self.a.tanh(self.tap("pooler.dense", self.linear("pooler", pooled))))
        return self.tap("logits", self.linear("classifier", pooled))  # (B, C)

    def classification_loss(self, logits: Tensor) -> Tensor:
        config, a, labels = self.config, self.a, self.batch.required("labels")
        if config.num_classes == 1:
            losses = a.reshape(a.sigmoid_cross_entropy(logits, labels[:, None].astype(logits.value.dtype)), labels.shape)
        else:
            log_probabilities = self.tap("log_probabilities", a.log_softmax(logits, self.deviations.get("log_softmax_floor")))
            losses = a.scale(a.index(log_probabilities, (np.arange(len(labels)), labels)), -1.0)
        losses = self.tap("losses", losses)  # (B,)
        counted = labels != config.ignore_label if config.ignore_label is not None else np.ones(len(labels), bool)
        loss = a.divide_by(a.sum(a.replace(losses, counted, 0.0)), float(counted.sum()))
        if config.l2_weight:
            for name in ("classifier.weight", "classifier.bias"):
                square = a.multiply(self.weights[name], self.weights[name])
                loss = a.add(loss, a.scale(a.sum(square), 0.5 * config.l2_weight))
        return self.tap("loss", loss)

    def cotangent_loss(self, output: Tensor) -> Tensor:
        """Sum of output times cotangent, so that its gradient is the cotangent's (LOS-5)."""
        return self.tap("loss", self.a.sum(self.a.multiply(output, self.given["cotangent"])))
