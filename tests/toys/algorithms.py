"""Allowed algorithms other than the reference's (SPEC ALG-1, ALG-4 to ALG-7, ALG-9).

They compute with NumPy in the precision itself, and share neither algorithms nor noise with the estimate of
sigma. Half precisions keep float32 inside a step and round its result.
"""

import math

import numpy as np
from scipy import special

from concord.spec.arithmetic import Arithmetic
from concord.spec.elementary import contract
from concord.spec.encoder import Model

# Lanes of a vector register: few, so that small sums fill several registers.
REGISTER = 4


# Sums and products.


def wider(values):
    # Wide enough for exact products of float32; otherwise just wider.
    return values.astype(np.float64 if values.dtype == np.float32 else np.longdouble)


def total_sequential(terms):
    total = np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        total = total + term
    return total


def total_pairwise(terms):
    if len(terms) < 2:
        return total_sequential(terms)
    half = len(terms) // 2
    return total_pairwise(terms[:half]) + total_pairwise(terms[half:])


def total_compensated(terms):
    """Neumaier's sum."""
    total, lost = np.zeros(terms.shape[1:], terms.dtype), np.zeros(terms.shape[1:], terms.dtype)
    for term in terms:
        new = total + term
        lost = lost + np.where(abs(total) >= abs(term), (total - new) + term, (term - new) + total)
        total = new
    return total + np.where(np.isfinite(lost), lost, 0)


def total_in_blocks(terms):
    return total_sequential(np.stack([total_sequential(terms[lane::REGISTER]) for lane in range(REGISTER)]))


def sums(total, order=1):
    """Sums and products by ``total``, or with ``order=-1`` from the last term to the first."""

    class Sums(Arithmetic):
        def _sum(self, values, axes, keepdims, *rest, **named):
            if not axes:
                return self.settle(values)
            kept = tuple(
                axis for axis in range(values.ndim) if axis not in {axis % values.ndim for axis in axes}
            )
            terms = values.transpose(*(axis for axis in range(values.ndim) if axis not in kept), *kept)
            summed = total(terms.reshape(-1, *(values.shape[axis] for axis in kept))[::order])
            return self.settle(np.expand_dims(summed, axes) if keepdims else summed)

        def _contract(self, subscripts, a, b):
            return self.settle(total(np.stack(single_products(subscripts, a, b)[::order])))

    return Sums


def single_products(subscripts, a, b):
    # One array for each value of the first index that the result lacks.
    operands, result = subscripts.split("->")
    index_a, index_b = operands.split(",")
    index = next(index for index in index_a if index in index_b and index not in result)
    place_a, place_b = index_a.index(index), index_b.index(index)
    return [
        contract(subscripts, np.take(a, [i], place_a), np.take(b, [i], place_b))
        for i in range(a.shape[place_a])
    ]


class FusedMultiplyAdd(Arithmetic):
    def _contract(self, subscripts, a, b):
        products = single_products(subscripts, wider(a), wider(b))
        total = np.zeros(products[0].shape, a.dtype) if products else contract(subscripts, a, b)
        for product in products:
            total = (total + product).astype(a.dtype)
        return self.settle(total)


class Wide(Arithmetic):
    """Sums products in a wider precision, and rounds once."""

    def _contract(self, subscripts, a, b):
        return self.settle(contract(subscripts, wider(a), wider(b)).astype(a.dtype))


class FusedGain(Arithmetic):
    """Does not round a product before adding to it, as in a norm's gain and bias."""

    product = (None, None)

    def multiply(self, a, b):
        result = super().multiply(a, b)
        self.product = result, wider(a.value) * wider(b.value)
        return result

    def add(self, a, b):
        result, (factor, product) = super().add(a, b), self.product
        if a is not factor or product is None:
            return result
        return self._record(self.settle((product + wider(b.value)).astype(a.value.dtype)), *result.operands)


class BiasAsARow(Arithmetic):
    def affine(self, subscripts, a, b, bias):
        assert subscripts == "ni,io->no"
        inputs = np.concatenate([a.value, np.ones_like(a.value[:, :1])], 1)
        rows = np.concatenate([b.value, bias.value[None]], 0)

        def to_bias(gradient):
            return self.settle(contract("ni,no->io", inputs[:, -1:], gradient)[0])

        return self._record(
            self.settle(contract(subscripts, inputs, rows)), *self._pulls(subscripts, a, b), (bias, to_bias)
        )


