"""Elementary steps, each computed otherwise than the reference computes it, and just as rightly.

(SPEC ALG-1 to ALG-8).

Forward and backward, in NumPy numbers of the precision itself: what stands here shares with the estimate of
sigma neither its ways nor its noise. Half precisions keep float32 inside a step and round its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.elementary import contract
from concord.spec.model import Model
from concord.spec.tape import Node, Values

BLOCK = 4
"""Entries of a block: few, so that small cases have several."""


# Softmax.


def blocks(size: int) -> list[slice]:
    """Return an axis in blocks."""
    return [slice(first, first + BLOCK) for first in range(0, size, BLOCK)]


def by_reciprocal(x: Values) -> Values:
    """Softmax with one reciprocal for each row."""
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    value: Values = exponentials * (1 / exponentials.sum(-1, keepdims=True))
    return value


def by_powers_of_two(x: Values) -> Values:
    """Softmax from powers of two, which some hardware computes faster."""
    exponentials = np.exp2((x - x.max(-1, keepdims=True)) * x.dtype.type(math.log2(math.e)))
    value: Values = exponentials / exponentials.sum(-1, keepdims=True)
    return value


def from_normalizer(x: Values) -> Values:
    """Softmax from each row's log-sum-exp, as a backward pass recomputes it."""
    largest = x.max(-1, keepdims=True)
    value: Values = np.exp(x - (largest + np.log(np.exp(x - largest).sum(-1, keepdims=True))))
    return value


def where_any(visible: Any, again: Values, weights: Values) -> Values:
    """Return weights that were computed again, and the kept ones of rows without any visible key.

    (SPEC ALG-3).
    """
    return (
        again
        if visible is None
        else np.where(np.broadcast_to(visible, weights.shape).any(-1, keepdims=True), again, weights)
    )


def through_row_sums(weights: Values, gradient: Values, x: Values) -> Values:
    of_scores: Values = weights * (gradient - (gradient * weights).sum(-1, keepdims=True))
    return of_scores


def multiplied_out(weights: Values, gradient: Values, x: Values) -> Values:
    product = gradient * weights
    of_scores: Values = product - weights * product.sum(-1, keepdims=True)
    return of_scores


def of_the_first(x: Values) -> Values:
    """Return which entry of a row gets the gradient of its largest one.

    The first of equal ones (`torch.max(dim)`).
    """
    return np.asarray(np.arange(x.shape[-1]) == x.argmax(-1)[..., None], x.dtype)


def of_each(x: Values) -> Values:
    """Return the same where every one of equal ones gets it whole (`paddle.max`)."""
    return np.asarray(x == x.max(-1, keepdims=True), x.dtype)


def in_equal_shares(x: Values) -> Values:
    """Return the same where equal ones share it (`torch.amax`, `jax.numpy.max`, `tf.reduce_max`)."""
    return np.asarray(of_each(x) / of_each(x).sum(-1, keepdims=True))


def through_largest(share: Callable[[Values], Values]) -> Callable[[Values, Values, Values], Values]:
    """Return a derivative step by step, which flows through the entry that was taken off too.

    Args:
        share: of the gradient of a row's largest entry, for each entry.
    """

    def backward(weights: Values, gradient: Values, x: Values) -> Values:
        exponentials = np.exp(x - x.max(-1, keepdims=True))
        total = exponentials.sum(-1, keepdims=True)
        of_total = -(gradient * weights / total).sum(-1, keepdims=True)
        of_shifted = (gradient / total + of_total) * exponentials
        return np.asarray(of_shifted - share(x) * of_shifted.sum(-1, keepdims=True))

    return backward


def softmax(
    forward: Callable[[Values], Values] = by_reciprocal,
    weights: Callable[[Values], Values] | None = None,
    backward: Callable[[Values, Values, Values], Values] = through_row_sums,
) -> type[Arithmetic]:
    """Return an arithmetic with a softmax of its own.

    Args:
        weights: computes the weights again for the backward pass; by default they are kept.
        backward: takes weights, their gradient, and what they are the softmax of.
    """

    class Softmax(Arithmetic):
        def softmax(self, a: Node, floor: Any = None, visible: Any = None, sums: Any = None) -> Node:
            value = self.settle(forward(a.value))

            def pullback(gradient: Values) -> Values:
                return self.settle(
                    backward(
                        value if weights is None else where_any(visible, weights(a.value), value),
                        gradient,
                        a.value,
                    )
                )

            return self._record(value, (a, pullback))

    return Softmax


