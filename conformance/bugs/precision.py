"""Bugs of precision: something is computed, or stored, with fewer bits than asked for (SPEC PRC-1 to PRC-3,
ATT-5).

Products round their factors to a shorter format first, as tensor cores do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change, Changes, Gradients, applied, weight
from concord.conformance.bugs.context import Context, Contraction, Edit, directly
from concord.conformance.bugs.gradients import passed
from concord.conformance.bugs.norms import normed
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, Array
from concord.spec.precision import precision, round_to_bits

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

Multiplication = Callable[[Context], Contraction]
"""Gives the way in which a model takes its products."""


def forward_and_backward(number_format: str, cut: bool = False) -> Multiplication:
    """Round both factors of every product, of the forward pass and of the derivatives, or cut them off."""

    def multiplication(m: Context) -> Contraction:
        shorten, passed = (m.cut_to, m.cut_off) if cut else (m.round_to, m.rounded)

        def contract(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
            result = multiply(shorten(a, number_format), shorten(b, number_format))
            return m.with_gradient(result, lambda gradient: passed(gradient, number_format))

        return contract

    return multiplication


def backward(number_format: str) -> Multiplication:
    """Round both factors of the derivatives' products alone."""

    def multiplication(m: Context) -> Contraction:
        rounded = forward_and_backward(number_format)(m)
        return lambda multiply, a, b: m.value_of(multiply(a, b), rounded(multiply, a, b))

    return multiplication


def again(m: Context, y: Array) -> Array:
    """Return the tap once more, from its product."""
    name = m.tap.rpartition(".")[2]
    if name in ("scores", "context"):
        return m.scores() if name == "scores" else m.context(m.used_weights)
    return m.again(y)


def product(multiplication: Multiplication) -> Edit:
    """Return the edit that takes the product of a tap in another way, and those before it that stay inside
    a fused kernel.
    """

    def edit(m: Context, y: Array) -> Array:
        m.contract = multiplication(m)
        result = again(m, y)
        m.contract = directly
        return result

    return edit


EMULATIONS: dict[str, Change] = {
    "tf32": Change(taps=PRODUCTS, edit=product(forward_and_backward("tf32"))),
    "tf32_cut_off": Change(taps=PRODUCTS, edit=product(forward_and_backward("tf32", cut=True))),
}
"""What hardware does and is right to do: not bugs, but another precision.

What stands before ``_`` is whose rules apply.
"""


def variance_in(number_format: str) -> Edit:
    return normed(variance=lambda m, variance: m.round_to(variance, number_format))


def deviation_by_one_step(m: Context, variance: Array) -> Array:
    """Refine a reciprocal of half precision by one step of Newton's method."""
    rough = m.round_to(1.0 / m.deviation(variance), "bfloat16")
    squared = m.deviation(variance) * m.deviation(variance)
    return 1.0 / (rough * (1.5 - squared * rough * rough * 0.5))


def linear_in_tf32(name: str) -> Edit:
    """Return the edit that rounds the factors of a linear layer's product to 11 bits."""

    def edit(m: Context, y: Array) -> Array:
        layer = f"{m.scope}.{name}" if m.scope else name
        product = m.round_to(m.source(), "tf32") @ m.round_to(m.weight(f"{layer}.weight"), "tf32")
        return m.reshape(m.biased(layer, product), tuple(y.shape))

    return edit


def in_last_layer(edit: Edit) -> Edit:
    return lambda m, y: edit(m, y) if m.layer == m.config.num_layers - 1 else y


def through(number_format: str, tap: str) -> Change:
    """Return the change that sends the weight of a tap through a shorter format."""
    return weight(f"{tap}.weight", precision(number_format).round)


def softmax_exponential_approximate(m: Context, y: Array) -> Array:
    """Take 2^f for a parabola between whole powers of two, with an error of 2e-3, by squaring ten times."""

    def exponential(x: Array) -> Array:
        root = m.where(x < -80.0, x * 0.0 - 80.0, x) / 1024.0
        power = root + root * root * 0.4 + 1.0
        for _ in range(10):
            power = power * power
        return power

    return m.softmax_by(exponential)


def softmax_in(number_format: str) -> Edit:
    """Return the softmax that is given and gives numbers of a shorter format."""
    return lambda m, y: m.round_to(m.softmax(m.round_to(m.unnormalised, number_format), 3), number_format)


def variance_by_squares(m: Context, y: Array) -> Array:
    """Compute the variance as E[x²] - E[x]²."""
    x = m.source()
    mean = m.mean(x, -1)
    return m.norm(x, variance=lambda variance: m.mean(x * x, -1) - mean * mean)


def erf_by_polynomial(m: Context, z: Array) -> Array:
    """Approximate erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    size = m.abs(z)
    t = 1.0 / (size * 0.3275911 + 1.0)
    polynomial = t * (
        t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592
    )
    positive = 1.0 - polynomial * m.exp(-size * size)
    return m.where(z > 0.0, positive, -positive)


def gradients_in_bfloat16(gradients: Gradients) -> Gradients:
    """Round to 8 bits."""
    bits = SIGNIFICANT_BITS["bfloat16"]
    return {
        name: round_to_bits(gradient.astype(np.float64), bits).astype(gradient.dtype)
        for name, gradient in gradients.items()
    }


EDITS: Changes = {
    "tf32_everywhere": product(forward_and_backward("tf32")),
    "tf32_backward": product(backward("tf32")),
    "bfloat16_products": product(forward_and_backward("bfloat16")),
    "float32_products": product(forward_and_backward("float32")),
    "norm_in_bfloat16": lambda m, y: m.round_to(m.norm(m.round_to(m.source(), "bfloat16")), "bfloat16"),
    "erf_by_polynomial": gelu_by(erf_by_polynomial),
    "softmax_powers_in_bfloat16": lambda m, y: m.softmax_by(powers=lambda x: m.round_to(x, "bfloat16")),
    "softmax_of_float16_scores": lambda m, y: m.softmax(m.round_to(m.unnormalised, "float16"), 3),
    "softmax_reciprocal_in_float16": lambda m, y: m.softmax_by(
        total=lambda total: 1.0 / m.round_to(1.0 / total, "float16")
    ),
    "softmax_stored_in_bfloat16_last": in_last_layer(applied("round_to", "bfloat16")),
    "norm_mean_in_float16": normed(center=lambda m, x, mean: x - m.round_to(mean, "float16")),
    "norm_deviation_by_one_step": normed(deviation=deviation_by_one_step),
    "outer_in_tf32_last": in_last_layer(linear_in_tf32("outer")),
    "context_in_tf32": lambda m, y: m.context(
        m.round_to(m.used_weights, "tf32"), m.round_to(m.beside("value"), "tf32")
    ),
    "weights_in_bfloat16_for_context": lambda m, y: m.context(m.round_to(m.used_weights, "bfloat16")),
    "gelu_erf_in_bfloat16": gelu_by(lambda m, z: m.round_to(m.erf(z), "bfloat16")),
    "gradient_of_layer_in_bfloat16": passed(lambda m, gradient: m.rounded(gradient, "bfloat16")),
}
