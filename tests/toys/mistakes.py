"""Ports of the reference with a mistake each, and what should be said of it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import spec
from backends.interface import Run
from conformance.causes import Cause
from spec.arithmetic import Arithmetic
from spec.cases import Case
from spec.masks import mask_constant
from spec.positions import sinusoid
from spec.reference import _Reference, compute
from spec.tape import Tensor

Wrong = Callable[["Spoiled", str, Tensor], Tensor]


class Spoiled(_Reference):
    """The reference with taps that are made into others, as a port that goes wrong there."""

    steps: Mapping[str, Wrong] = {}

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        for pattern, step in self.steps.items():
            if fnmatch.fnmatchcase(name, pattern):
                tensor = step(self, name, tensor)
        self.taken = {**getattr(self, "taken", {}), name: tensor}
        return super().tap(name, tensor)

    def beside(self, name: str, other: str) -> Tensor:
        return self.taken[f"{name.rpartition('.')[0]}.{other}"]

    def real(self) -> np.ndarray:
        return self.batch.required("input_ids") != self.config.pad_id

    def reordered(self, tensor: Tensor, order: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        numbers = order(np.arange(math.prod(tensor.shape)).reshape(tensor.shape))
        flat = self.a.reshape(tensor, (numbers.size,))
        return self.a.reshape(self.a.index(flat, numbers.reshape(-1)), numbers.shape)


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what should be said of it.

    Attributes:
        cause: the name of the hypothesis.
        words: that the sentence contains.
        home: the variant that shows it.
        scenario: the scenario that shows it.
        fields: of the configuration, that are others.
        weights: makes other weights.
        steps: patterns of taps, and what becomes of them.
    """

    cause: str
    words: str
    home: str = "bert"
    scenario: str = "ragged"
    fields: Mapping[str, Any] = field(default_factory=dict)
    weights: Callable[[Case], Mapping[str, np.ndarray]] | None = None
    steps: Mapping[str, Wrong] = field(default_factory=dict)


def option(words: str, home: str, scenario: str = "ragged", **fields: Any) -> Mistake:
    return Mistake(next(iter(fields)), words, home, scenario, fields)


def weight(
    cause: str, words: str, name: str, change: Callable[[np.ndarray], np.ndarray], home: str = "bert", scenario: str = "ragged"
) -> Mistake:
    return Mistake(
        cause, words, home, scenario, weights=lambda case: {name: change(case.weights[name].copy())} if name in case.weights else {}
    )


def taken(words: str, name: str, other: str, cause: str, home: str = "bert") -> Mistake:
    """Return the mistake of taking one weight for another."""
    return Mistake(cause, words, home, weights=lambda case: {name: case.weights[other]} if {name, other} <= case.weights.keys() else {})


def step(cause: str, words: str, tap: str, change: Wrong, home: str = "bert", scenario: str = "ragged") -> Mistake:
    return Mistake(cause, words, home, scenario, steps={tap: change})