# Attention as one operation.

CONTEXT = "bhqs,bshk->bqhk"


def attend_in_blocks(scores: Values, v: Values) -> Values:
    """Weighted sum of values in one pass over blocks of keys, divided at its end.

    (B, H, Q, S), (B, S, H, K) to (B, Q, H, K).
    """
    largest, total = np.full_like(scores[..., :1], -np.inf), np.zeros_like(scores[..., :1])
    context = np.zeros((*scores.shape[:3], v.shape[-1]), scores.dtype)  # (B, H, Q, K)
    for block in blocks(scores.shape[-1]):
        now = np.maximum(largest, scores[..., block].max(-1, keepdims=True))
        exponentials, rescaled = np.exp(scores[..., block] - now), np.exp(largest - now)
        total = total * rescaled + exponentials.sum(-1, keepdims=True)
        context = context * rescaled + contract("bhqs,bshk->bhqk", exponentials, v[:, block])
        largest = now
    return (context / total).transpose(0, 2, 1, 3)


def attention(blocked: bool, normalizer: bool, from_context: bool) -> type[Arithmetic]:
    """Return an arithmetic that computes the context from scores at once, as fused kernels do.

    Args:
        blocked: whether in blocks with a running maximum.
        normalizer: whether the backward pass computes weights again from the log-sum-exp.
        from_context: whether row sums are of the context times its gradient, not of weights times theirs.
    """

    class Attention(Arithmetic):
        softmaxes: tuple[tuple[Node, Node, Any], ...] = ()

        def softmax(self, a: Node, floor: Any = None, visible: Any = None, sums: Any = None) -> Node:
            weights = super().softmax(a, floor)
            self.softmaxes = ((weights, a, visible),)
            return weights

        def attend(self, weights: Node, values: Node, sums: Any = None) -> Node:
            for softmax, scores, visible in self.softmaxes:
                if weights is softmax:
                    return self.context(scores, weights, values, visible)
            return super().attend(weights, values, sums)

        def context(self, scores: Node, weights: Node, v: Node, visible: Any) -> Node:
            value = self.settle(
                attend_in_blocks(scores.value, v.value)
                if blocked
                else contract(CONTEXT, weights.value, v.value)
            )
            again = (
                where_any(visible, from_normalizer(scores.value), weights.value)
                if normalizer
                else weights.value
            )

            def to_scores(gradient: Values) -> Values:
                of_weights = contract("bqhk,bshk->bhqs", gradient, v.value)
                row_sums = (
                    (gradient * value).sum(-1).transpose(0, 2, 1)[..., None]
                    if from_context
                    else (of_weights * again).sum(-1, keepdims=True)
                )
                return self.settle(again * (of_weights - row_sums))

            return self._record(
                value, (scores, to_scores), (v, lambda g: self.settle(contract("bhqs,bqhk->bshk", again, g)))
            )

    return Attention


# Sums and products.


def wider(values: Values) -> Any:
    """Return numbers in a precision that holds products of them, or more of their digits."""
    return values.astype(np.float64 if values.dtype == np.float32 else np.longdouble)


def total_sequential(terms: Values) -> Values:
    """Sum over the first axis, one term after the other."""
    total = np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        total = total + term
    return total


def total_pairwise(terms: Values) -> Values:
    """Sum over the first axis by halves."""
    if len(terms) < 2:
        return total_sequential(terms)
    half = len(terms) // 2
    return total_pairwise(terms[:half]) + total_pairwise(terms[half:])


def total_compensated(terms: Values) -> Values:
    """Sum over the first axis, with what each addition lost carried along (Neumaier)."""
    total, lost = np.zeros(terms.shape[1:], terms.dtype), np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        new = total + term
        lost = lost + np.where(abs(total) >= abs(term), (total - new) + term, (term - new) + total)
        total = new
    return total + np.where(np.isfinite(lost), lost, 0)


def total_in_blocks(terms: Values) -> Values:
    """Sum over the first axis in as many running sums as a vector register has places, which are added at
    the end.
    """
    return (
        total_sequential(
            np.stack([total_sequential(terms[lane::BLOCK]) for lane in range(min(BLOCK, len(terms)))])
        )
        if len(terms)
        else total_sequential(terms)
    )