class Reciprocals(Arithmetic):
    def divide(self, a, b):
        back_a, back_b, inverse = self._unbroadcast(a), self._unbroadcast(b), self.settle(1 / b.value)
        value = self.settle(a.value * inverse)
        return self._record(
            value,
            (a, lambda g: back_a(self.settle(g * inverse))),
            (b, lambda g: -back_b(self.settle(self.settle(g * value) * inverse))),
        )

    def divide_by(self, a, divisor):
        inverse = self.precision.round(np.asarray(1 / divisor, self.precision.storage))
        return self._record(self.settle(a.value * inverse), (a, lambda g: self.settle(g * inverse)))

    def sqrt(self, a):
        with np.errstate(divide="ignore"):
            inverse = self.settle(1 / np.sqrt(a.value))
        root = np.where(a.value > 0, self.settle(a.value * inverse), a.value).astype(a.value.dtype)
        return self._record(
            root, (a, lambda g: self.settle(g * self.settle(inverse * a.value.dtype.type(0.5))))
        )


# Tables.


def tables(added):
    """An arithmetic whose `added` sums a table's gradient: zeros (rows, D), rows (N,), and terms (N, D)."""

    class Tables(Arithmetic):
        def take(self, table, rows):
            def pullback(gradient):
                terms = gradient.reshape(-1, gradient.shape[-1])
                return self.settle(added(np.zeros(table.shape, terms.dtype), rows.reshape(-1), terms))

            return self._record(table.value[rows], (table, pullback))

    return Tables


def added_by_products(total, rows, terms):
    selection, half = np.eye(len(total), dtype=total.dtype)[rows], len(rows) // 2
    halves = slice(half), slice(half, None)
    first, second = (contract("nr,nd->rd", selection[part], terms[part]) for part in halves)
    return first + second


def added_by_row(total, rows, terms):
    for row in np.unique(rows):
        total[row] = total_pairwise(terms[rows == row])
    return total


def added_in_reverse(total, rows, terms):
    """Scatter in reverse order, as threads may do."""
    np.add.at(total, rows[::-1], terms[::-1])
    return total


# Functions.


def elementwise(a, x, value, slope):
    return a._record(a.settle(value), (x, lambda gradient: a.settle(gradient * slope)))


class PowersOfTwo(Arithmetic):
    """Softmax by powers of two, which are faster on some hardware."""

    def softmax(self, a, floor=None, sums=None):
        powers = np.exp2((a.value - a.value.max(-1, keepdims=True)) * math.log2(math.e))
        value = self.settle(powers / powers.sum(-1, keepdims=True))

        def pullback(gradient):
            return self.settle(value * (gradient - (gradient * value).sum(-1, keepdims=True)))

        return self._record(value, (a, pullback))


class GeluByErfc(Model):
    def activation(self, x, active):
        if self.config.activation != "gelu_erf":
            return super().activation(x, active)
        share = special.erfc(x.value * -math.sqrt(0.5)) * 0.5
        slope = share + x.value * np.exp(x.value * x.value * -0.5) * (1 / math.sqrt(2 * math.pi))
        return elementwise(self.a, x, x.value * share, slope)


class TanhByExponential(Arithmetic):
    def tanh(self, a, absolute=False):
        grown = np.expm1(np.minimum(2 * a.value, 40))
        value = self.settle(grown / (grown + 2))
        return elementwise(self, a, value, (1 - value) * (1 + value))


class Softplus(Arithmetic):
    """Binary cross-entropy by softplus of the logit on the wrong side."""

    def sigmoid_cross_entropy(self, logits, targets):
        signed = np.where(targets > 0, -logits.value, logits.value)
        powers = np.exp(-abs(signed))
        chance = np.where(signed >= 0, 1, powers) / (1 + powers)
        value = np.logaddexp(np.zeros_like(signed), signed)
        return elementwise(self, logits, value, np.where(targets > 0, -chance, chance))
