"""Softmax, its logarithm, and the weighted sum that it is for, in every admissible way.

(SPEC ALG-1 to ALG-4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.precision import Precision
from concord.spec.tape import FUNCTION, Node, Pullback, RowSums, Values

WAYS = ("weights", "logarithm", "output")
"""Admissible ways to compute attention weights and their derivative (SPEC ALG-1 to ALG-3).

``weights``: exponentials divided by their
sum, the derivative from the weights. ``logarithm``: the exponential of the scores less the logarithm of the
sum, and once more for the derivative. ``output``: by a running maximum over blocks of keys, the derivative by
the row sums of output times gradient.
"""

BLOCKS = 4
"""Blocks of keys that the running maximum goes through."""


class Softmax(ABC):
    """What an arithmetic computes attention weights and cross-entropy by.

    The base of :class:`concord.spec.arithmetic.Arithmetic`.
    """

    precision: Precision
    way: str
    recording: bool

    @abstractmethod
    def settle(self, values: Values, units: float = 1.0, absolute: float = 0.0) -> Values:
        """Return the result of an operation as the arithmetic yields it."""

    @abstractmethod
    def step(self, values: Values, units: float = 1.0) -> Values:
        """Settle a step within an operation, which fused kernels do not round."""

    @abstractmethod
    def einsum(self, subscripts: str, a: Node, b: Node) -> Node:
        """Contract two tensors."""

    @abstractmethod
    def _sum(
        self, values: Values, axes: tuple[int, ...], keepdims: bool, internal: bool = False
    ) -> Values: ...

    @abstractmethod
    def _shifted(self, a: Node, floor: float | Values | None) -> Values: ...

    @abstractmethod
    def _record(self, value: Any, *operands: tuple[Node, Pullback]) -> Node: ...

    def softmax(
        self,
        a: Node,
        floor: float | Values | None = None,
        visible: NDArray[np.bool_] | None = None,
        sums: RowSums | None = None,
    ) -> Node:
        """Softmax over the last axis, with the largest entry taken off first.

        Args:
            floor: below which what remains is clipped; one number, or what can be broadcast with ``a``.
            visible: where an entry is no mask constant, if any is one: beside a constant the logarithm of a
                row's sum is lost.
            sums: where :meth:`attend` leaves the row sums that the derivative may be computed from.
        """
        exponentials = self.step(np.exp(self._shifted(a, floor)), FUNCTION)
        total = self._sum(exponentials, (-1,), True, internal=True)
        value = self.settle(exponentials / total)
        rows = None if visible is None else np.broadcast_to(visible, a.shape).any(-1, keepdims=True)

        def logarithms() -> Values:
            found = self.step(a.value.max(-1, keepdims=True) + self.step(np.log(total), FUNCTION))
            return found if rows is None else np.where(rows, found, np.nan)

        value = self.vary_softmax(value, a.value, floor, logarithms)

        def pullback(gradient: Values) -> Values:
            again = self.vary_softmax(value, a.value, floor, logarithms)
            terms = self.step(gradient * again)
            inner = self._sum(terms, (-1,), True, internal=True)
            if sums is not None and sums.products is not None:
                inner = self.vary_row_sums(inner, sums.products)
            return self.vary_largest(self.settle(again * self.step(gradient - inner)), a.value, terms, again)

        return self._record(value, (a, pullback))

    def attend(self, weights: Node, values: Node, sums: RowSums | None = None) -> Node:
        """Sum values by attention weights: (B, H, Q, S), (B, S, H, K) to (B, Q, H, K).

        Args:
            sums: where the row sums of output times gradient are left.
        """
        result = self.einsum("bhqs,bshk->bqhk", weights, values)
        if not self.recording:
            return result
        (_, to_weights), to_values = result.operands

        def pullback(gradient: Values) -> Values:
            if sums is not None:
                sums.products = np.moveaxis(gradient * result.value, -3, -2)  # (B, H, Q, K)
            return to_weights(gradient)

        result.operands = ((weights, pullback), to_values)
        return result

    def log_softmax(self, a: Node, floor: float | None = None) -> Node:
        """Logarithm of the softmax over the last axis; ``floor`` as in :meth:`softmax`."""
        shifted = self._shifted(a, floor)
        total = self._sum(self.step(np.exp(shifted), FUNCTION), (-1,), True, internal=True)
        value = self.settle(shifted - self.step(np.log(total), FUNCTION))
        value = self.vary_log_softmax(
            value,
            a.value,
            lambda: self.step(a.value.max(-1, keepdims=True) + self.step(np.log(total), FUNCTION)),
            floor,
        )

        def pullback(gradient: Values) -> Values:
            share = self.step(np.exp(value), FUNCTION)
            result = self.settle(
                gradient - self.step(share * self._sum(gradient, (-1,), True, internal=True))
            )
            return self.vary_largest(result, a.value, gradient, share)

        return self._record(value, (a, pullback))

    # What admissible ways to compute attention and cross-entropy differ in (SPEC ALG-1 to ALG-4).

    def vary_softmax(
        self, value: Values, x: Values, floor: float | Values | None, logarithms: Callable[[], Values]
    ) -> Values:
        """Return the softmax in the way of this arithmetic.

        Args:
            value: as it is computed most plainly.
            x: what it is the softmax of.
            logarithms: gives those of the sums of the rows' exponentials, NaN where they say too little.
        """
        if self.way == "output" and floor is None:
            return self._softmax_by_blocks(x)
        if self.way != "logarithm":
            return value
        found = logarithms()
        below = self.step(x - found)
        below = below if floor is None else np.maximum(below, np.asarray(floor, self.precision.storage))
        return np.where(np.isnan(found), value, self.settle(np.exp(below), FUNCTION))

    def vary_log_softmax(
        self, value: Values, x: Values, logarithms: Callable[[], Values], floor: float | None
    ) -> Values:
        """Return the logarithm of the softmax in the way of this arithmetic.

        Arguments as of :meth:`vary_softmax`.
        """
        return self.settle(x - logarithms()) if self.way == "logarithm" and floor is None else value

    def vary_row_sums(self, sums: Values, products: Values) -> Values:
        """Return the row sums of weights times their gradient in the way of this arithmetic.

        Args:
            products: of outputs and their gradients, whose sums they are too.
        """
        return self._sum(products, (-1,), True, internal=True) if self.way == "output" else sums

    def vary_largest(self, gradient: Values, x: Values, terms: Values, shares: Values) -> Values:  # noqa: ARG002 - what perturbs it needs them
        """Return the gradient of a softmax, or of its logarithm, as another admissible way would yield it.

        Here, as it is.

        Args:
            gradient: terms less shares times the row sum of the terms, so that each row sums to zero but for
                rounding.
            x: what the softmax is of.
        """
        return gradient

    def _softmax_by_blocks(self, x: Values) -> Values:
        """Return the softmax by a running maximum.

        What came before is rescaled when a larger entry appears.
        """
        width = max(1, -(-x.shape[-1] // BLOCKS))
        top, total = x[..., :1], np.zeros_like(x[..., :1])
        parts: list[Values] = []
        for start in range(0, x.shape[-1], width):
            block = x[..., start : start + width]
            larger = np.maximum(top, block.max(-1, keepdims=True))
            shrunk = self.step(np.exp(self.step(top - larger)), FUNCTION)
            exponentials = self.step(np.exp(self.step(block - larger)), FUNCTION)
            parts = [*(self.step(part * shrunk) for part in parts), exponentials]
            total = self.step(self.step(total * shrunk) + self._sum(exponentials, (-1,), True, internal=True))
            top = larger
        return self.settle(np.concatenate(parts, axis=-1) / total)
