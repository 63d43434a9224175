"""Bugs of precision: something is computed, or stored, with fewer bits than asked for (SPEC PRC-1 to PRC-3,
ATT-5).

Products round their factors to a shorter format first, as tensor cores do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change, Edits, Gradients, in_last_layer, weight
from concord.conformance.bugs.context import Context, Contraction, directly
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, Array
from concord.spec.precision import precision, round_to_bits

ROLES = ("query", "key", "value")
LINEAR = (
    *PROJECTIONS,
    "*attention.output",
    "*.feed_forward.inner",
    "*.feed_forward.outer",
    "pooler.dense",
    "logits",
)
"""The taps that come from a linear layer."""

PRODUCTS = (*LINEAR, "*attention.scores", "*attention.context")
"""The taps that come from a product."""


def shortened(m: Context, number_format: str, cut: bool = False) -> Contraction:
    """Return products of rounded factors, or factors cut off, of the forward pass and of derivatives."""
    shorten, passed = (m.cut_to, m.cut_off) if cut else (m.round_to, m.rounded)

    def contract(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        result = multiply(shorten(a, number_format), shorten(b, number_format))
        return m.with_gradient(result, lambda gradient: passed(gradient, number_format))

    return contract


def product(m: Context, contract: Contraction) -> Array:
    """Take the product of a tap in another way, and those before it that stay inside a fused kernel."""
    name, m.contract = m.tap.rpartition(".")[2], contract
    if name in ("scores", "context"):
        result = m.scores() if name == "scores" else m.context(m.used_weights)
    else:
        result = m.projected()
        result = m.activation(result, m.config.qkv_activation) if name in ROLES else result
    m.contract = directly
    return result


def products(m: Context, number_format: str, cut: bool = False) -> Array:
    """Take a product, and its derivatives, of factors in a shorter format."""
    return product(m, shortened(m, number_format, cut))


def tf32_backward(m: Context) -> Array:
    """Round both factors of the derivatives' products alone."""
    rounded = shortened(m, "tf32")
    return product(m, lambda multiply, a, b: m.value_of(multiply(a, b), rounded(multiply, a, b)))


EMULATIONS: dict[str, Change] = {
    "tf32": Change(taps=PRODUCTS, edit=lambda m: products(m, "tf32")),
    "tf32_cut_off": Change(taps=PRODUCTS, edit=lambda m: products(m, "tf32", cut=True)),
}
"""What hardware does and is right to do: not bugs, but another precision.

What stands before ``_`` is whose rules apply.
"""


def variance_in(m: Context, number_format: str) -> Array:
    return m.norm(m.x, variance=lambda variance: m.round_to(variance, number_format))


def norm_deviation_by_one_step(m: Context) -> Array:
    """Refine a reciprocal of half precision by one step of Newton's method."""

    def refined(variance: Array) -> Array:
        rough = m.round_to(1.0 / m.deviation(variance), "bfloat16")
        squared = m.deviation(variance) * m.deviation(variance)
        return 1.0 / (rough * (1.5 - squared * rough * rough * 0.5))

    return m.norm(m.x, deviation=refined)


def through(r: Request, number_format: str, tap: str) -> Request:
    """Send the weight of a tap through a shorter format."""
    return weight(r, f"{tap}.weight", precision(number_format).round)


def softmax_exponential_approximate(m: Context) -> Array:
    """Take 2^f for a parabola between whole powers of two, with an error of 2e-3, by squaring ten times."""

    def exponential(x: Array) -> Array:
        root = m.where(x < -80.0, x * 0.0 - 80.0, x) / 1024.0
        power = root + root * root * 0.4 + 1.0
        for _ in range(10):
            power = power * power
        return power

    return m.softmax_by(exponential)


def softmax_in(m: Context, number_format: str) -> Array:
    """Return the softmax that is given and gives numbers of a shorter format."""
    return m.round_to(m.softmax(m.round_to(m.unnormalised, number_format), 3), number_format)


def variance_by_squares(m: Context) -> Array:
    """Compute the variance as E[x²] - E[x]²."""
    mean = m.mean(m.x, -1)
    return m.norm(m.x, variance=lambda variance: m.mean(m.x * m.x, -1) - mean * mean)


def erf_by_polynomial(m: Context) -> Array:
    """Approximate erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    z = m.x / math.sqrt(2.0)
    size = m.abs(z)
    t = 1.0 / (size * 0.3275911 + 1.0)
    polynomial = t * (
        t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592
    )
    positive = 1.0 - polynomial * m.exp(-size * size)
    return gelu_by(m, m.where(z > 0.0, positive, -positive))


def gradients_in_bfloat16(gradients: Gradients) -> Gradients:
    """Round to 8 bits."""
    bits = SIGNIFICANT_BITS["bfloat16"]
    return {
        name: round_to_bits(gradient.astype(np.float64), bits).astype(gradient.dtype)
        for name, gradient in gradients.items()
    }


EDITS: Edits = {
    "norm_in_bfloat16": lambda m: m.round_to(m.norm(m.round_to(m.x, "bfloat16")), "bfloat16"),
    "softmax_powers_in_bfloat16": lambda m: m.softmax_by(powers=lambda x: m.round_to(x, "bfloat16")),
    "softmax_of_float16_scores": lambda m: m.softmax(m.round_to(m.unnormalised, "float16"), 3),
    "softmax_reciprocal_in_float16": lambda m: m.softmax_by(
        total=lambda total: 1.0 / m.round_to(1.0 / total, "float16")
    ),
    "softmax_stored_in_bfloat16_last": in_last_layer(lambda m: m.round_to(m.y, "bfloat16")),
    "norm_mean_in_float16": lambda m: m.norm(m.x, center=lambda x, mean: x - m.round_to(mean, "float16")),
    "outer_in_tf32_last": in_last_layer(lambda m: products(m, "tf32")),
    "weights_in_bfloat16_for_context": lambda m: m.context(m.round_to(m.used_weights, "bfloat16")),
    "gelu_erf_in_bfloat16": lambda m: gelu_by(m, m.round_to(m.erf(m.x / math.sqrt(2.0)), "bfloat16")),
    "gradient_of_layer_in_bfloat16": lambda m: m.with_gradient(
        m.y, lambda gradient: m.rounded(gradient, "bfloat16")
    ),
}
