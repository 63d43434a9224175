"""Bugs of precision: something is computed, or stored, with fewer bits than asked for (SPEC PRC-1 to PRC-3, ATT-5, LOS-1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.faults.fault import Array as Weight
from conformance.faults.fault import Change, Fault, option, steps, weight
from conformance.faults.operations import Array
from conformance.mutants.products import backward, every_product, forward_and_backward
from conformance.mutants.rewrites import Attend, FeedForward, GeluErf, Gradients, Head, MultiHead, Norm, PostNorm, SoftmaxLosses
from conformance.mutants.surgery import Steps
from spec.precision import precision

QUERY, NAME = "layers.0.attention.query", "layers.0.attention"


def through(number_format: str) -> Callable[[Weight], Weight]:
    """Return what sends a weight through a shorter format."""
    return lambda array: precision(number_format).round(array)


def scores_in_tf32(family: Steps, subscripts: str, a: Array, b: Array) -> Array:
    product = family.o.einsum
    return (
        forward_and_backward("tf32")(family.o, lambda x, y: product(subscripts, x, y), a, b)
        if subscripts.endswith("bhqs")
        else product(subscripts, a, b)
    )


def value_in_tf32(family: Steps, layer: Any, role: str, x: Array) -> Array:
    linear = getattr(layer, role)
    if role != "value":
        return layer.activation(linear(x))
    return layer.activation(forward_and_backward("tf32")(family.o, lambda y, w: y @ w, x, family.o.weight(linear)) + family.o.bias(linear))


def softmax_in(number_format: str) -> Change:
    """Return the change to a softmax that is given and gives numbers of a shorter format."""

    def softmax(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
        return family.o.round_to(family.o.softmax(family.o.round_to(scores, number_format), -1), number_format)

    return steps(Attend, softmax=softmax)


def without_maximum(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
    exponentials = family.o.exp(scores)
    return exponentials / family.o.sum(exponentials, -1)


def norm_in_bfloat16(family: Steps, layer: Any, x: Array) -> Array:
    return family.o.round_to(family.original(layer, family.o.round_to(x, "bfloat16")), "bfloat16")


def variance_by_squares(family: Steps, layer: Any, x: Array, centered: Array) -> Array:
    """Compute the variance as E[x²] - E[x]²."""
    mean = family.o.mean(x, -1)
    return family.o.mean(x * x, -1) - mean * mean


def erf_by_polynomial(family: Steps, x: Array) -> Array:
    """Approximate erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    o = family.o
    y = x * 0.5**0.5
    size = o.where(y > 0.0, y, -y)
    t = 1.0 / (size * 0.3275911 + 1.0)
    polynomial = t * (t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592)
    positive = 1.0 - polynomial * o.exp(-size * size)
    return x * 0.5 * (o.where(y > 0.0, positive, -positive) + 1.0)


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "precision", "what": what, "variant": "bert", **fields})


