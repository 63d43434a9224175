"""The arithmetic that the reference is written against.

Elementary operations that round, and their derivatives.

The reference never calls NumPy for a computed value. It calls the operations here, so that one text of the
model serves every kind of arithmetic: exact in float64, rounded to a precision after each operation, or
perturbed at random after each operation by as much as rounding may (:mod:`concord.spec.montecarlo`).
Reverse-mode derivatives are recorded on a tape, and computed by them too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Array, Ids, Mask
from concord.spec.elementary import contract, count_terms, erf, logistic
from concord.spec.precision import precision
from concord.spec.tape import FUNCTION, Node, Pullback, RowSums

WAYS = ("weights", "logarithm", "output")
"""Admissible ways to compute attention weights and their derivative (SPEC ALG-1 to ALG-3).

``weights``: exponentials divided by their
sum, the derivative from the weights. ``logarithm``: the exponential of the scores less the logarithm of the
sum, and once more for the derivative. ``output``: by a running maximum over blocks of keys, the derivative by
the row sums of output times gradient.
"""

BLOCKS = 4
"""Blocks of keys that the running maximum goes through."""


class Arithmetic:
    """Elementary operations in one precision.

    Args:
        dtype: a name of :data:`concord.spec.precision.PRECISIONS` or :data:`concord.spec.precision.MODES`.
        corner: where the slope of a ReLU changes from 0 to 1, as a share of the largest entry of its row.
            Rounding may put a number this close to zero on either side, and the gradient jumps there.
        shuffle: a seed; sums then run over their terms in an order drawn from it. Mathematically nothing
            changes.
        fused: whether softmax and derivatives keep the storage type between their steps, as fused kernels do,
            and round their result alone.
        strict: whether what is too large for the precision becomes NaN, which taints all that depends on it,
            and not infinity, from which a quotient may come back looking sound.
        cut: whether factors of products are cut off where the precision shortens them (TF32), instead of
            rounded.
        way: one of :data:`WAYS`, in which attention weights and their derivative are
            computed; with another than the first, :attr:`closed`, the derivative of a layer norm is that of
            its closed form, and decay is a product (SPEC OPT-6).

    Every operation takes and returns :class:`Node` objects of this arithmetic; constants are Python floats.
    Arrays may have :attr:`lead` leading axes that are not part of a tensor's shape.
    """

    lead = samples = 0
    narrow_bias_gradients = False
    """Whether those are summed in bfloat16 itself, in a run of that precision.

    (:data:`concord.spec.deviations.KNOWN_DEVIATIONS`).
    """
    blind_rows_zero = False
    """Whether weights of attention of a row that sees no key are zero."""

    def __init__(
        self,
        dtype: str = "float64",
        corner: float = 0.0,
        shuffle: int | None = None,
        fused: bool = False,
        strict: bool = False,
        cut: bool = False,
        way: str = "weights",
    ) -> None:
        self.precision = precision(dtype)
        self.corner, self.way, self.closed = corner, way, way != "weights"
        self.elements, self.recording, self.keeping = 0, True, False
        self._generator = None if shuffle is None else np.random.default_rng(shuffle)
        self._fused, self._strict, self._cut = fused, strict, cut
        self._tape: list[Node] = []

    def leaf(self, values: NDArray[Any]) -> Node:
        """Return an input of the computation, rounded to the precision."""
        rounded = self.precision.round(values)
        return Node(rounded.reshape((1,) * self.lead + rounded.shape), rounded.shape, taped=False)

    def override(self, a: Node, values: NDArray[Any], unrounded: bool = False) -> Node:
        """Return given values in place of computed ones; gradients flow to where those came from.

        Args:
            unrounded: whether what follows may have seen them before they were rounded.
        """
        return self._replacing(a, self.leaf(values).value)

    def _replacing(self, a: Node, values: Array) -> Node:
        given = self._record(values, (a, lambda g: g))
        given.hidden = a.hidden
        return given

    def uncertain(self, a: Node, size: Array) -> Node:
        """Return an input that is known but for an error of some size: here, as it is given."""
        return a

    def given_gradient(self, values: NDArray[Any]) -> Array:
        """Return a gradient that stands in place of a computed one."""
        return self.leaf(values).value

    # What becomes of the result of an operation. These three are all that kinds of arithmetic differ in.

    def settle(self, values: Array, units: float = 1.0, absolute: float = 0.0) -> Array:
        """Return the result of an operation as this arithmetic yields it.

        Args:
            units: how many unit roundoffs of its own size correct arithmetic may err there.
            absolute: how many unit roundoffs of 1 it may err besides.
        """
        return self._kept(self.precision.round(values))

    def settle_sum(
        self, values: Array, squares: Callable[[], Array], terms: float | Array, wide: bool = True
    ) -> Array:
        """Return a sum as this arithmetic yields it.

        Args:
            squares: gives the sum of the squares of the terms.
            terms: how many there are.
            wide: whether half precisions accumulate it in float32: only sums of products may be counted on
                for that (SPEC PRC-2).
        """
        return self._kept(self.precision.round(values))

    def vary_total(self, total: Node, parts: Sequence[Node]) -> Node:
        """Return the sum of the squares of several tensors as one sum over all of them would yield it.

        (SPEC ALG-7): here, tensor by tensor.
        """
        return total

    def vary_variance(self, variance: Node, mean: Node, centered: Node) -> Node:
        """Return the variance of rows, of which the mean and the differences from it are given, as
        admissible ways yield it: here, as two passes do.
        """
        return variance

    def round_sum(self, values: Array, value: float, rounded: str) -> Array:
        """Return scores and a mask constant, added and rounded as the precision ``rounded`` does."""
        target = precision(rounded)
        return target.round(target.round(values) + np.float64(value)).astype(values.dtype)

    def step(self, values: Array, units: float = 1.0) -> Array:
        """Settle a step within an operation, which fused kernels do not round."""
        return self._kept(values) if self._fused else self.settle(values, units)

    # Sums and products.

    def add(self, a: Node, b: Node) -> Node:
        """Return a + b, rounded."""
        left, right = self._ranked(a, b)
        return self._record(self.settle(left + right), (a, self._unbroadcast(a)), (b, self._unbroadcast(b)))

    def subtract(self, a: Node, b: Node) -> Node:
        """Return a - b, rounded."""
        back, (left, right) = self._unbroadcast(b), self._ranked(a, b)
        return self._record(self.settle(left - right), (a, self._unbroadcast(a)), (b, lambda g: -back(g)))

    def center(self, x: Node, mean: Node) -> Node:
        """Return by how much rows differ from their mean, as admissible ways yield it (SPEC ALG-5).

        Here, as a difference does.
        """
        return self.subtract(x, mean)

    def multiply(self, a: Node, b: Node) -> Node:
        """Return a b, rounded."""
        back_a, back_b, (left, right) = self._unbroadcast(a), self._unbroadcast(b), self._ranked(a, b)
        return self._record(
            self.settle(left * right),
            (a, lambda g: back_a(self.step(g * right))),
            (b, lambda g: back_b(self.step(g * left))),
        )

    def divide(self, a: Node, b: Node) -> Node:
        """Return a / b, rounded."""
        back_a, back_b, (left, right) = self._unbroadcast(a), self._unbroadcast(b), self._ranked(a, b)
        quotient = self.settle(left / right)
        return self._record(
            quotient,
            (a, lambda g: back_a(self.step(g / right))),
            (b, lambda g: -back_b(self.step(self.step(g * quotient) / right))),
        )

    def scale(self, a: Node, factor: float) -> Node:
        """Multiply by a constant."""
        units = self._units_of(factor)
        return self._record(
            self._scaled(a.value, factor, units), (a, lambda g: self._scaled(g, factor, units))
        )

    def divide_by(self, a: Node, divisor: float) -> Node:
        """Divide by a constant."""
        units, constant = self._units_of(divisor), self._constant(divisor)

        def divided(values: Array) -> Array:
            return self.settle(values / constant, units)

        return self._record(divided(a.value), (a, divided))

    def shift(self, a: Node, summand: float) -> Node:
        """Add a constant."""
        constant = self._constant(summand)
        return self._record(
            self.settle(a.value + constant, 1.0 if float(constant) == summand else 2.0), (a, lambda g: g)
        )

    def einsum(self, subscripts: str, a: Node, b: Node) -> Node:
        """Contract two tensors, for example ``"bti,io->bto"``; no index may appear twice in one operand."""
        return self._record(self._product(subscripts, a.value, b.value), *self._pulls(subscripts, a, b))

    def affine(self, subscripts: str, a: Node, b: Node, bias: Node) -> Node:
        """Contract two tensors and add a bias, which is broadcast."""
        product = self.einsum(subscripts, a, b)
        total = self.settle(product.value + self._ranked(product, bias)[1])
        return self._record(total, (product, self._unbroadcast(product)), (bias, self._bias_pullback(bias)))

    def sum(self, a: Node, axis: int | None = None) -> Node:
        """Sum over one axis, counted from the end, which stays with size 1, or over all of them to a
        scalar.
        """
        axes = (axis,) if axis is not None else tuple(range(self.lead, a.value.ndim))
        return self._record(
            self._sum(a.value, axes, axis is not None), (a, lambda g: self._shared(g, a, axis is None))
        )

    # Elementary functions.

    def sqrt(self, a: Node) -> Node:
        """Return the root, rounded."""
        root = self.settle(np.sqrt(a.value))
        return self._record(root, (a, lambda g: self.settle(g / (2 * root))))

    def tanh(self, a: Node, absolute: bool = False) -> Node:
        """Hyperbolic tangent.

        Args:
            absolute: whether it may err as much near 0 as near 1, as it may where 1 is added to it.
        """
        value = self._function(np.tanh(a.value), absolute)
        return self._record(value, (a, lambda g: self.settle(g * self.step(1 - self.step(value * value)))))

    def erf(self, a: Node) -> Node:
        """Return the error function, as near as libraries compute it."""
        value = self._function(erf(a.value), absolute=True)
        slope = self._constant(2 / math.sqrt(math.pi))
        return self._record(
            value,
            (
                a,
                lambda g: self.settle(g * self.step(np.exp(-self.step(a.value * a.value)) * slope, FUNCTION)),
            ),
        )

    def relu(self, a: Node, active: Mask | None = None) -> Node:
        """Rectify.

        Args:
            active: where the slope is 1, if that is known better than from the values.
        """
        if active is not None:
            steep = active.reshape(a.shape)
        else:
            steep = a.value > (self.corner * abs(a.value).max(-1, keepdims=True) if self.corner else 0)
        return self._record(np.maximum(a.value, 0), (a, lambda g: np.where(steep, g, 0)))

    def sigmoid_cross_entropy(self, logits: Node, targets: Array) -> Node:
        """Binary cross-entropy of each logit against a target of 0 or 1, without overflow.

        Frameworks add 1 to an exponential before the logarithm, or do not: near 0 the result errs as it does
        near 1.
        """
        x = logits.value
        value = self.settle(
            np.maximum(x, 0) - x * targets + self.settle(np.log1p(np.exp(-abs(x))), FUNCTION, 2.0)
        )

        def pullback(gradient: Array) -> Array:
            # The chance less the target, from whichever side loses no digits.
            slope = (1 - targets) * logistic(x) - targets * logistic(-x)
            return self.settle(gradient * self.settle(slope, FUNCTION, 2.0))

        return self._record(value, (logits, pullback))

    # Attention weights and cross-entropy, in every admissible way (SPEC ALG-1 to ALG-4).

    def softmax(
        self,
        a: Node,
        floor: float | Array | None = None,
        sums: RowSums | None = None,
    ) -> Node:
        """Softmax over the last axis, with the largest entry taken off first.

        Beside a mask constant the logarithm of a row's sum is lost: what :meth:`replace` or :meth:`add_where`
        hides says nothing of it.

        Args:
            floor: below which what remains is clipped; one number, or what can be broadcast with ``a``.
            sums: where :meth:`attend` leaves the row sums that the derivative may be computed from.
        """
        exponentials = self.step(np.exp(self._shifted(a, floor)), FUNCTION)
        total = self._sum(exponentials, (-1,), True, internal=True)
        value = self.settle(exponentials / total)
        rows: Any = None if a.hidden is None else ~a.hidden.all(-1, keepdims=True)

        def logarithms() -> Array:
            found = self.step(a.value.max(-1, keepdims=True) + self.step(np.log(total), FUNCTION))
            return found if rows is None else np.where(rows, found, np.nan)

        value = self.vary_softmax(value, a.value, floor, logarithms)

        def pullback(gradient: Array) -> Array:
            again = self.vary_softmax(value, a.value, floor, logarithms)
            terms = self.step(gradient * again)
            inner = self._sum(terms, (-1,), True, internal=True)
            if sums is not None and sums.products is not None:
                inner = self.vary_row_sums(inner, sums.products)
            return self.vary_largest(self.settle(again * self.step(gradient - inner)), a.value, terms, again)

        weights = self._record(value, (a, pullback))
        return self.replace(weights, rows, 0.0) if self.blind_rows_zero and rows is not None else weights

    def attend(self, weights: Node, values: Node, sums: RowSums | None = None) -> Node:
        """Sum values by attention weights: (B, H, Q, S), (B, S, H, K) to (B, Q, H, K).

        Args:
            sums: where the row sums of output times gradient are left.
        """
        result = self.einsum("bhqs,bshk->bqhk", weights, values)
        if not self.recording:
            return result
        (_, to_weights), to_values = result.operands

        def pullback(gradient: Array) -> Array:
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

        def pullback(gradient: Array) -> Array:
            share = self.step(np.exp(value), FUNCTION)
            result = self.settle(
                gradient - self.step(share * self._sum(gradient, (-1,), True, internal=True))
            )
            return self.vary_largest(result, a.value, gradient, share)

        return self._record(value, (a, pullback))

    # What admissible ways to compute attention and cross-entropy differ in (SPEC ALG-1 to ALG-4).

    def vary_softmax(
        self, value: Array, x: Array, floor: float | Array | None, logarithms: Callable[[], Array]
    ) -> Array:
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
        self, value: Array, x: Array, logarithms: Callable[[], Array], floor: float | None
    ) -> Array:
        """Return the logarithm of the softmax in the way of this arithmetic.

        Arguments as of :meth:`vary_softmax`.
        """
        return self.settle(x - logarithms()) if self.way == "logarithm" and floor is None else value

    def vary_row_sums(self, sums: Array, products: Array) -> Array:
        """Return the row sums of weights times their gradient in the way of this arithmetic.

        Args:
            products: of outputs and their gradients, whose sums they are too.
        """
        return self._sum(products, (-1,), True, internal=True) if self.way == "output" else sums

    def vary_largest(self, gradient: Array, x: Array, terms: Array, shares: Array) -> Array:
        """Return the gradient of a softmax, or of its logarithm, as another admissible way would yield it.

        Here, as it is.

        Args:
            gradient: terms less shares times the row sum of the terms, so that each row sums to zero but for
                rounding.
            x: what the softmax is of.
        """
        return gradient

    def _softmax_by_blocks(self, x: Array) -> Array:
        """Return the softmax by a running maximum.

        What came before is rescaled when a larger entry appears.
        """
        width = max(1, -(-x.shape[-1] // BLOCKS))
        top, total = x[..., :1], np.zeros_like(x[..., :1])
        parts: list[Array] = []
        for start in range(0, x.shape[-1], width):
            block = x[..., start : start + width]
            larger = np.maximum(top, block.max(-1, keepdims=True))
            shrunk = self.step(np.exp(self.step(top - larger)), FUNCTION)
            exponentials = self.step(np.exp(self.step(block - larger)), FUNCTION)
            parts = [*(self.step(part * shrunk) for part in parts), exponentials]
            total = self.step(self.step(total * shrunk) + self._sum(exponentials, (-1,), True, internal=True))
            top = larger
        return self.settle(np.concatenate(parts, axis=-1) / total)

    # Selection and layout: exact in every precision.

    def replace(self, a: Node, keep: Mask, value: float) -> Node:
        """Put a constant wherever ``keep`` is False; no gradient flows there."""
        keep = np.broadcast_to(keep, a.shape)
        replaced = self._record(
            np.where(keep, a.value, self._constant(value)), (a, lambda g: np.where(keep, g, 0))
        )
        replaced.constant = replaced.hidden = ~keep
        return replaced

    def choose(self, keep: Mask, a: Node, b: Node) -> Node:
        """Return ``a`` where ``keep`` is True, and ``b`` elsewhere."""
        return self._record(
            np.where(keep, a.value, b.value),
            (a, lambda g: np.where(keep, g, 0)),
            (b, lambda g: np.where(keep, 0, g)),
        )

    def larger(self, a: Node, b: Node) -> Node:
        """Return the larger of two, element by element."""
        return self.choose(a.value >= b.value, a, b)

    def bound(self, a: Node, low: float, high: float) -> Node:
        """Return what is nearest in a range; no gradient flows where that is another number."""
        inside = np.clip(a.value, self._constant(low), self._constant(high))
        return self._record(inside, (a, lambda g: np.where(inside == a.value, g, 0)))

    def add_where(self, a: Node, keep: Mask, value: float, rounded: str) -> Node:
        """Add a constant wherever ``keep`` is False, and round the sum as the precision ``rounded`` does.

        (SPEC MSK-5).
        """
        sums = self.round_sum(a.value, value, rounded)
        added = self._record(np.where(keep, a.value, sums), (a, lambda g: g))
        added.hidden, added.constant = ~keep, ~keep & (sums == self._constant(value))
        return added

    def freeze(self, a: Node, frozen: Mask) -> Node:
        """Return the same values; no gradient flows where ``frozen`` is True."""
        return self._record(a.value, (a, lambda g: np.where(frozen, 0, g)))

    def take(self, table: Node, rows: Ids) -> Node:
        """Look up rows of a table: ``rows`` (…) to (…, D)."""
        where: Any = (*(slice(None),) * self.lead, rows)
        uses = np.bincount(rows.reshape(-1), minlength=table.shape[0])[:, None].astype(np.float64)

        def gather(gradient: Array) -> Array:
            total = np.zeros((*gradient.shape[: self.lead], *table.shape), gradient.dtype)
            np.add.at(total, where, gradient)
            return total

        def pullback(gradient: Array) -> Array:
            return self.settle_sum(
                gather(gradient),
                lambda: gather(np.square(self._one(gradient), dtype=np.float64)),
                uses,
                wide=False,
            )

        return self._record(table.value[where], (table, pullback))

    def index(self, a: Node, where: Any) -> Node:
        """Select with a NumPy index that picks every element at most once."""
        inside = (*(slice(None),) * self.lead, *(where if isinstance(where, tuple) else (where,)))

        def pullback(gradient: Array) -> Array:
            full = np.zeros((*gradient.shape[: self.lead], *a.shape), gradient.dtype)
            full[inside] = gradient
            return full

        return self._record(a.value[inside], (a, pullback))

    def reshape(self, a: Node, shape: tuple[int, ...]) -> Node:
        """Return the same numbers in another shape, the arithmetic's own leading axes left alone."""

        def pullback(gradient: Array) -> Array:
            return gradient.reshape((*gradient.shape[: self.lead], *a.shape))

        return self._record(a.value.reshape((*a.value.shape[: self.lead], *shape)), (a, pullback))

    # Derivatives.

    def backward(self, result: Node) -> None:
        """Compute the derivative of a scalar result by every tensor on the tape, last one first.

        A tensor's gradient is complete when its place on the tape is reached. The tape is used up, so that
        what is no longer needed can be let go, unless ``keeping`` says that operands and gradients are to
        stay.
        """
        result.gradient = np.ones_like(result.value)
        while self._tape:
            tensor = self._tape.pop()
            if tensor.gradient is None:
                continue
            if tensor.completed:
                tensor.completed(tensor)
            for operand, pullback in tensor.operands:
                part = pullback(tensor.gradient)
                operand.gradient = part if operand.gradient is None else self.settle(operand.gradient + part)
            if tensor.operands and not self.keeping:
                tensor.operands, tensor.gradient = (), None

    # What the operations share.

    def _kept(self, values: Array) -> Array:
        """Return rounded values, with what is out of range marked."""
        return (
            np.where(np.isinf(values), np.nan, values).astype(values.dtype)
            if self._strict and np.isinf(values).any()
            else values
        )

    def _ranked(self, a: Node, b: Node) -> tuple[Array, Array]:
        """Return the values of two tensors with as many axes, which those of samples need to be broadcast."""
        rank = max(len(a.shape), len(b.shape))
        left, right = (
            x.value.reshape((*x.value.shape[: self.lead], *(1,) * (rank - len(x.shape)), *x.shape))
            for x in (a, b)
        )
        return left, right

    def _one(self, values: Array) -> Array:
        """Return what stands for all samples where there are several.

        A perturbed one, which a single point cannot make singular.
        """
        return values[-1:] if self.lead else values

    def _constant(self, value: float) -> Any:
        return self.precision.storage.type(value)

    def _units_of(self, factor: float) -> float:
        """Return how much a product with a constant errs.

        Nothing for a power of two, more for one that was rounded itself.
        """
        return (
            0.0
            if abs(math.frexp(factor)[0]) == 0.5
            else 1.0
            if float(self._constant(factor)) == factor
            else 2.0
        )

    def _scaled(self, values: Array, factor: float, units: float) -> Array:
        return self.settle(values * self._constant(factor), units)

    def _function(self, values: Array, absolute: bool) -> Array:
        return self.settle(values, 0.0, FUNCTION) if absolute else self.settle(values, FUNCTION)

    def _shifted(self, a: Node, floor: float | Array | None) -> Array:
        """Return what lies below the largest entry of its row, clipped where a kernel does that."""
        shifted = self.step(a.value - a.value.max(-1, keepdims=True))
        return shifted if floor is None else np.maximum(shifted, np.asarray(floor, self.precision.storage))

    def _record(self, value: Any, *operands: tuple[Node, Pullback]) -> Node:
        value = np.asarray(value)
        if not self.recording:
            self.elements = max(
                self.elements, value.size // 2
            )  # with no tape there are but a few tensors at a time
            return Node(value, value.shape[self.lead :])
        for operand, _ in operands:
            if not operand.taped:  # where an input is used first, its gradient is complete last
                operand.taped = True
                self._tape.append(operand)
        tensor = Node(value, value.shape[self.lead :], operands)
        self.elements += value.size
        self._tape.append(tensor)
        return tensor

    def _shared(self, gradient: Array, a: Node, everything: bool) -> Array:
        """Return the gradient of a sum for each of its terms."""
        samples = gradient.shape[: self.lead]
        shared: Array = np.broadcast_to(
            gradient.reshape((*samples, *(1,) * len(a.shape))) if everything else gradient,
            (*samples, *a.shape),
        )
        return shared

    def _sum(self, values: Array, axes: tuple[int, ...], keepdims: bool, internal: bool = False) -> Array:
        """Sum, and settle the sum unless it is a step within an operation, which fused kernels do not
        round.
        """
        ordered = values
        if axes and self._generator is not None:
            ordered = self._generator.permutation(values, axis=axes[0])
        elif axes and self._strict:
            # Term after term, as some kernels add: equal terms then err alike. NumPy adds in pairs.
            ordered = np.add.accumulate(values, axes[0]).take([-1], axes[0])
        total: Array = np.asarray(ordered.sum(axes, keepdims=keepdims))
        if internal and self._fused:
            return total
        terms = math.prod(values.shape[axis] for axis in axes)
        return self.settle_sum(
            total,
            lambda: np.square(self._one(values), dtype=np.float64).sum(axes, keepdims=keepdims),
            terms,
            wide=False,
        )

    def _unbroadcast(self, operand: Node) -> Pullback:
        """Return how a gradient sums back to the shape of an operand that was broadcast."""

        def pullback(gradient: Array) -> Array:
            shape = gradient.shape[self.lead :]
            if shape == operand.shape:
                return gradient
            extra = len(shape) - len(operand.shape)
            stretched = (i + extra for i, n in enumerate(operand.shape) if n == 1 != shape[i + extra])
            axes = tuple(axis + self.lead for axis in (*range(extra), *stretched))
            return self._sum(gradient, axes, False).reshape((*gradient.shape[: self.lead], *operand.shape))

        return pullback

    def _bias_pullback(self, bias: Node) -> Pullback:
        """Return how a gradient sums to that of a bias.

        Term by term, each sum rounded, where a kernel does that.
        """
        if not (self.narrow_bias_gradients and self.precision.name == "bfloat16"):
            return self._unbroadcast(bias)

        def pullback(gradient: Array) -> Array:
            return functools.reduce(
                lambda total, term: self.settle(total + term), gradient, np.zeros(bias.shape, gradient.dtype)
            )

        return pullback

    def _pulls(
        self, subscripts: str, a: Node, b: Node
    ) -> tuple[tuple[Node, Pullback], tuple[Node, Pullback]]:
        """Return the operands of a contraction, with how a gradient flows back to each."""
        left, result = subscripts.split("->")
        index_a, index_b = left.split(",")

        def pull(wanted: str, other: Node, index: str) -> Pullback:
            return lambda g: self._product(f"{result},{index}->{wanted}", g, other.value)

        return (a, pull(index_a, b, index_b)), (b, pull(index_b, a, index_a))

    def _product(self, subscripts: str, a: Array, b: Array) -> Array:
        """Contract two arrays and settle the sums."""
        a, b = self._factor(a), self._factor(b)
        terms = count_terms(subscripts, a.shape[self.lead :])
        contracted = self._contract(subscripts, a, b)
        if self._strict and self.precision.name == "float16":
            # In another order, or before it is scaled, a partial sum may be out of range.
            contracted = np.where(
                self._contract(subscripts, abs(a), abs(b)) > self.precision.largest, np.inf, contracted
            )
        return self.settle_sum(contracted, lambda: self._squares(subscripts, a, b), terms)

    def _factor(self, values: Array) -> Array:
        """Return a factor of a matrix product as this arithmetic takes it."""
        return self.precision.round_factor(values, self._cut)

    def _squares(self, subscripts: str, a: Array, b: Array) -> Array:
        """Return the sums of the squares of the products of a contraction."""
        return contract(subscripts, np.square(a), np.square(b))

    def _contract(self, subscripts: str, a: Array, b: Array) -> Array:
        if self._generator:
            left, result = subscripts.split("->")
            index_a, index_b = left.split(",")
            for index in sorted((set(index_a) & set(index_b)) - set(result)):
                order = self._generator.permutation(a.shape[index_a.index(index)])
                a, b = np.take(a, order, index_a.index(index)), np.take(b, order, index_b.index(index))
        return contract(subscripts, a, b)
