"""Products whose factors are rounded to a shorter format first, as tensor cores do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.faults.fault import Change, steps
from conformance.faults.operations import Array, Operations
from conformance.mutants.rewrites import Attend, FeedForward, Head, MultiHead
from conformance.mutants.surgery import Steps

WITH_PRODUCTS = (Attend, MultiHead, FeedForward, Head)
"""The families that contain every product of the model."""

Contraction = Callable[[Operations, Callable[[Array, Array], Array], Array, Array], Array]
"""Takes the operations, what contracts two tensors, and the two tensors."""


def forward_and_backward(number_format: str, cut: bool = False) -> Contraction:
    """Round both factors of every product, of the forward pass and of the derivatives, or cut them off."""

    def contract(o: Operations, product: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        shorten = o.cut_to if cut else o.round_to
        result = product(shorten(a, number_format), shorten(b, number_format))
        return o.with_gradient(result, lambda gradient: (o.cut_off if cut else o.rounded)(gradient, number_format))

    return contract


def backward(number_format: str) -> Contraction:
    """Round both factors of the derivatives' products alone."""
    rounded = forward_and_backward(number_format)
    return lambda o, product, a, b: o.value_of(product(a, b), rounded(o, product, a, b))


def every_product(contraction: Contraction) -> Change:
    """Return the change of all products of the model."""

    def product(family: Steps, subscripts: str, a: Array, b: Array) -> Array:
        return contraction(family.o, lambda x, y: family.o.einsum(subscripts, x, y), a, b)

    def linear(family: Steps, layer: Any, x: Array) -> Array:
        result, bias = contraction(family.o, lambda y, w: y @ w, x, family.o.weight(layer)), family.o.bias(layer)
        return result if bias is None else result + bias

    return steps(*WITH_PRODUCTS, product=product, linear=linear)


EMULATIONS: dict[str, Change] = {
    "tf32": every_product(forward_and_backward("tf32")),
    "tf32_cut_off": every_product(forward_and_backward("tf32", cut=True)),
}
"""What hardware does and is right to do: not bugs, but another precision. What stands before ``_`` is whose rules apply."""