FAULTS = (
    mutant(
        "tf32_everywhere",
        "All products are computed from factors with 11 bits, forward and backward.",
        first=(QUERY,),
        cause="tf32_products",
        change=every_product(forward_and_backward("tf32")),
    ),
    mutant(
        "tf32_in_scores",
        "The product of queries and keys is computed from factors with 11 bits.",
        first=(f"{NAME}.scores",),
        cause="tf32_products",
        change=steps(Attend, product=scores_in_tf32),
    ),
    mutant(
        "tf32_in_one_projection",
        "The value projection is computed from factors with 11 bits.",
        first=(f"{NAME}.value",),
        cause="tf32_products",
        change=steps(MultiHead, project=value_in_tf32),
    ),
    mutant(
        "tf32_backward",
        "The products of the backward pass are computed from factors with 11 bits.",
        first=("gradients.classifier.weight",),
        change=every_product(backward("tf32")),
    ),
    mutant(
        "bfloat16_products",
        "All products are computed from factors with 8 bits: autocast was left on.",
        first=(QUERY,),
        change=every_product(forward_and_backward("bfloat16")),
    ),
    mutant(
        "float32_products",
        "All products are computed from factors in float32, in float64 too.",
        first=(QUERY,),
        input="any, in float64",
        equivalent={"float32": "float32 is what is asked for"},
        change=every_product(forward_and_backward("float32")),
    ),
    mutant(
        "activation_stored_in_bfloat16",
        "What the activation gives is stored with 8 bits.",
        first=("layers.0.feed_forward.activation",),
        change=steps(FeedForward, activate=lambda family, layer, inner: family.o.round_to(layer.activation(inner), "bfloat16")),
    ),
    mutant(
        "residual_stored_in_bfloat16",
        "The sum with the residual is stored with 8 bits.",
        first=("layers.0.residual1",),
        change=steps(PostNorm, residual=lambda family, number, x, y: family.o.round_to(x + y, "bfloat16")),
    ),
    mutant("softmax_in_bfloat16", "The softmax is computed with 8 bits.", first=(f"{NAME}.weights",), change=softmax_in("bfloat16")),
    mutant("softmax_in_float16", "The softmax is computed with 11 bits.", first=(f"{NAME}.weights",), change=softmax_in("float16")),
    mutant(
        "softmax_without_maximum",
        "The largest score is not taken off before the exponential function.",
        variant="bert-pytorch",
        first=(f"{NAME}.weights",),
        input="a row of padding only, or huge scores",
        change=steps(Attend, softmax=without_maximum),
    ),
    mutant(
        "norm_in_bfloat16",
        "The norm is given and gives numbers with 8 bits.",
        first=("embeddings.norm",),
        change=steps(Norm, run=norm_in_bfloat16),
    ),
    mutant(
        "norm_variance_by_squares",
        "The variance is E[x²] - E[x]², which loses digits where the mean is large.",
        scenario="offset",
        first=("embeddings.norm",),
        input="a mean far larger than the deviation",
        alone=True,
        change=steps(Norm, variance=variance_by_squares),
    ),
    mutant(
        "norm_epsilon_lost",
        "Epsilon is 1e-12 in float16, which is 0.",
        scenario="tiny",
        first=("embeddings.norm",),
        input="a row whose variance is near epsilon",
        alone=True,
        change=steps(Norm, deviation=lambda family, layer, variance: family.o.sqrt(variance)),
    ),
    mutant(
        "loss_in_bfloat16",
        "The log-softmax is computed with 8 bits.",
        first=("log_probabilities",),
        change=steps(SoftmaxLosses, log_softmax=lambda family, logits: family.o.round_to(family.o.log_softmax(logits, -1), "bfloat16")),
    ),
    mutant(
        "logits_in_bfloat16",
        "Logits are stored with 8 bits.",
        first=("logits",),
        change=steps(Head, classify=lambda family, model, pooled: family.o.round_to(model.classifier(pooled), "bfloat16")),
    ),
    mutant(
        "gradients_in_bfloat16",
        "Gradients are rounded to 8 bits on their way.",
        first=("gradients.classifier.bias",),
        change=steps(
            Gradients,
            change=lambda family, gradients: {name: family.o.rounded(gradient, "bfloat16") for name, gradient in gradients.items()},
        ),
    ),
    mutant(
        "weight_through_float16",
        "One weight matrix was stored in float16.",
        first=("layers.0.feed_forward.outer",),
        change=weight("layers.0.feed_forward.outer.weight", through("float16")),
    ),
    mutant(
        "weight_through_bfloat16",
        "One weight matrix was stored in bfloat16.",
        first=("layers.0.feed_forward.outer",),
        change=weight("layers.0.feed_forward.outer.weight", through("bfloat16")),
    ),
    mutant(
        "positions_through_float16",
        "The position table was stored in float16.",
        variant="vanilla-encoder",
        first=("embeddings.position",),
        change=weight("embeddings.position.weight", through("float16")),
    ),
    mutant(
        "score_scale_through_float16",
        "sqrt(K) was stored in float16.",
        first=(f"{NAME}.scores",),
        change=steps(Attend, scale=lambda family, layer, scores, q: scores / float(np.float16(layer.divide_scores))),
    ),
    mutant(
        "mask_constant_through_float32",
        "The mask's constant -2^32 + 1 went through float32 and is -2^32.",
        variant="tf1-text-classifier",
        first=(f"{NAME}.masked_scores",),
        input="padding, in float64",
        equivalent={"float32": "float32 has no other number for -2^32 + 1"},
        change=option(mask_value=-4294967296.0),
    ),
    mutant(
        "erf_by_polynomial",
        "erf is approximated to 1.5e-7.",
        input="any, in float64",
        first=("layers.0.feed_forward.activation",),
        change=steps(GeluErf, run=erf_by_polynomial),
    ),
)
