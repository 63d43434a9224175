"""Bugs of precision: something is computed, or stored, with fewer bits than asked for.

(SPEC PRC-1 to PRC-3, ATT-5).
"""

from __future__ import annotations

import numpy as np

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.bug import Gradients, group, handed_out, option
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.norms import NORMS, RESIDUALS
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, Array
from concord.conformance.bugs.products import backward, every_product, forward_and_backward, product
from concord.conformance.bugs.rounding import stored, through
from concord.spec.precision import round_to_bits

QUERY, OUTER = "layers.0.attention.query", "layers.0.feed_forward.outer"


def softmax_in(number_format: str) -> Edit:
    """Return the softmax that is given and gives numbers of a shorter format."""
    return lambda m, y: stored(number_format)(m, m.o.softmax(m.o.round_to(m.unnormalised, number_format), 3))


def norm_in_bfloat16(m: Context, y: Array) -> Array:
    return m.o.round_to(m.norm(m.o.round_to(m.source(), "bfloat16")), "bfloat16")


def variance_by_squares(m: Context, y: Array) -> Array:
    """Compute the variance as E[x²] - E[x]²."""
    x = m.source()
    mean = m.o.mean(x, -1)
    return m.norm(x, variance=lambda variance: m.o.mean(x * x, -1) - mean * mean)


def erf_by_polynomial(m: Context, z: Array) -> Array:
    """Approximate erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    o, size = m.o, m.o.abs(z)
    t = 1.0 / (size * 0.3275911 + 1.0)
    polynomial = t * (
        t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592
    )
    positive = 1.0 - polynomial * o.exp(-size * size)
    return o.where(z > 0.0, positive, -positive)


def gradients_rounded(gradients: Gradients) -> Gradients:
    """Round to 8 bits."""
    bits = SIGNIFICANT_BITS["bfloat16"]
    return {
        name: round_to_bits(gradient.astype(np.float64), bits).astype(gradient.dtype)
        for name, gradient in gradients.items()
    }


bug = group("precision", clause="PRC-2").bug

BUGS = (
    bug(
        "tf32_everywhere",
        "All products are computed from factors with 11 bits, forward and backward.",
        every_product(forward_and_backward("tf32")),
        first=(QUERY,),
        cause="tf32_products",
    ),
    bug(
        "tf32_in_scores",
        "The product of queries and keys is computed from factors with 11 bits.",
        product(forward_and_backward("tf32")),
        "*attention.scores",
        cause="tf32_products",
    ),
    bug(
        "tf32_in_one_projection",
        "The value projection is computed from factors with 11 bits.",
        product(forward_and_backward("tf32")),
        "*attention.value",
        cause="tf32_products",
    ),
    bug(
        "tf32_backward",
        "The products of the backward pass are computed from factors with 11 bits.",
        every_product(backward("tf32")),
        first=("gradients.classifier.weight",),
        cause="tf32_products",
    ),
    bug(
        "bfloat16_products",
        "All products are computed from factors with 8 bits: autocast was left on.",
        every_product(forward_and_backward("bfloat16")),
        first=(QUERY,),
    ),
    bug(
        "float32_products",
        "All products are computed from factors in float32, in float64 too.",
        every_product(forward_and_backward("float32")),
        first=(QUERY,),
        input="any, in float64",
        equivalent={"float32": "float32 is what is asked for"},
    ),
    bug(
        "activation_stored_in_bfloat16",
        "What the activation gives is stored with 8 bits.",
        stored("bfloat16"),
        "*.feed_forward.activation",
        cause="stored_in_bfloat16",
    ),
    bug(
        "residual_stored_in_bfloat16",
        "The sum with the residual is stored with 8 bits.",
        stored("bfloat16"),
        *RESIDUALS,
        cause="stored_in_bfloat16",
    ),
    bug(
        "softmax_in_bfloat16",
        "The softmax is computed with 8 bits.",
        softmax_in("bfloat16"),
        "*attention.weights",
        clause="ATT-5",
    ),
    bug(
        "softmax_in_float16",
        "The softmax is computed with 11 bits.",
        softmax_in("float16"),
        "*attention.weights",
        clause="ATT-5",
    ),
    bug(
        "norm_in_bfloat16",
        "The norm is given and gives numbers with 8 bits.",
        norm_in_bfloat16,
        *NORMS,
        cause="computed_in_bfloat16",
    ),
    bug(
        "norm_variance_by_squares",
        "The variance is E[x²] - E[x]², which loses digits where the mean is large.",
        variance_by_squares,
        *NORMS,
        scenario="offset",
        input="a mean far larger than the deviation",
        alone=True,
        cause="variance_by_squares",
        clause="NRM-2",
    ),
    bug(
        "loss_in_bfloat16",
        "The log-softmax is computed with 8 bits.",
        stored("bfloat16"),
        "log_probabilities",
        cause="stored_in_bfloat16",
    ),
    bug(
        "logits_in_bfloat16",
        "Logits are stored with 8 bits.",
        stored("bfloat16"),
        "logits",
        cause="stored_in_bfloat16",
    ),
    bug(
        "gradients_in_bfloat16",
        "Gradients are rounded to 8 bits on their way.",
        handed_out(gradients_rounded),
        first=("gradients.classifier.bias",),
        cause="stored_in_bfloat16",
    ),
    bug(
        "weight_through_float16",
        "One weight matrix was stored in float16.",
        through("float16", OUTER),
        first=(OUTER,),
        cause="weight_in_float16",
    ),
    bug(
        "weight_through_bfloat16",
        "One weight matrix was stored in bfloat16.",
        through("bfloat16", OUTER),
        first=(OUTER,),
        cause="weight_in_bfloat16",
    ),
    bug(
        "positions_through_float16",
        "The position table was stored in float16.",
        through("float16", "embeddings.position"),
        variant="vanilla-encoder",
        first=("embeddings.position",),
        cause="weight_in_float16",
    ),
    bug(
        "mask_constant_through_float32",
        "The mask's constant -2^32 + 1 went through float32 and is -2^32.",
        option(mask_value=-4294967296.0),
        variant="tf1-text-classifier",
        first=("layers.0.attention.masked_scores",),
        input="padding, in float64",
        equivalent={"float32": "float32 has no other number for -2^32 + 1"},
        cause="mask_value",
        clause="MSK-2",
    ),
    bug(
        "erf_by_polynomial",
        "erf is approximated to 1.5e-7.",
        gelu_by(erf_by_polynomial),
        "*.feed_forward.activation",
        input="any, in float64",
        clause="FFN-2",
    ),
)
