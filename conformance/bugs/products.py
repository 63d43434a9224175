"""Products whose factors are rounded to a shorter format first, as tensor cores do."""

from __future__ import annotations

from collections.abc import Callable

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change, edited
from concord.conformance.bugs.context import Context, Contraction, Edit, directly
from concord.conformance.bugs.operations import Array

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
        shorten, passed = (m.o.cut_to, m.o.cut_off) if cut else (m.o.round_to, m.o.rounded)

        def contract(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
            result = multiply(shorten(a, number_format), shorten(b, number_format))
            return m.o.with_gradient(result, lambda gradient: passed(gradient, number_format))

        return contract

    return multiplication


def backward(number_format: str) -> Multiplication:
    """Round both factors of the derivatives' products alone."""

    def multiplication(m: Context) -> Contraction:
        rounded = forward_and_backward(number_format)(m)
        return lambda multiply, a, b: m.o.value_of(multiply(a, b), rounded(multiply, a, b))

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


def every_product(multiplication: Multiplication) -> Change:
    """Return the change of all products of the model."""
    return edited(product(multiplication), *PRODUCTS)


EMULATIONS: dict[str, Change] = {
    "tf32": every_product(forward_and_backward("tf32")),
    "tf32_cut_off": every_product(forward_and_backward("tf32", cut=True)),
}
"""What hardware does and is right to do: not bugs, but another precision.

What stands before ``_`` is whose rules apply.
"""
