"""Bugs of precision: something is computed, or stored, with fewer bits than asked for.

(SPEC PRC-1 to PRC-3, ATT-5).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.bug import Array as Weight
from concord.conformance.bugs.bug import (
    Change,
    Gradients,
    edited,
    group,
    handed_out,
    of_source,
    option,
    weight,
)
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.norms import NORMS
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, Array
from concord.conformance.bugs.products import backward, every_product, forward_and_backward, product
from concord.conformance.bugs.rounding import stored
from concord.spec.precision import precision, round_to_bits

QUERY, NAME = "layers.0.attention.query", "layers.0.attention"


def through(number_format: str) -> Callable[[Weight], Weight]:
    """Return what sends a weight through a shorter format."""
    return lambda array: precision(number_format).round(array)


def softmax_in(number_format: str) -> Change:
    """Return the change to a softmax that is given and gives numbers of a shorter format."""
    return edited(
        lambda m, y: m.o.round_to(m.o.softmax(m.o.round_to(m.unnormalised, number_format), 3), number_format),
        "*attention.weights",
    )


def norm_in_bfloat16(m: Context, y: Array) -> Array:
    return m.o.round_to(m.norm(m.o.round_to(m.source(), "bfloat16")), "bfloat16")


def variance_by_squares(m: Context, y: Array) -> Array:
    """Compute the variance as E[x²] - E[x]²."""
    x = m.source()
    mean = m.o.mean(x, -1)
    return m.norm(x, variance=lambda variance: m.o.mean(x * x, -1) - mean * mean)


def erf_by_polynomial(m: Context, x: Array) -> Array:
    """Approximate erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    o, y = m.o, x * 0.5**0.5
    size = o.abs(y)
    t = 1.0 / (size * 0.3275911 + 1.0)
    polynomial = t * (
        t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592
    )
    positive = 1.0 - polynomial * o.exp(-size * size)
    return x * 0.5 * (o.where(y > 0.0, positive, -positive) + 1.0)


def gradients_rounded(gradients: Gradients) -> Gradients:
    """Round to 8 bits."""
    bits = SIGNIFICANT_BITS["bfloat16"]
    return {
        name: round_to_bits(gradient.astype(np.float64), bits).astype(gradient.dtype)
        for name, gradient in gradients.items()
    }


GROUP = group("precision", clause="PRC-2")
bug = GROUP.bug


BUGS = (
    bug(
        "tf32_everywhere",
        "All products are computed from factors with 11 bits, forward and backward.",
        first=(QUERY,),
        cause="tf32_products",
        change=every_product(forward_and_backward("tf32")),
    ),
    bug(
        "tf32_in_scores",
        "The product of queries and keys is computed from factors with 11 bits.",
        first=(f"{NAME}.scores",),
        cause="tf32_products",
        change=edited(product(forward_and_backward("tf32")), "*attention.scores"),
    ),
    bug(
        "tf32_in_one_projection",
        "The value projection is computed from factors with 11 bits.",
        first=(f"{NAME}.value",),
        cause="tf32_products",
        change=edited(product(forward_and_backward("tf32")), "*attention.value"),
    ),
    bug(
        "tf32_backward",
        "The products of the backward pass are computed from factors with 11 bits.",
        first=("gradients.classifier.weight",),
        change=every_product(backward("tf32")),
        cause="tf32_products",
    ),
    bug(
        "bfloat16_products",
        "All products are computed from factors with 8 bits: autocast was left on.",
        first=(QUERY,),
        change=every_product(forward_and_backward("bfloat16")),
        cause="bfloat16_products",
    ),
    bug(
        "float32_products",
        "All products are computed from factors in float32, in float64 too.",
        first=(QUERY,),
        input="any, in float64",
        equivalent={"float32": "float32 is what is asked for"},
        change=every_product(forward_and_backward("float32")),
        cause="float32_products",
    ),
    bug(
        "activation_stored_in_bfloat16",
        "What the activation gives is stored with 8 bits.",
        first=("layers.0.feed_forward.activation",),
        change=edited(stored("bfloat16"), "*.feed_forward.activation"),
        cause="stored_in_bfloat16",
    ),
    bug(
        "residual_stored_in_bfloat16",
        "The sum with the residual is stored with 8 bits.",
        first=("layers.0.residual1",),
        change=edited(stored("bfloat16"), "*.residual1", "*.residual2"),
        cause="stored_in_bfloat16",
    ),
    bug(
        "softmax_in_bfloat16",
        "The softmax is computed with 8 bits.",
        first=(f"{NAME}.weights",),
        change=softmax_in("bfloat16"),
        clause="ATT-5",
    ),
    bug(
        "softmax_in_float16",
        "The softmax is computed with 11 bits.",
        first=(f"{NAME}.weights",),
        change=softmax_in("float16"),
        clause="ATT-5",
    ),
    bug(
        "norm_in_bfloat16",
        "The norm is given and gives numbers with 8 bits.",
        first=("embeddings.norm",),
        change=edited(norm_in_bfloat16, *NORMS),
        cause="computed_in_bfloat16",
    ),
    bug(
        "norm_variance_by_squares",
        "The variance is E[x²] - E[x]², which loses digits where the mean is large.",
        scenario="offset",
        first=("embeddings.norm",),
        input="a mean far larger than the deviation",
        alone=True,
        change=edited(variance_by_squares, *NORMS),
        cause="variance_by_squares",
        clause="NRM-2",
    ),
    bug(
        "loss_in_bfloat16",
        "The log-softmax is computed with 8 bits.",
        first=("log_probabilities",),
        change=edited(stored("bfloat16"), "log_probabilities"),
        cause="stored_in_bfloat16",
    ),
    bug(
        "logits_in_bfloat16",
        "Logits are stored with 8 bits.",
        first=("logits",),
        change=edited(stored("bfloat16"), "logits"),
        cause="stored_in_bfloat16",
    ),
    bug(
        "gradients_in_bfloat16",
        "Gradients are rounded to 8 bits on their way.",
        first=("gradients.classifier.bias",),
        change=handed_out(gradients_rounded),
        cause="stored_in_bfloat16",
    ),
    bug(
        "weight_through_float16",
        "One weight matrix was stored in float16.",
        first=("layers.0.feed_forward.outer",),
        change=weight("layers.0.feed_forward.outer.weight", through("float16")),
        cause="weight_in_float16",
    ),
    bug(
        "weight_through_bfloat16",
        "One weight matrix was stored in bfloat16.",
        first=("layers.0.feed_forward.outer",),
        change=weight("layers.0.feed_forward.outer.weight", through("bfloat16")),
        cause="weight_in_bfloat16",
    ),
    bug(
        "positions_through_float16",
        "The position table was stored in float16.",
        variant="vanilla-encoder",
        first=("embeddings.position",),
        change=weight("embeddings.position.weight", through("float16")),
        cause="weight_in_float16",
    ),
    bug(
        "mask_constant_through_float32",
        "The mask's constant -2^32 + 1 went through float32 and is -2^32.",
        variant="tf1-text-classifier",
        first=(f"{NAME}.masked_scores",),
        input="padding, in float64",
        equivalent={"float32": "float32 has no other number for -2^32 + 1"},
        change=option(mask_value=-4294967296.0),
        cause="mask_value",
        clause="MSK-2",
    ),
    bug(
        "erf_by_polynomial",
        "erf is approximated to 1.5e-7.",
        input="any, in float64",
        first=("layers.0.feed_forward.activation",),
        change=edited(of_source(erf_by_polynomial), "*.feed_forward.activation"),
        clause="FFN-2",
    ),
)