def one_element(change: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    def changed(array: np.ndarray) -> np.ndarray:
        array[3, 2] = change(array[3, 2])
        return array

    return changed


def product(run: Spoiled, name: str, divisor: float) -> Tensor:
    return run.a.divide_by(run.a.einsum("bqhk,bshk->bhqs", run.beside(name, "query"), run.beside(name, "key")), divisor)


def masked(run: Spoiled, name: str, visible: np.ndarray) -> Tensor:
    fill = run.a.replace if run.config.mask_fill == "replace" else lambda *given: run.a.add_where(*given, rounded=run.dtype)
    return fill(run.beside(name, "scores"), visible, mask_constant(run.config, run.dtype))


def softmax_over(axis: int) -> Wrong:
    def softmax(run: Spoiled, name: str, y: Tensor) -> Tensor:
        turned = run.reordered(run.beside(name, "masked_scores"), lambda n: n.swapaxes(axis, -1))
        return run.reordered(run.a.softmax(turned), lambda n: n.swapaxes(axis, -1))

    return softmax


def quick_gelu(run: Spoiled, name: str, y: Tensor) -> Tensor:
    x, a = run.beside(name, "inner"), run.a
    return a.multiply(x, a.scale(a.shift(a.tanh(a.scale(x, 0.851), absolute=True), 1.0), 0.5))


def smoothed(run: Spoiled, name: str, y: Tensor) -> Tensor:
    logs, a = run.taken["log_probabilities"], run.a
    every = a.reshape(a.divide_by(a.sum(logs, -1), logs.shape[1]), y.shape)
    return a.subtract(a.scale(y, 0.9), a.scale(every, 0.1))


def root_mean_square_norm(run: Spoiled, name: str, y: Tensor) -> Tensor:
    x, a, own = run.taken["embeddings.sum"], run.a, "embeddings.norm"
    power = a.divide_by(a.sum(a.multiply(x, x), -1), run.config.d_model)
    return a.add(
        a.multiply(a.divide(x, a.sqrt(a.shift(power, run.config.norm_epsilon))), run.weights[f"{own}.weight"]), run.weights[f"{own}.bias"]
    )


def detached_norm(run: Spoiled, name: str, y: Tensor, variance: bool) -> Tensor:
    """Norm what came out of the sublayer, with a mean or a variance that is taken for a constant."""
    x, a, config = run.beside(name, name.rpartition(".")[2].replace("norm", "residual")), run.a, run.config
    own = name if f"{name}.weight" in run.weights else name[:-1]

    def constant(tensor: Tensor) -> Tensor:
        return a.freeze(tensor, np.ones(tensor.shape, bool))

    mean = a.divide_by(a.sum(x, -1), config.d_model)
    centered = a.subtract(x, mean if variance else constant(mean))
    power = a.divide_by(a.sum(a.multiply(centered, centered), -1), config.d_model - (config.norm_variance == "unbiased"))
    inside = config.norm_epsilon_placement == "inside"
    deviation = a.sqrt(a.shift(power, config.norm_epsilon)) if inside else a.shift(a.sqrt(power), config.norm_epsilon)
    normed = a.divide(centered, constant(deviation) if variance else deviation)
    return a.add(a.multiply(normed, run.weights[f"{own}.weight"]), run.weights[f"{own}.bias"])


def through(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return spec.precision(name).round


QUERY, KEY, VALUE = (f"layers.0.attention.{role}.weight" for role in ("query", "key", "value"))
SCORES, MASKED, WEIGHTS = (f"layers.0.attention.{step}" for step in ("scores", "masked_scores", "weights"))

MISTAKES: dict[str, Mistake] = {
    # Options.
    "epsilon 1e-5 for 1e-12": option("norm_epsilon = 1e-05 instead of 1e-12 (NRM-2)", "bert", "tiny", norm_epsilon=1e-5),
    "epsilon 1e-6 for 1e-5": option("norm_epsilon = 1e-06 instead of 1e-05", "nndl-paddle", "tiny", norm_epsilon=1e-6),
    "epsilon 1e-12 for 1e-8": option("norm_epsilon = 1e-12 instead of 1e-08", "tf1-text-classifier", "tiny", norm_epsilon=1e-12),
    "epsilon outside": option(
        "norm_epsilon_placement = outside instead of inside (NRM-3)", "bert", "tiny", norm_epsilon_placement="outside"
    ),
    "epsilon inside": option("norm_epsilon_placement = inside instead of outside", "bert-pytorch", "tiny", norm_epsilon_placement="inside"),
    "variance biased": option("norm_variance = biased instead of unbiased (NRM-4)", "bert-pytorch", norm_variance="biased"),
    "variance unbiased": option("norm_variance = unbiased instead of biased", "keras-attention", norm_variance="unbiased"),
    "epsilon 1e-6 outside": Mistake(
        "norm_epsilon and norm_epsilon_placement",
        "1e-06 instead of 1e-12 and norm_epsilon_placement = outside",
        "bert",
        "tiny",
        {"norm_epsilon": 1e-6, "norm_epsilon_placement": "outside"},
    ),
    "post-norm for pre-norm": option("norm_placement = post instead of pre (NRM-1)", "bert-pytorch", norm_placement="post"),
    "gelu with tanh": option("activation = gelu_tanh instead of gelu_erf (FFN-2)", "bert", activation="gelu_tanh"),
    "gelu with erf": option("activation = gelu_erf instead of gelu_tanh", "bert-pytorch", activation="gelu_erf"),
    "gelu for relu": option("activation = gelu_erf instead of relu", "nndl-paddle", activation="gelu_erf"),
    "mask of -1e4": option("mask_value = -10000 instead of -1000000000 (MSK-2)", "nndl-paddle", mask_value=-1e4),
    "mask of the lowest float32": option(
        "mask_value = -3.40282346639e+38 instead of -10000", "vanilla-encoder", mask_value=-3.4028234663852886e38
    ),
    "mask added": option("mask_fill = add instead of replace (MSK-3)", "vanilla-encoder", mask_fill="add"),
    "mask of the wrong sample": option(
        "mask_assignment = batch_major instead of per_sample (MSK-7)", "vanilla-encoder", mask_assignment="batch_major"
    ),
    "mask of the right sample": option(
        "mask_assignment = per_sample instead of batch_major", "keras-attention", mask_assignment="per_sample"
    ),
    "no qkv activation": option("qkv_activation = none instead of relu (ATT-1)", "tf1-text-classifier", qkv_activation="none"),
    "no embedding scale": option("embedding_scale = one instead of sqrt_d_model (EMB-2)", "nndl-paddle", embedding_scale="one"),
    "padding row used": option("token_padding_forward = stored instead of zero (EMB-3)", "nndl-paddle", token_padding_forward="stored"),
    "positions from one": option("position_start = 1 instead of 0 (POS-5)", "bert", position_start=1),
    "padding is counted": option("padding that has the row of its position (POS-6)", "keras-attention", position_of_padding="counted"),
    "label counted": option("ignore_label = absent instead of 1 (LOS-3)", "bert-pytorch", "ignored-label", ignore_label=None),
    "no l2": option("l2_weight = 0 instead of 0.1 (LOS-4)", "tf1-text-classifier", "sigmoid", l2_weight=0.0),
    "padding row trained": option("token_padding_row = absent instead of 0 (EMB-4)", "bert-pytorch", token_padding_row=None),
    "padding row frozen": option("token_padding_row = 0 instead of absent", "tf1-text-classifier", token_padding_row=0),
    "segment row trained": option("segment_padding_row = absent instead of 0 (EMB-5)", "bert-pytorch", segment_padding_row=None),
    # Tables and weights.
    "exponent for each column": Mistake(
        "position_exponent",
        "position_exponent = column instead of pair (POS-3)",
        "vanilla-encoder",
        weights=lambda case: (
            {"embeddings.position.weight": sinusoid(case.config.replace(position_exponent="column"))}
            if case.config.position_exponent == "pair"
            else {}
        ),
    ),
    "sines first": Mistake(
        "position_layout",
        "position_layout = halves instead of interleaved (POS-2)",
        "vanilla-encoder",
        weights=lambda case: (
            {"embeddings.position.weight": sinusoid(case.config.replace(position_layout="halves"))}
            if case.config.position_layout == "interleaved"
            else {}
        ),
    ),
    "transposed": weight("transposed_weight", f"`{KEY}` transposed (WGT-2)", KEY, np.transpose),
    "wrong memory order": weight(
        "weight_in_wrong_order",
        "read in the wrong memory order",
        "layers.0.feed_forward.inner.weight",
        lambda w: w.reshape(-1).reshape(w.shape, order="F"),
    ),
    "bias missing": weight(
        "missing_bias", "`layers.0.feed_forward.outer.bias` left out", "layers.0.feed_forward.outer.bias", np.zeros_like
    ),
    "query and key swapped": taken(f"`{KEY}` instead of `{QUERY}`", QUERY, KEY, "swapped_weights"),
    "key and value swapped": taken(f"`{VALUE}` instead of `{KEY}`", KEY, VALUE, "swapped_weights"),
    "stale layer": taken(
        "`layers.0.attention.query.weight` instead of `layers.1.attention.query.weight`",
        QUERY.replace("0", "1"),
        QUERY,
        "weights_of_another_layer",
    ),
    "heads permuted": weight("heads_permuted", "heads in the order 1, 0", QUERY, lambda w: np.roll(w, w.shape[1] // 2, axis=1)),
    "rows swapped": weight(
        "weight_permuted", f"rows 0, 1 of `{VALUE}` having changed places", VALUE, lambda w: w[[1, 0, *range(2, len(w))]]
    ),
    "columns swapped": weight(
        "weight_permuted",
        f"columns 2, 5 of `{VALUE}` having changed places",
        VALUE,
        lambda w: w[:, [0, 1, 5, 3, 4, 2, *range(6, w.shape[1])]],
    ),
    "one element": weight("weight_element", f"`{VALUE}` at (3, 2) being", VALUE, one_element(lambda x: x * 1.01)),
    "one element of the classifier": weight(
        "weight_element", "`classifier.weight` at (3, 2) being", "classifier.weight", one_element(lambda x: -x)
    ),
    "weight in float16": weight("weight_in_float16", f"`{VALUE}` rounded to float16", VALUE, through("float16")),
    "weight in bfloat16": weight(
        "weight_in_bfloat16",
        "`layers.0.feed_forward.outer.weight` rounded to bfloat16",
        "layers.0.feed_forward.outer.weight",
        through("bfloat16"),
    ),
    "gain missing": weight("norm_gain_missing", "gain 1 instead of `layers.0.norm1.weight`", "layers.0.norm1.weight", np.ones_like),
    "norms shared": Mistake(
        "norm_sharing",
        "gain and offset of `layers.0.norm1` instead of its own (NRM-5)",
        "nndl-paddle-api",
        weights=lambda case: {name: case.weights[name.replace("norm2", "norm1")] for name in case.weights if ".norm2." in name},
    ),
    # Steps.
    "no score scale": step("no_score_scale", "scores without a scale (ATT-4)", "*.scores", lambda run, name, y: product(run, name, 1.0)),
    "scale twice": step(
        "score_scale_twice", "divided by K instead of sqrt(K)", "*.scores", lambda run, name, y: product(run, name, run.config.head_dim)
    ),
    "scale of d_model": step(
        "score_scale_of_d_model", "divided by sqrt(D)", "*.scores", lambda run, name, y: product(run, name, math.sqrt(run.config.d_model))
    ),
    "scale after the mask": step(
        "scale_after_mask",
        "a mask that is applied before the scores are scaled",
        "*.masked_scores",
        lambda run, name, y: run.a.replace(
            run.beside(name, "scores"), run.real()[:, None, None], run.config.mask_value / math.sqrt(run.config.head_dim)
        ),
        "vanilla-encoder",
    ),
    "softmax over queries": step("softmax_axis", "a softmax over queries instead of keys (ATT-5)", "*.weights", softmax_over(-2)),
    "softmax over heads": step("softmax_axis", "a softmax over heads instead of keys", "*.weights", softmax_over(1)),
    "no residual": step(
        "residual_missing", "no residual (RES-1)", "*.residual1", lambda run, name, y: run.beside(name, "attention.output")
    ),
    "residual of the normed input": step(
        "residual_of_normed_input",
        "after the norm (RES-1)",
        "*.residual1",
        lambda run, name, y: run.a.add(run.beside(name, "norm1"), run.beside(name, "attention.output")),
        "bert-pytorch",
    ),
    "quick gelu": step("quick_gelu", "x sigmoid(1.702 x)", "*.activation", quick_gelu),
    "mask off by one": step(
        "mask_shifted",
        "one token too far to the right",
        "*.masked_scores",
        lambda run, name, y: masked(run, name, np.roll(run.real(), 1, 1)[:, None, None]),
    ),
    "mask inverted": step(
        "mask_inverted",
        "hides what is visible (MSK-1)",
        "*.masked_scores",
        lambda run, name, y: masked(run, name, ~run.real()[:, None, None]),
    ),
    "mask causal": step(
        "mask_causal",
        "hides later tokens too",
        "*.masked_scores",
        lambda run, name, y: masked(run, name, run.real()[:, None, None] & np.tri(run.real().shape[1], dtype=bool)),
    ),
    "mask by length": step(
        "mask_by_length",
        "by the number of real tokens instead of ids",
        "*.masked_scores",
        lambda run, name, y: masked(run, name, (np.arange(run.real().shape[1]) < run.real().sum(1, keepdims=True))[:, None, None]),
    ),
    "mask ignored": step("mask_ignored", "no mask at all", "*.masked_scores", lambda run, name, y: run.beside(name, "scores")),
    "mask of minus infinity": step(
        "mask_value_infinite",
        "minus infinity instead of mask_value",
        "*.masked_scores",
        lambda run, name, y: run.a.replace(run.beside(name, "scores"), run.real()[:, None, None], -math.inf),
        "bert-pytorch",
    ),
    "heads split by a reshape": step(
        "heads_split_by_reshape",
        "without a transposition (ATT-2)",
        "*.query",
        lambda run, name, y: run.reordered(y, lambda n: n.reshape(len(n), n.shape[2], n.shape[1], n.shape[3]).swapaxes(1, 2)),
    ),
    "segments ignored": step(
        "segments_ignored", "segment vectors that are zero (EMB-5)", "embeddings.segment", lambda run, name, y: run.a.scale(y, 0.0)
    ),
    "root mean square norm": step("norm_mean_kept", "a mean that is not taken off", "embeddings.norm", root_mean_square_norm),
    "last token": step(
        "last_token_pooled",
        "the last token instead of the first (HED-1)",
        "pooling",
        lambda run, name, y: run.a.index(run.taken["layers.1.norm2"], (slice(None), -1)),
    ),
    "mean of tokens": step(
        "mean_pooled",
        "the mean of all tokens",
        "pooling",
        lambda run, name, y: run.a.reshape(
            run.a.divide_by(run.a.sum(run.taken["layers.1.norm2"], -2), run.taken["layers.1.norm2"].shape[1]), y.shape
        ),
    ),
    "label smoothing": step("label_smoothing", "smoothed by 0.1 (LOS-1)", "losses", smoothed),
    "loss summed": step(
        "loss_sum", "the sum over samples instead of the mean (LOS-2)", "loss", lambda run, name, y: run.a.sum(run.taken["losses"])
    ),
    "variance detached": step(
        "detached_variance",
        "a variance that is taken for a constant",
        "layers.*.norm?",
        lambda run, name, y: detached_norm(run, name, y, variance=True),
    ),
    "mean detached": step(
        "detached_mean",
        "a mean that is taken for a constant",
        "layers.*.norm?",
        lambda run, name, y: detached_norm(run, name, y, variance=False),
    ),
    "stored in bfloat16": step(
        "stored_in_bfloat16",
        "numbers that were rounded to bfloat16 (PRC-2)",
        "*.residual2",
        lambda run, name, y: run.a._record(through("bfloat16")(y.value).astype(y.value.dtype), (y, lambda g: g)),
    ),
    "gradient of the sum": step(
        "gradient_of_sum",
        "the gradient of the sum over 5 samples",
        "loss",
        lambda run, name, y: run.a._record(y.value, (run.a.sum(run.taken["losses"]), lambda g: g)),
    ),
}

SOUND = Mistake("none", "")
"""No mistake at all."""


def run_of(case: Case, mistake: Mistake, dtype: str = "float32", seed: int = 97) -> Run | None:
    """Return what a port with a mistake would: the reference in rounded arithmetic; None where the case cannot have it."""
    model = type("Port", (Spoiled,), {"steps": mistake.steps})
    try:
        weights = {**case.weights, **(mistake.weights(case) if mistake.weights else {})}
        config = case.config.replace(**mistake.fields)
        truth = compute(config, weights, case.batch, Arithmetic(dtype, shuffle=seed), True, case.part, dtype, model=model)
    except (spec.SpecError, KeyError, IndexError, ValueError):
        return None
    return Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", dtype)


def right(cause: Cause, mistake: Mistake) -> bool:
    """Return whether a cause is the mistake, or one of two that were made, of which the other is not visible."""
    return bool(set(cause.hypothesis.split(" or ")) & {mistake.cause, *mistake.cause.split(" and ")})
