"""Array operations under the same names in all four frameworks and on the tape.

What edits of taps are written in.

Arithmetic operators, comparisons, ``~`` and ``&`` of masks, indexing with slices and ``None`` and ``.shape``
mean the same in all of them and are used as they are. Everything else is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A tensor of the framework at hand."""

SIGNIFICANT_BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}
"""Of each number format that :meth:`TensorOperations.round_to` knows, the leading one included."""


Unary = Callable[[Array], Array]
"""Makes one tensor of another."""


class TensorOperations(ABC):
    """The operations that bugs are written in.

    Attributes:
        einsum: contracts two tensors.
        sqrt, exp, log, tanh, erf, sigmoid, relu: are taken element by element.
        softmax, log_softmax: are taken along an axis.
        reshape: returns the same numbers in another shape, in row-major order.
        transpose: permutes axes.
        concat: joins tensors along an axis.
        stop_gradient: returns the same values; no gradient flows back.
        dtype: the precision of tensors.
    """

    dtype: str
    einsum: Callable[[str, Array, Array], Array]
    sqrt: Unary
    exp: Unary
    log: Unary
    tanh: Unary
    erf: Unary
    sigmoid: Unary
    relu: Unary
    softmax: Callable[[Array, int], Array]
    log_softmax: Callable[[Array, int], Array]
    reshape: Callable[[Array, Sequence[int]], Array]
    transpose: Callable[[Array, Sequence[int]], Array]
    concat: Callable[[Sequence[Array], int], Array]
    stop_gradient: Unary

    @abstractmethod
    def sum(self, x: Array, axis: int | None = None) -> Array:
        """Sum over an axis, which stays with size 1, or over all to a scalar."""

    @abstractmethod
    def max(self, x: Array, axis: int) -> Array:
        """Return the largest entries along an axis, which stays with size 1."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """Choose between a tensor and another or a constant; the condition may be a NumPy array."""

    def take(self, table: Array, ids: Array) -> Array:
        """Look up rows: (…) to (…, D)."""
        return table[ids]

    @abstractmethod
    def constant(self, values: NDArray[Any], like: Array | None = None) -> Array:
        """Return an array as a tensor, in the precision of another tensor if one is given."""

    @abstractmethod
    def with_gradient(self, x: Array, function: Unary) -> Array:
        """Return the same values; the gradient that flows back is sent through a function."""

    # What follows from these.

    def mean(self, x: Array, axis: int) -> Array:
        """Mean along an axis, which stays with size 1."""
        return self.sum(x, axis) / float(tuple(x.shape)[axis])

    def within(self, x: Array, low: float, high: float) -> Array:
        """Return numbers, those beyond a limit set to it; no gradient flows there."""
        raised = self.where(x < low, x * 0.0 + low, x)
        return self.where(raised > high, raised * 0.0 + high, raised)

    def abs(self, x: Array) -> Array:
        """Return sizes without their signs."""
        return self.where(x > 0.0, x, -x)

    def add_where(self, visible: NDArray[np.bool_], x: Array, constant: float) -> Array:
        """Add a constant wherever a flag is False (SPEC MSK-5)."""
        return self.where(visible, x, x + constant)

    def squeeze(self, x: Array) -> Array:
        """Drop every axis of size 1."""
        return self.reshape(x, [size for size in tuple(x.shape) if size != 1])

    def value_of(self, value: Array, surrogate: Array) -> Array:
        """Return the values of one tensor with the gradient of another, unrounded."""
        return self.stop_gradient(value) + (surrogate - self.stop_gradient(surrogate))

    def instead(self, wrong: Array, right: Array) -> Array:
        """Return one tensor, to which the other adds the gradient zero.

        Some frameworks refuse to differentiate by what is not used at all.
        """
        shape = tuple(right.shape)
        return self.where(np.zeros(shape, bool), right, wrong) if shape == tuple(wrong.shape) else wrong

    def round_to(self, x: Array, number_format: str) -> Array:
        """Return the nearest numbers of a shorter format, ignoring its range.

        The gradient flows through unchanged.
        """
        return x + self.stop_gradient(self.rounded(x, number_format) - x)

    def cut_to(self, x: Array, number_format: str) -> Array:
        """Return the numbers of a shorter format next towards zero, ignoring its range.

        The gradient flows through unchanged.
        """
        return x + self.stop_gradient(self.cut_off(x, number_format) - x)

    def cut_off(self, x: Array, number_format: str) -> Array:
        """Return the numbers of a shorter format next towards zero, ignoring its range.

        Where rounding went away from zero, the one before is wanted: 1.25 units of 2^-bits of the number lie
        nearer to it than to any other, wherever in its binade it is.
        """
        nearest = self.rounded(x, number_format)
        before = self.rounded(nearest * (1.0 - 1.25 * 2.0 ** -SIGNIFICANT_BITS[number_format]), number_format)
        return self.where(
            (nearest > x) & (x > 0.0), before, self.where((nearest < x) & (x < 0.0), before, nearest)
        )

    def rounded(self, x: Array, number_format: str) -> Array:
        """Return the nearest numbers of a shorter format, ignoring its range.

        (Dekker and Veltkamp's splitting).
        """
        cut = {"float64": 53, "float32": 24}[self.dtype] - SIGNIFICANT_BITS[number_format]
        if cut <= 0:
            return x
        swollen = x * float(2**cut + 1)
        return swollen - (swollen - x)
