"""Array operations with identical names in all four frameworks and on the tape.

Operators, comparisons, ``~`` and ``&`` of masks, slices, ``None`` and ``.shape`` work everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A tensor of the framework or tape."""

SIGNIFICANT_BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}
"""Significant bits of each number format, the leading one included."""


Unary = Callable[[Array], Array]


class TensorOperations(ABC):
    """The operations that bugs use.

    Attributes:
        stop_gradient: returns the same values; no gradient flows back.
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
        """Sum over an axis, kept with size 1, or over all."""

    @abstractmethod
    def max(self, x: Array, axis: int) -> Array:
        """The maximum along an axis, kept with size 1."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """Choose between two tensors, or a tensor and a constant; the condition may be a NumPy array."""

    def take(self, table: Array, ids: Array) -> Array:
        """Look up rows: (…) to (…, D)."""
        return table[ids]

    @abstractmethod
    def constant(self, values: NDArray[Any], like: Array | None = None) -> Array:
        """Convert an array to a tensor, in the precision of ``like`` if given."""

    @abstractmethod
    def with_gradient(self, x: Array, function: Unary) -> Array:
        """Keep the values, and apply a function to the gradient that flows back."""

    # Derived operations.

    def mean(self, x: Array, axis: int) -> Array:
        return self.sum(x, axis) / float(tuple(x.shape)[axis])

    def within(self, x: Array, low: float, high: float) -> Array:
        """Clamp values; no gradient flows to values beyond a limit."""
        raised = self.where(x < low, x * 0.0 + low, x)
        return self.where(raised > high, raised * 0.0 + high, raised)

    def abs(self, x: Array) -> Array:
        return self.where(x > 0.0, x, -x)

    def add_where(self, visible: NDArray[np.bool_], x: Array, constant: float) -> Array:
        """Add a constant wherever a flag is False (SPEC MSK-5)."""
        return self.where(visible, x, x + constant)

    def squeeze(self, x: Array) -> Array:
        return self.reshape(x, [size for size in tuple(x.shape) if size != 1])

    def value_of(self, value: Array, surrogate: Array) -> Array:
        """Return one tensor's values with another's gradient, unrounded."""
        return self.stop_gradient(value) + (surrogate - self.stop_gradient(surrogate))

    def with_zero_gradient_to(self, wrong: Array, right: Array) -> Array:
        """Return ``wrong``, with a zero gradient to ``right``.

        Some frameworks cannot differentiate with respect to unused tensors.
        """
        shape = tuple(right.shape)
        return self.where(np.zeros(shape, bool), right, wrong) if shape == tuple(wrong.shape) else wrong

    def round_to(self, x: Array, number_format: str) -> Array:
        """Round to a shorter format, ignoring its range; the gradient is unchanged."""
        return x + self.stop_gradient(self.rounded(x, number_format) - x)

    def cut_to(self, x: Array, number_format: str) -> Array:
        """Truncate to a shorter format, ignoring its range; the gradient is unchanged."""
        return x + self.stop_gradient(self.cut_off(x, number_format) - x)

    def cut_off(self, x: Array, number_format: str) -> Array:
        """Truncate to a shorter format, ignoring its range."""
        # Where rounding went away from zero, take the preceding value. It is nearest to the value reduced by
        # 1.25 units of 2^-bits, at any place in its binade.
        nearest = self.rounded(x, number_format)
        before = self.rounded(nearest * (1.0 - 1.25 * 2.0 ** -SIGNIFICANT_BITS[number_format]), number_format)
        return self.where(
            (nearest > x) & (x > 0.0), before, self.where((nearest < x) & (x < 0.0), before, nearest)
        )

    def rounded(self, x: Array, number_format: str) -> Array:
        """Round to a shorter format, ignoring its range, with Dekker and Veltkamp's splitting."""
        cut = {"float64": 53, "float32": 24}[self.dtype] - SIGNIFICANT_BITS[number_format]
        if cut <= 0:
            return x
        swollen = x * float(2**cut + 1)
        return swollen - (swollen - x)
