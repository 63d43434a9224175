"""Array operations under the same names in all four frameworks and on the tape.

What edits of taps are written in.

Arithmetic operators, comparisons, ``~`` and ``&`` of masks, indexing with slices and ``None`` and ``.shape``
mean the same in all of them and are used as they are. Everything else is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A tensor of the framework at hand."""

SIGNIFICANT_BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}
"""Of each number format that :meth:`TensorOperations.round_to` knows, the leading one included."""


class TensorOperations(ABC):
    """The operations that bugs are written in."""

    # Arithmetic.

    @abstractmethod
    def einsum(self, subscripts: str, a: Array, b: Array) -> Array:
        """Contract two tensors."""

    @abstractmethod
    def sum(self, x: Array, axis: int | None = None) -> Array:
        """Sum over an axis, which stays with size 1, or over all to a scalar."""

    @abstractmethod
    def max(self, x: Array, axis: int) -> Array:
        """Return the largest entries along an axis, which stays with size 1."""

    @abstractmethod
    def sqrt(self, x: Array) -> Array:
        """Square root."""

    @abstractmethod
    def exp(self, x: Array) -> Array:
        """Exponential function."""

    @abstractmethod
    def log(self, x: Array) -> Array:
        """Natural logarithm."""

    @abstractmethod
    def tanh(self, x: Array) -> Array:
        """Hyperbolic tangent."""

    @abstractmethod
    def erf(self, x: Array) -> Array:
        """Error function."""

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """Logistic function."""

    @abstractmethod
    def relu(self, x: Array) -> Array:
        """Positive part."""

    @abstractmethod
    def softmax(self, x: Array, axis: int) -> Array:
        """Softmax along an axis."""

    @abstractmethod
    def log_softmax(self, x: Array, axis: int) -> Array:
        """Logarithm of the softmax along an axis."""

    # Layout and selection.

    @abstractmethod
    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Return the same numbers in another shape, in row-major order."""

    @abstractmethod
    def transpose(self, x: Array, axes: Sequence[int]) -> Array:
        """Permute axes."""

    @abstractmethod
    def concat(self, parts: Sequence[Array], axis: int) -> Array:
        """Join along an axis."""

    @abstractmethod
    def where(self, condition: Array, a: Array, b: Array | float) -> Array:
        """Choose between a tensor and another or a constant; the condition may be a NumPy array."""

    @abstractmethod
    def take(self, table: Array, ids: Array) -> Array:
        """Look up rows: (…) to (…, D)."""

    # From NumPy.

    @abstractmethod
    def constant(self, values: NDArray[Any], like: Array | None = None) -> Array:
        """Return an array as a tensor, in the precision of another tensor if one is given."""

    @abstractmethod
    def dtype(self, x: Array) -> str:
        """Return the name of a tensor's precision."""

    # Gradients.

    @abstractmethod
    def stop_gradient(self, x: Array) -> Array:
        """Return the same values; no gradient flows back."""

    @abstractmethod
    def with_gradient(self, x: Array, function: Callable[[Array], Array]) -> Array:
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
        cut = {"float64": 53, "float32": 24}[self.dtype(x)] - SIGNIFICANT_BITS[number_format]
        if cut <= 0:
            return x
        swollen = x * float(2**cut + 1)
        return swollen - (swollen - x)


class FrameworkOperations(TensorOperations):
    """The operations of one framework, and where its models keep their parameters."""

    def opaque(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function that compilers call while they trace, and whose code they do not read."""
        return function

    @abstractmethod
    def held(self, layer: Any, kind: str) -> Array:
        """Return a parameter of a layer in its canonical layout, or None.

        Args:
            kind: of the parameter (:class:`concord.spec.parameters.Parameter`).
        """

    def submodule(self, owner: Any, name: str) -> Any:
        """Return a submodule by a word of its canonical name."""
        return getattr(owner, name)

    def parameters(self, model: Any, kinds: Mapping[str, str]) -> dict[str, Array]:
        """Return the parameters of a model, by canonical name, without those that a layer of the framework
        keeps in a form of its own.

        Args:
            kinds: of the parameters, by canonical name.
        """
        found = {}
        for name, kind in kinds.items():
            try:
                found[name] = self.parameter(model, name, kind)
            except AttributeError:
                continue
        return found

    def parameter(self, model: Any, name: str, kind: str) -> Array:
        """Return a parameter of a model in its canonical layout.

        Args:
            name: the canonical name.
            kind: of the parameter (:class:`concord.spec.parameters.Parameter`).
        """
        owner = model
        for word in name.split(".")[:-1]:
            owner = owner[int(word)] if word.isdigit() else self.submodule(owner, word)
        return self.held(owner, kind)