def sums(total: Callable[[Values], Values], order: int = 1) -> type[Arithmetic]:
    """Return an arithmetic that adds up in a way of its own, products too.

    Args:
        order: -1: from the last term to the first.
    """

    class Sums(Arithmetic):
        def _sum(
            self, values: Values, axes: tuple[int, ...], keepdims: bool, *rest: Any, **named: Any
        ) -> Values:
            if not axes:
                return self.settle(values)
            kept = tuple(
                axis for axis in range(values.ndim) if axis not in {axis % values.ndim for axis in axes}
            )
            terms = values.transpose(*(axis for axis in range(values.ndim) if axis not in kept), *kept)
            summed = total(terms.reshape(-1, *(values.shape[axis] for axis in kept))[::order])
            return self.settle(np.expand_dims(summed, axes) if keepdims else summed)

        def _contract(self, subscripts: str, a: Values, b: Values) -> Values:
            return self.settle(total(np.stack(single_products(subscripts, a, b)[::order])))

    return Sums


def single_products(subscripts: str, a: Values, b: Values) -> list[Values]:
    """Return what a contraction adds up.

    One array for each value of the first index that the result lacks.
    """
    left, result = subscripts.split("->")
    index_a, index_b = left.split(",")
    index = next(index for index in index_a if index in index_b and index not in result)
    place_a, place_b = index_a.index(index), index_b.index(index)
    return [
        contract(subscripts, np.take(a, [i], place_a), np.take(b, [i], place_b))
        for i in range(a.shape[place_a])
    ]


class FusedMultiplyAdd(Arithmetic):
    """Products are added to a sum exactly, and the sum alone is rounded."""

    def _contract(self, subscripts: str, a: Values, b: Values) -> Values:
        products = single_products(subscripts, wider(a), wider(b))
        total = np.zeros(products[0].shape, a.dtype) if products else contract(subscripts, a, b)
        for product in products:
            total = (total + product).astype(a.dtype)
        return self.settle(total)


class Wide(Arithmetic):
    """Products are summed in a wider precision, and rounded once."""

    def _contract(self, subscripts: str, a: Values, b: Values) -> Values:
        return self.settle(contract(subscripts, wider(a), wider(b)).astype(a.dtype))


class BiasAsARow(Arithmetic):
    """The bias is one more row of the weight, its input 1."""

    def affine(self, subscripts: str, a: Node, b: Node, bias: Node) -> Node:
        assert subscripts == "ni,io->no"
        inputs = np.concatenate([a.value, np.ones_like(a.value[:, :1])], 1)
        rows = np.concatenate([b.value, bias.value[None]], 0)

        def to_bias(gradient: Values) -> Values:
            return self.settle(contract("ni,no->io", inputs[:, -1:], gradient)[0])

        return self._record(
            self.settle(contract(subscripts, inputs, rows)), *self._pulls(subscripts, a, b), (bias, to_bias)
        )


class Reciprocals(Arithmetic):
    """Divides by multiplying with a reciprocal, by constants too."""

    def divide(self, a: Node, b: Node) -> Node:
        back_a, back_b, inverse = self._unbroadcast(a), self._unbroadcast(b), self.settle(1 / b.value)
        value = self.settle(a.value * inverse)
        return self._record(
            value,
            (a, lambda g: back_a(self.settle(g * inverse))),
            (b, lambda g: -back_b(self.settle(self.settle(g * value) * inverse))),
        )

    def divide_by(self, a: Node, divisor: float) -> Node:
        inverse = self.precision.round(np.asarray(1 / divisor, self.precision.storage))
        return self._record(self.settle(a.value * inverse), (a, lambda g: self.settle(g * inverse)))

    def sqrt(self, a: Node) -> Node:
        with np.errstate(divide="ignore"):
            inverse = self.settle(1 / np.sqrt(a.value))
        root = np.where(a.value > 0, self.settle(a.value * inverse), a.value).astype(a.value.dtype)
        return self._record(
            root, (a, lambda g: self.settle(g * self.settle(inverse * a.value.dtype.type(0.5))))
        )


# Tables.


