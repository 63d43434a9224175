"""Elementary operations with rounding and reverse-mode derivatives.

The model uses them instead of NumPy, so the same code runs exactly, rounded after each operation, or randomly
perturbed (:mod:`concord.spec.montecarlo`).
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

``weights``: exponentials over their sum. ``logarithm``: the exponential of the log-softmax. ``output``: a
running maximum over blocks of keys, and a derivative from the row sums of output times gradient.
"""

# Blocks of keys for the running maximum. More than one block makes it rescale earlier blocks, which adds the
# same rounding as fused attention kernels (SPEC ALG-2).
BLOCKS = 4


class Arithmetic:
    """Elementary operations in one precision, on :class:`concord.spec.tape.Node` objects.

    Args:
        dtype: one of :data:`concord.spec.precision.PRECISIONS` or :data:`concord.spec.precision.MODES`.
        corner: where a ReLU's slope becomes 1, relative to the row's largest entry.
        shuffle: seed for a random order of summation.
        fused: keep the storage type between the steps of softmax and derivatives.
        strict: turn overflow into NaN.
        cut: truncate the factors of TF32 products instead of rounding them.
        way: one of :data:`WAYS`; all but the first also use the closed form of layer norm's derivative, and
            compute decay as a product (SPEC OPT-6).
    """

    # Arrays have this many leading axes that are not part of a tensor's shape.
    lead = samples = 0
    # Set by the declared deviation of the same name: a bfloat16 run sums its bias gradients in bfloat16.
    narrow_bias_gradients = False
    # Set by a declared deviation: a query that sees no key gets zero weights, as in PyTorch's
    # scaled_dot_product_attention (SPEC MSK-5).
    blind_rows_zero = False

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
        """Round an input to the precision."""
        rounded = self.precision.round(values)
        return Node(rounded.reshape((1,) * self.lead + rounded.shape), rounded.shape, taped=False)

    def override(self, a: Node, values: NDArray[Any]) -> Node:
        """Replace computed values with pinned ones, keeping the gradient path."""
        return self._replacing(a, self.leaf(values).value)

    def _replacing(self, a: Node, values: Array) -> Node:
        replacement = self._record(values, (a, lambda g: g))
        replacement.hidden = a.hidden
        return replacement

    def uncertain(self, a: Node, size: Array) -> Node:
        """Return an input; Monte Carlo arithmetic adds an error of ``size``."""
        return a

    def given_gradient(self, values: NDArray[Any]) -> Array:
        """Round a pinned gradient to the precision."""
        return self.leaf(values).value

    # Each kind of arithmetic treats the results of operations differently.

    def settle(self, values: Array, units: float = 1.0, absolute: float | Array = 0.0) -> Array:
        """Round or perturb the result of an operation.

        Args:
            units: relative error in unit roundoffs.
            absolute: additional error in unit roundoffs of 1; also of each value.
        """
        return self._kept(self.precision.round(values))

    def settle_sum(
        self, values: Array, squares: Callable[[], Array], terms: float | Array, wide: bool = True
    ) -> Array:
        """Round or perturb a sum.

        Args:
            squares: returns the sum of the squares of the terms.
            wide: whether half precisions accumulate in float32 (SPEC PRC-2).
        """
        return self._kept(self.precision.round(values))

    def vary_total(self, total: Node, parts: Sequence[Node]) -> Node:
        """Vary a sum of squares of several tensors (SPEC ALG-7)."""
        return total

    def vary_variance(self, variance: Node, mean: Node, centered: Node) -> Node:
        """Vary the variance of rows (SPEC ALG-5)."""
        return variance

    def round_sum(self, values: Array, value: float, rounded: str) -> Array:
        """Add a mask constant in the precision ``rounded`` (SPEC MSK-5)."""
        # An exact sum would keep digits of the score that float32 absorbs into -1e9. A row without visible
        # keys would then get different weights than in the run.
        target = precision(rounded)
        return target.round(target.round(values) + np.float64(value)).astype(values.dtype)

    def step(self, values: Array, units: float = 1.0) -> Array:
        """Settle an intermediate step, which fused kernels do not round."""
        return self._kept(values) if self._fused else self.settle(values, units)

    # Sums and products.

    def add(self, a: Node, b: Node) -> Node:
        """Return a + b."""
        left, right = self._ranked(a, b)
        return self._record(self.settle(left + right), (a, self._unbroadcast(a)), (b, self._unbroadcast(b)))

    def subtract(self, a: Node, b: Node) -> Node:
        """Return a - b."""
        back, (left, right) = self._unbroadcast(b), self._ranked(a, b)
        return self._record(self.settle(left - right), (a, self._unbroadcast(a)), (b, lambda g: -back(g)))

    def center(self, x: Node, mean: Node) -> Node:
        """Subtract the mean of each row (SPEC ALG-5)."""
        return self.subtract(x, mean)

    def multiply(self, a: Node, b: Node) -> Node:
        """Return a b."""
        back_a, back_b, (left, right) = self._unbroadcast(a), self._unbroadcast(b), self._ranked(a, b)
        return self._record(
            self.settle(left * right),
            (a, lambda g: back_a(self.step(g * right))),
            (b, lambda g: back_b(self.step(g * left))),
        )

    def divide(self, a: Node, b: Node) -> Node:
        """Return a / b."""
        back_a, back_b, (left, right) = self._unbroadcast(a), self._unbroadcast(b), self._ranked(a, b)
        quotient = self.settle(left / right)
        return self._record(
            quotient,
            (a, lambda g: back_a(self.step(g / right))),
            (b, lambda g: -back_b(self.step(self.step(g * quotient) / right))),
        )

    def scale(self, a: Node, factor: float) -> Node:
        """Multiply by a rounded constant."""
        units = self._units_of(factor)
        return self._record(
            self._scaled(a.value, factor, units), (a, lambda g: self._scaled(g, factor, units))
        )

    def divide_by(self, a: Node, divisor: float) -> Node:
        """Divide by a rounded constant."""
        units, constant = self._units_of(divisor), self._constant(divisor)

        def divided(values: Array) -> Array:
            return self.settle(values / constant, units)

        return self._record(divided(a.value), (a, divided))

    def shift(self, a: Node, summand: float) -> Node:
        """Add a rounded constant."""
        constant = self._constant(summand)
        return self._record(
            self.settle(a.value + constant, 1.0 if float(constant) == summand else 2.0), (a, lambda g: g)
        )

    def einsum(self, subscripts: str, a: Node, b: Node) -> Node:
        """Contract two tensors; no index may repeat in an operand."""
        return self._record(self._product(subscripts, a.value, b.value), *self._pulls(subscripts, a, b))

    def affine(self, subscripts: str, a: Node, b: Node, bias: Node) -> Node:
        """Contract two tensors and add a bias."""
        product = self.einsum(subscripts, a, b)
        total = self.settle(product.value + self._ranked(product, bias)[1])
        return self._record(total, (product, self._unbroadcast(product)), (bias, self._bias_pullback(bias)))

    def sum(self, a: Node, axis: int | None = None) -> Node:
        """Sum over one axis, counted from the end and kept, or over all."""
        axes = (axis,) if axis is not None else tuple(range(self.lead, a.value.ndim))
        return self._record(
            self._sum(a.value, axes, axis is not None), (a, lambda g: self._shared(g, a, axis is None))
        )

    # Elementary functions.

    def sqrt(self, a: Node) -> Node:
        """Square root."""
        root = self.settle(np.sqrt(a.value))
        return self._record(root, (a, lambda g: self.settle(g / (2 * root))))

    def tanh(self, a: Node, absolute: bool = False) -> Node:
        """Hyperbolic tangent; with ``absolute``, its absolute error may stay constant near 0."""
        value = self._function(np.tanh(a.value), absolute)
        return self._record(value, (a, lambda g: self.settle(g * self.step(1 - self.step(value * value)))))

    def erf(self, a: Node) -> Node:
        """Error function, with a constant absolute error near 0, since GELU adds 1."""
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
            active: where the slope is 1; by default at positive inputs.
        """
        # Rounding may put an input near zero on either side, where the gradient jumps. A pinned result shows
        # which side the run took (SPEC PRT-2).
        if active is not None:
            steep = active.reshape(a.shape)
        else:
            steep = a.value > (self.corner * abs(a.value).max(-1, keepdims=True) if self.corner else 0)
        return self._record(np.maximum(a.value, 0), (a, lambda g: np.where(steep, g, 0)))

    def sigmoid_cross_entropy(self, logits: Node, targets: Array) -> Node:
        """Binary cross-entropy of each logit against 0 or 1, without overflow."""
        # The error of log1p is absolute: some frameworks add 1 to the exponential before the logarithm, so a
        # loss near 0 errs as much as one near 1.
        x = logits.value
        # PyTorch subtracts the logarithm of the sigmoid from x: the two cancel for negative x if the target
        # is 0.
        cancelled = (1 - targets) * np.maximum(-x, 0)
        value = self.settle(
            np.maximum(x, 0) - x * targets + self.settle(np.log1p(np.exp(-abs(x))), FUNCTION, 2.0 + cancelled)
        )

        def pullback(gradient: Array) -> Array:
            # Probability minus target, in the form that loses no digits: 1 - logistic(x) cancels for large x.
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
        """Softmax over the last axis.

        Args:
            floor: lower bound of the shifted scores, if a kernel clips them.
            sums: receives the row sums of output times gradient from :meth:`attend`.
        """
        exponentials = self.step(np.exp(self._shifted(a, floor)), FUNCTION)
        total = self._sum(exponentials, (-1,), True, internal=True)
        value = self.settle(exponentials / total)
        # A mask constant absorbs the logarithm of a row's sum, so a row without visible keys has no usable
        # logarithm (SPEC ALG-3).
        rows: Any = None if a.hidden is None else ~a.hidden.all(-1, keepdims=True)

        def logarithms() -> Array:
            totals = self.step(a.value.max(-1, keepdims=True) + self.step(np.log(total), FUNCTION))
            return totals if rows is None else np.where(rows, totals, np.nan)

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
        """Sum values by weights: (B, H, Q, S), (B, S, H, K) to (B, Q, H, K)."""
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
        """Log-softmax over the last axis; ``floor`` as in :meth:`softmax`."""
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

    # Admissible ways to compute attention and cross-entropy differ in these methods (SPEC ALG-1 to ALG-4).

    def vary_softmax(
        self, value: Array, x: Array, floor: float | Array | None, logarithms: Callable[[], Array]
    ) -> Array:
        """The softmax in this arithmetic's :data:`way <WAYS>`.

        Args:
            value: exponentials divided by their sum.
            logarithms: returns the log-sum-exp of each row, or NaN.
        """
        if self.way == "output" and floor is None:
            return self._softmax_by_blocks(x)
        if self.way != "logarithm":
            return value
        totals = logarithms()
        below = self.step(x - totals)
        below = below if floor is None else np.maximum(below, np.asarray(floor, self.precision.storage))
        return np.where(np.isnan(totals), value, self.settle(np.exp(below), FUNCTION))

    def vary_log_softmax(
        self, value: Array, x: Array, logarithms: Callable[[], Array], floor: float | None
    ) -> Array:
        """Log-softmax in this arithmetic's way."""
        return self.settle(x - logarithms()) if self.way == "logarithm" and floor is None else value

    def vary_row_sums(self, sums: Array, products: Array) -> Array:
        """Row sums of weights times gradient in this arithmetic's way; ``products`` has the same row sums."""
        return self._sum(products, (-1,), True, internal=True) if self.way == "output" else sums

    def vary_largest(self, gradient: Array, x: Array, terms: Array, shares: Array) -> Array:
        """Vary the gradient of a softmax or log-softmax.

        Args:
            gradient: terms minus shares times their row sum.
        """
        return gradient

    def _softmax_by_blocks(self, x: Array) -> Array:
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
        """Insert a constant wherever ``keep`` is False; no gradient flows there."""
        keep = np.broadcast_to(keep, a.shape)
        replaced = self._record(
            np.where(keep, a.value, self._constant(value)), (a, lambda g: np.where(keep, g, 0))
        )
        # The score is gone, so perturbing it later would invent an error that no run has.
        replaced.constant = replaced.hidden = ~keep
        return replaced

    def choose(self, keep: Mask, a: Node, b: Node) -> Node:
        """Take ``a`` where ``keep`` is True, and ``b`` elsewhere."""
        return self._record(
            np.where(keep, a.value, b.value),
            (a, lambda g: np.where(keep, g, 0)),
            (b, lambda g: np.where(keep, 0, g)),
        )

    def larger(self, a: Node, b: Node) -> Node:
        """Elementwise maximum; ties pass the gradient to the first."""
        return self.choose(a.value >= b.value, a, b)

    def bound(self, a: Node, low: float, high: float) -> Node:
        """Clip to a range; no gradient flows to clipped values."""
        inside = np.clip(a.value, self._constant(low), self._constant(high))
        return self._record(inside, (a, lambda g: np.where(inside == a.value, g, 0)))

    def add_where(self, a: Node, keep: Mask, value: float, rounded: str) -> Node:
        """Add a constant in the precision ``rounded`` wherever ``keep`` is False (SPEC MSK-5)."""
        sums = self.round_sum(a.value, value, rounded)
        added = self._record(np.where(keep, a.value, sums), (a, lambda g: g))
        added.hidden, added.constant = ~keep, ~keep & (sums == self._constant(value))
        return added

    def freeze(self, a: Node, frozen: Mask) -> Node:
        """Stop gradients wherever ``frozen`` is True."""
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
                # Gradients of rows that several tokens look up are summed in any order (SPEC ALG-9).
                lambda: gather(np.square(self._one(gradient), dtype=np.float64)),
                uses,
                wide=False,
            )

        return self._record(table.value[where], (table, pullback))

    def index(self, a: Node, where: Any) -> Node:
        """Select with a NumPy index, each element at most once."""
        inside = (*(slice(None),) * self.lead, *(where if isinstance(where, tuple) else (where,)))

        def pullback(gradient: Array) -> Array:
            full = np.zeros((*gradient.shape[: self.lead], *a.shape), gradient.dtype)
            full[inside] = gradient
            return full

        return self._record(a.value[inside], (a, pullback))

    def reshape(self, a: Node, shape: tuple[int, ...]) -> Node:
        """Reshape all but the arithmetic's leading axes."""

        def pullback(gradient: Array) -> Array:
            return gradient.reshape((*gradient.shape[: self.lead], *a.shape))

        return self._record(a.value.reshape((*a.value.shape[: self.lead], *shape)), (a, pullback))

    # Derivatives.

    def backward(self, result: Node) -> None:
        """Differentiate a scalar with respect to the whole tape, which is freed unless ``keeping`` is set."""
        result.gradient = np.ones_like(result.value)
        while self._tape:
            tensor = self._tape.pop()
            # The callback refers to the model: if it were kept, every weight would stay in memory until the
            # next garbage collection.
            completed, tensor.completed = tensor.completed, None
            if tensor.gradient is None:
                continue
            if completed:
                completed(tensor)
            for operand, pullback in tensor.operands:
                # All uses of a tensor come later on the tape, so its gradient is complete here.
                part = pullback(tensor.gradient)
                operand.gradient = part if operand.gradient is None else self.settle(operand.gradient + part)
            if tensor.operands and not self.keeping:
                tensor.operands, tensor.gradient = (), None

    # Helpers of the operations.

    def _kept(self, values: Array) -> Array:
        return (
            # Division would turn infinity into a plausible zero; NaN reaches every result that depends on it.
            np.where(np.isinf(values), np.nan, values).astype(values.dtype)
            if self._strict and np.isinf(values).any()
            else values
        )

    def _ranked(self, a: Node, b: Node) -> tuple[Array, Array]:
        # Broadcasting aligns axes from the right, so without this, the samples' leading axis would be aligned
        # with a tensor axis.
        rank = max(len(a.shape), len(b.shape))
        left, right = (
            x.value.reshape((*x.value.shape[: self.lead], *(1,) * (rank - len(x.shape)), *x.shape))
            for x in (a, b)
        )
        return left, right

    def _one(self, values: Array) -> Array:
        # The last sample is perturbed: unlike the exact values, it avoids singular points such as zero.
        return values[-1:] if self.lead else values

    def _constant(self, value: float) -> Any:
        return self.precision.storage.type(value)

    def _units_of(self, factor: float) -> float:
        return (
            0.0
            # A power of two is exact. Any other constant is itself rounded, which adds a second error.
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
        shifted = self.step(a.value - a.value.max(-1, keepdims=True))
        return shifted if floor is None else np.maximum(shifted, np.asarray(floor, self.precision.storage))

    def _record(self, value: Any, *operands: tuple[Node, Pullback]) -> Node:
        value = np.asarray(value)
        if not self.recording:
            self.elements = max(
                self.elements, value.size // 2
            )  # without a tape few tensors are alive at a time
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
        samples = gradient.shape[: self.lead]
        shared: Array = np.broadcast_to(
            gradient.reshape((*samples, *(1,) * len(a.shape))) if everything else gradient,
            (*samples, *a.shape),
        )
        return shared

    def _sum(self, values: Array, axes: tuple[int, ...], keepdims: bool, internal: bool = False) -> Array:
        ordered = values
        if axes and self._generator is not None:
            ordered = self._generator.permutation(values, axis=axes[0])
        elif axes and self._strict:
            # Some kernels add term by term, which gives the errors of equal terms one sign. NumPy's pairwise
            # sums miss that: for the length of 37 equal rows, the error was 3 units instead of 18 (decision
            # 0010).
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
        if not (self.narrow_bias_gradients and self.precision.name == "bfloat16"):
            return self._unbroadcast(bias)

        def pullback(gradient: Array) -> Array:
            # One rounding per term, as in the declared kernels.
            return functools.reduce(
                lambda total, term: self.settle(total + term), gradient, np.zeros(bias.shape, gradient.dtype)
            )

        return pullback

    def _pulls(
        self, subscripts: str, a: Node, b: Node
    ) -> tuple[tuple[Node, Pullback], tuple[Node, Pullback]]:
        operands, result = subscripts.split("->")
        index_a, index_b = operands.split(",")

        def pull(target: str, other: Node, index: str) -> Pullback:
            return lambda g: self._product(f"{result},{index}->{target}", g, other.value)

        return (a, pull(index_a, b, index_b)), (b, pull(index_b, a, index_a))

    def _product(self, subscripts: str, a: Array, b: Array) -> Array:
        a, b = self._factor(a), self._factor(b)
        terms = count_terms(subscripts, a.shape[self.lead :])
        contracted = self._contract(subscripts, a, b)
        if self._strict and self.precision.name == "float16":
            # In another order of summation, or before scaling, a partial sum may overflow float16 although
            # the sum does not.
            contracted = np.where(
                self._contract(subscripts, abs(a), abs(b)) > self.precision.largest, np.inf, contracted
            )
        return self.settle_sum(contracted, lambda: self._squares(subscripts, a, b), terms)

    def _factor(self, values: Array) -> Array:
        return self.precision.round_factor(values, self._cut)

    def _squares(self, subscripts: str, a: Array, b: Array) -> Array:
        return contract(subscripts, np.square(a), np.square(b))

    def _contract(self, subscripts: str, a: Array, b: Array) -> Array:
        if self._generator:
            operands, result = subscripts.split("->")
            index_a, index_b = operands.split(",")
            for index in sorted((set(index_a) & set(index_b)) - set(result)):
                # Both operands are permuted alike along a summed index, which changes only the order of the
                # products.
                order = self._generator.permutation(a.shape[index_a.index(index)])
                a, b = np.take(a, order, index_a.index(index)), np.take(b, order, index_b.index(index))
        return contract(subscripts, a, b)
