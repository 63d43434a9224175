"""The arithmetic that the reference is written against: elementary operations that round, and their derivatives.

The reference never calls NumPy for a computed value. It calls the operations here, so that one text of the model
serves float64 and every other precision: after each elementary operation the result is rounded to the precision;
sums of products accumulate in the storage type. Reverse-mode derivatives are recorded on a tape as the operations run
and are computed by the same rounded operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.precision import precision

Values = NDArray[np.floating]
Pullback = Callable[[Values], Values]

_erf = np.frompyfunc(math.erf, 1, 1)


class Tensor:
    """A value on the tape, with the operands that it came from and how a gradient flows back to each."""

    __slots__ = ("gradient", "operands", "value")

    def __init__(self, value: Values, operands: Sequence[tuple[Tensor, Pullback]] = ()) -> None:
        self.value = value
        self.operands = operands
        self.gradient: Values | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class Arithmetic:
    """Elementary operations in one precision.

    Args:
        dtype: a name of :data:`spec.precision.PRECISIONS`.
        corner: where the slope of a ReLU changes from 0 to 1, as a share of the largest entry of its row. Rounding may
            put a number this close to zero on either side, and the gradient jumps there.
        shuffle: a seed; sums then run over their terms in an order drawn from it. Mathematically nothing changes.
        fused: whether softmax and derivatives keep the storage type between their steps, as fused kernels do, and round
            their result alone.

    Every operation takes and returns :class:`Tensor` objects of this arithmetic; constants are Python floats.
    """

    def __init__(self, dtype: str = "float64", corner: float = 0.0, shuffle: int | None = None, fused: bool = False) -> None:
        self.precision = precision(dtype)
        self.corner = corner
        self._generator = None if shuffle is None else np.random.default_rng(shuffle)
        self._step: Pullback = (lambda values: values) if fused else self.precision.round
        self._tape: list[Tensor] = []

    def leaf(self, values: NDArray[Any]) -> Tensor:
        """Return an input of the computation, rounded to the precision."""
        return Tensor(self.precision.round(values))

    # Sums and products.

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._record(a.value + b.value, (a, self._unbroadcast(a)), (b, self._unbroadcast(b)))

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        back = self._unbroadcast(b)
        return self._record(a.value - b.value, (a, self._unbroadcast(a)), (b, lambda g: -back(g)))

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        back_a, back_b = self._unbroadcast(a), self._unbroadcast(b)
        return self._record(
            a.value * b.value,
            (a, lambda g: back_a(self._step(g * b.value))),
            (b, lambda g: back_b(self._step(g * a.value))),
        )

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        back_a, back_b = self._unbroadcast(a), self._unbroadcast(b)
        quotient = self.precision.round(a.value / b.value)
        return self._record(
            quotient,
            (a, lambda g: back_a(self._step(g / b.value))),
            (b, lambda g: -back_b(self._step(g * quotient / b.value))),
        )

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """Multiply by a constant."""
        return self._record(a.value * self._constant(factor), (a, lambda g: g * self._constant(factor)))

    def divide_by(self, a: Tensor, divisor: float) -> Tensor:
        """Divide by a constant."""
        return self._record(a.value / self._constant(divisor), (a, lambda g: g / self._constant(divisor)))

    def shift(self, a: Tensor, summand: float) -> Tensor:
        """Add a constant."""
        return self._record(a.value + self._constant(summand), (a, lambda g: g))

    def einsum(self, subscripts: str, a: Tensor, b: Tensor) -> Tensor:
        """Contract two tensors, for example ``"bti,io->bto"``; no index may appear twice in one operand."""
        left, result = subscripts.split("->")
        index_a, index_b = left.split(",")

        def pull(wanted: str, other: Tensor, index: str) -> Pullback:
            return lambda g: self._contract(f"{result},{index}->{wanted}", g, other.value)

        value = self._contract(subscripts, a.value, b.value)
        return self._record(value, (a, pull(index_a, b, index_b)), (b, pull(index_b, a, index_a)))

    def sum(self, a: Tensor, axis: int | None = None) -> Tensor:
        """Sum over one axis, which stays with size 1, or over all of them to a scalar."""
        value = np.sum(self._reorder(a.value), axis=axis, keepdims=axis is not None)
        return self._record(value, (a, lambda g: np.broadcast_to(g, a.shape)))

    # Elementary functions.

    def sqrt(self, a: Tensor) -> Tensor:
        root = self.precision.round(np.sqrt(a.value))
        return self._record(root, (a, lambda g: g / (2 * root)))

    def tanh(self, a: Tensor) -> Tensor:
        value = self.precision.round(np.tanh(a.value))
        return self._record(value, (a, lambda g: g * (1 - value * value)))

    def erf(self, a: Tensor) -> Tensor:
        value = np.asarray(_erf(a.value), dtype=a.value.dtype)
        slope = 2 / math.sqrt(math.pi)
        return self._record(value, (a, lambda g: g * (np.exp(-a.value * a.value) * self._constant(slope))))

    def relu(self, a: Tensor) -> Tensor:
        steep = a.value > (self.corner * abs(a.value).max(-1, keepdims=True) if self.corner else 0)
        return self._record(np.maximum(a.value, 0), (a, lambda g: np.where(steep, g, 0)))

    def softmax(self, a: Tensor) -> Tensor:
        """Softmax over the last axis, with the largest entry taken off first."""
        exponentials = self._step(np.exp(self._step(a.value - a.value.max(-1, keepdims=True))))
        value = self.precision.round(exponentials / self._step(self._reorder(exponentials).sum(-1, keepdims=True)))

        def pullback(gradient: Values) -> Values:
            inner = self._step(self._reorder(gradient * value).sum(-1, keepdims=True))
            return value * self._step(gradient - inner)

        return self._record(value, (a, pullback))

    def log_softmax(self, a: Tensor) -> Tensor:
        """Logarithm of the softmax over the last axis."""
        shifted = self._step(a.value - a.value.max(-1, keepdims=True))
        value = shifted - self._step(np.log(self._step(self._reorder(np.exp(shifted)).sum(-1, keepdims=True))))

        def pullback(gradient: Values) -> Values:
            return gradient - np.exp(value) * self._step(gradient.sum(-1, keepdims=True))

        return self._record(value, (a, pullback))

    def sigmoid_cross_entropy(self, logits: Tensor, targets: Values) -> Tensor:
        """Binary cross-entropy of each logit against a target of 0 or 1, without overflow."""
        x = logits.value
        value = np.maximum(x, 0) - x * targets + np.log1p(np.exp(-abs(x)))
        return self._record(value, (logits, lambda g: g * (0.5 * (1 + np.tanh(0.5 * x)) - targets)))

    # Selection and layout: exact in every precision.

    def replace(self, a: Tensor, keep: NDArray[np.bool_], value: float) -> Tensor:
        """Put a constant wherever ``keep`` is False; no gradient flows there."""
        keep = np.broadcast_to(keep, a.shape)
        return self._record(np.where(keep, a.value, value), (a, lambda g: np.where(keep, g, 0)))

    def add_where(self, a: Tensor, keep: NDArray[np.bool_], value: float, rounded: str) -> Tensor:
        """Add a constant wherever ``keep`` is False, and round the sum as the precision ``rounded`` does (SPEC MSK-5)."""
        summed = precision(rounded).round(precision(rounded).round(a.value) + np.float64(value)).astype(a.value.dtype)
        return self._record(np.where(keep, a.value, summed), (a, lambda g: g))

    def freeze(self, a: Tensor, frozen: NDArray[np.bool_]) -> Tensor:
        """Return the same values; no gradient flows where ``frozen`` is True."""
        return self._record(a.value, (a, lambda g: np.where(frozen, 0, g)))

    def take(self, table: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Look up rows of a table: ``rows`` (…) to (…, D)."""

        def pullback(gradient: Values) -> Values:
            total = np.zeros_like(table.value)
            np.add.at(total, rows, gradient)
            return total

        return self._record(table.value[rows], (table, pullback))

    def index(self, a: Tensor, where: Any) -> Tensor:
        """Select with a NumPy index that picks every element at most once."""

        def pullback(gradient: Values) -> Values:
            full = np.zeros_like(a.value)
            full[where] = gradient
            return full

        return self._record(a.value[where], (a, pullback))

    def reshape(self, a: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self._record(a.value.reshape(shape), (a, lambda g: g.reshape(a.shape)))

    def concatenate(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        ends = np.cumsum([part.shape[axis] for part in parts])[:-1]

        def pull(i: int) -> Pullback:
            return lambda g: np.split(g, ends, axis)[i]

        value = np.concatenate([part.value for part in parts], axis)
        return self._record(value, *((part, pull(i)) for i, part in enumerate(parts)))

    # Derivatives.

    def backward(self, result: Tensor) -> None:
        """Leave in every tensor's ``gradient`` the derivative of a scalar result."""
        result.gradient = np.ones_like(result.value)
        for tensor in reversed(self._tape):
            if tensor.gradient is None:
                continue
            for operand, pullback in tensor.operands:
                part = self.precision.round(pullback(tensor.gradient))
                operand.gradient = part if operand.gradient is None else self.precision.round(operand.gradient + part)

    def _constant(self, value: float) -> Any:
        return self.precision.storage.type(value)

    def _record(self, value: Any, *operands: tuple[Tensor, Pullback]) -> Tensor:
        tensor = Tensor(self.precision.round(value), operands)
        self._tape.append(tensor)
        return tensor

    def _unbroadcast(self, operand: Tensor) -> Pullback:
        """Return how a gradient sums back to the shape of an operand that was broadcast."""

        def pullback(gradient: Values) -> Values:
            extra = gradient.ndim - len(operand.shape)
            axes = tuple(range(extra)) + tuple(i + extra for i, n in enumerate(operand.shape) if n == 1 != gradient.shape[i + extra])
            terms = self._reorder(gradient, axes[0]) if axes else gradient
            summed: Values = terms.sum(axes).reshape(operand.shape)
            return summed

        return pullback

    def _contract(self, subscripts: str, a: Values, b: Values) -> Values:
        left, result = subscripts.split("->")
        index_a, index_b = left.split(",")
        if self._generator:
            for index in sorted((set(index_a) & set(index_b)) - set(result)):
                order = self._generator.permutation(a.shape[index_a.index(index)])
                a, b = np.take(a, order, index_a.index(index)), np.take(b, order, index_b.index(index))
        contracted: Values = np.einsum(subscripts, a, b, optimize=True)
        return contracted

    def _reorder(self, values: Values, axis: int = -1) -> Values:
        """Return the terms of a sum in the order in which they are added."""
        return values if self._generator is None or not values.ndim else self._generator.permutation(values, axis=axis)