class OneHot(Arithmetic):
    """Rows of a table are looked up by a product with one-hot rows.

    Their gradient is the sum of a product for each half of them.
    """

    def take(self, table: Node, rows: Any) -> Node:
        chosen = np.eye(table.shape[0], dtype=table.value.dtype)[rows.reshape(-1)]  # (N, rows)

        def pullback(gradient: Values) -> Values:
            terms, half = gradient.reshape(-1, gradient.shape[-1]), len(chosen) // 2
            return self.settle(
                contract("nr,nd->rd", chosen[:half], terms[:half])
                + contract("nr,nd->rd", chosen[half:], terms[half:])
            )

        return self._record(
            contract("nr,rd->nd", chosen, table.value).reshape(*rows.shape, table.shape[-1]),
            (table, pullback),
        )


class SortedRows(Arithmetic):
    """The gradient of a table is summed row by row, after its uses have been sorted."""

    def take(self, table: Node, rows: Any) -> Node:
        flat = rows.reshape(-1)
        order = np.argsort(flat, kind="stable")

        def pullback(gradient: Values) -> Values:
            total, terms = np.zeros(table.shape, gradient.dtype), gradient.reshape(-1, gradient.shape[-1])
            for row in np.unique(flat):
                total[row] = total_pairwise(terms[order[flat[order] == row]])
            return self.settle(total)

        return self._record(table.value[rows], (table, pullback))


class ScatteredRows(Arithmetic):
    """The gradient of a table is added up in the opposite order of its uses, as threads may come to it."""

    def take(self, table: Node, rows: Any) -> Node:
        def pullback(gradient: Values) -> Values:
            total = np.zeros(table.shape, gradient.dtype)
            np.add.at(total, rows.reshape(-1)[::-1], gradient.reshape(-1, gradient.shape[-1])[::-1])
            return self.settle(total)

        return self._record(table.value[rows], (table, pullback))


# Functions.


class TanhByExponential(Arithmetic):
    """Hyperbolic tangent from exp(2x) - 1."""

    def tanh(self, a: Node, absolute: bool = False) -> Node:
        grown = np.expm1(np.minimum(2 * a.value, 40))
        value = self.settle(grown / (grown + 2))
        return self._record(value, (a, lambda g: self.settle(g * (1 - value) * (1 + value))))


class CrossEntropy(Arithmetic):
    """Cross-entropy as one step: its gradient is softmax less what flows back."""

    def log_softmax(self, a: Node, floor: Any = None) -> Node:
        shifted = a.value - a.value.max(-1, keepdims=True)
        total = np.exp(shifted).sum(-1, keepdims=True)
        chance = np.exp(shifted) / total

        def pullback(gradient: Values) -> Values:
            return self.settle(gradient - chance * gradient.sum(-1, keepdims=True))

        return self._record(self.settle(shifted - np.log(total)), (a, pullback))


class Softplus(Arithmetic):
    """Binary cross-entropy as softplus of the logit on the wrong side."""

    def sigmoid_cross_entropy(self, logits: Node, targets: Any) -> Node:
        signed = np.where(targets > 0, -logits.value, logits.value)
        value = self.settle(np.logaddexp(np.zeros_like(signed), signed))

        def pullback(gradient: Values) -> Values:
            chance = np.where(signed >= 0, 1, np.exp(-abs(signed))) / (1 + np.exp(-abs(signed)))
            return self.settle(gradient * np.where(targets > 0, -chance, chance))

        return self._record(value, (logits, pullback))


# Steps of several operations.

Statistics = Callable[[Values], tuple[Values, Values]]
"""Takes rows (…, D); returns their mean and the sum of squared differences from it, (…, 1)."""


# Layer norm.


def two_passes(x: Values) -> tuple[Values, Values]:
    """The mean first, as a product with 1 / D, then the squares."""
    mean = (x * x.dtype.type(1 / x.shape[-1])).sum(-1, keepdims=True)
    return mean, np.square(x - mean).sum(-1, keepdims=True)


def one_pass(shift: Callable[[Values], Values]) -> Statistics:
    """Return statistics in one pass: the sum of squares less the square of the sum, after a number was taken
    off.

    Args:
        shift: gives that number for each row, (…, 1).
    """

    def statistics(x: Values) -> tuple[Values, Values]:
        taken_off, count = shift(x), x.dtype.type(x.shape[-1])
        left = x - taken_off
        total = left.sum(-1, keepdims=True)
        return taken_off + total / count, np.square(left).sum(-1, keepdims=True) - total * total / count

    return statistics


def unshifted(x: Values) -> Values:
    return np.zeros_like(x[..., :1])


def zero_or_first(x: Values) -> Values:
    """Zero where it lies between a row's entries; else the first of them."""
    around = (x.min(-1, keepdims=True) <= 0) & (x.max(-1, keepdims=True) >= 0)
    return np.where(around, unshifted(x), x[..., :1])


def farthest(x: Values) -> Values:
    """The entry of a row that is farthest from its mean."""
    place = abs(x - x.mean(-1, keepdims=True)).argmax(-1)[..., None]
    entry: Values = np.take_along_axis(x, place, -1)
    return entry


Normalized = Callable[[Values, Values, Values, Values, Values], Values]
"""Takes rows, their mean and deviation, gain and offset."""


def divided(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x - mean) / deviation * gain + offset


def times_reciprocal(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x - mean) * (1 / deviation) * gain + offset


def fused_multiply_add(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    value: Values = (wider((x - mean) * (1 / deviation)) * wider(gain) + wider(offset)).astype(x.dtype)
    return value


def multiplied_out_rows(x: Values, mean: Values, deviation: Values, gain: Values, offset: Values) -> Values:
    return (x * (1 / deviation) - mean * (1 / deviation)) * gain + offset


Slope = Callable[[Values, Values, Values, Values], Values]
"""Takes rows, their mean, a gradient and a factor; returns differences times the factor times the sum of
gradient times differences.
"""


def of_differences(x: Values, mean: Values, gradient: Values, factor: Values) -> Values:
    centered: Values = x - mean
    slope: Values = centered * ((gradient * centered).sum(-1, keepdims=True) * factor)
    return slope


def of_products(x: Values, mean: Values, gradient: Values, factor: Values) -> Values:
    share: Values = ((gradient * x).sum(-1, keepdims=True) - mean * gradient.sum(-1, keepdims=True)) * factor
    slope: Values = x * share - mean * share
    return slope


def norm(
    statistics: Statistics, normalized: Normalized = divided, slope: Slope = of_differences
) -> type[Model]:
    """Return a model whose layer norm is one step, forward and backward."""

    class Normed(Model):
        def norm(self, name: str, x: Node) -> Node:
            gain, offset = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            count = x.value.dtype.type(self.config.d_model - (self.config.norm_variance == "unbiased"))
            epsilon = x.value.dtype.type(self.config.norm_epsilon)
            inside = self.config.norm_epsilon_placement == "inside"
            mean, squares = statistics(x.value)
            root = np.sqrt(np.maximum(squares, 0) / count + (epsilon if inside else 0))
            deviation = root if inside else root + epsilon
            one, zero = np.ones_like(gain.value), np.zeros_like(offset.value)

            def to_x(gradient: Values) -> Values:
                inner = gradient * gain.value
                by_variance = slope(x.value, mean, inner, 1 / (deviation * deviation * root * count))
                return self.a.settle((inner - inner.mean(-1, keepdims=True)) / deviation - by_variance)

            def to_gain(gradient: Values) -> Values:
                return self.a.settle(
                    (gradient * normalized(x.value, mean, deviation, one, zero))
                    .reshape(-1, x.shape[-1])
                    .sum(0)
                )

            value = self.a.settle(normalized(x.value, mean, deviation, gain.value, offset.value))
            return self.a._record(
                value,
                (x, to_x),
                (gain, to_gain),
                (offset, lambda g: self.a.settle(g.reshape(-1, x.shape[-1]).sum(0))),
            )

    return Normed


# Activations.

_erfc = np.frompyfunc(math.erfc, 1, 1)


def erfc(x: Values) -> Values:
    complement: Values = np.asarray(_erfc(x.astype(np.float64)), np.float64).astype(x.dtype)
    return complement


def gelu_erfc(x: Values) -> tuple[Values, Values]:
    """GELU and its derivative from the complementary error function."""
    share = erfc(x * x.dtype.type(-math.sqrt(0.5))) * x.dtype.type(0.5)
    return x * share, share + x * np.exp(x * x * x.dtype.type(-0.5)) * x.dtype.type(
        1 / math.sqrt(2 * math.pi)
    )


def activation(**functions: Callable[[Values], tuple[Values, Values]]) -> type[Model]:
    """Return a model with activations, by the name of the option, that yield their derivative too."""

    class Activated(Model):
        def activation(self, x: Node, active: Any) -> Node:
            if self.config.activation not in functions:
                return super().activation(x, active)
            value, slope = functions[self.config.activation](x.value)
            return self.a._record(self.a.settle(value), (x, lambda g: self.a.settle(g * slope)))

    return Activated
