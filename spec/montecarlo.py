"""Monte Carlo arithmetic.

Exact but for noise after each operation, as large as rounding in a precision may be.

Samples are computed side by side along a leading axis, as many at a time as fit into memory: each sees its
own noise. A value that no noise has reached yet has a leading axis of size 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.elementary import contract, count_terms
from concord.spec.precision import precision
from concord.spec.tape import Node, Pullback

Size = Callable[[slice], Array]

BLOCK = 1 << 16
"""Elements that are perturbed at a time: few enough to stay in a processor's cache."""

PERIOD = (1 << 18) + 29
"""Random numbers that are drawn once; each operation takes them up from a place of its own."""

NEAR = 16.0
"""Unit roundoffs of the largest score of a row by which a score may err where that decides to which side
its sum with a mask constant is rounded.
"""

EQUAL = 1e-5
"""Share by which the effective number of a sum's terms may differ from a whole one where they count as
equal.
"""


@functools.cache
def _uniform(storage: np.dtype) -> Array:
    drawn = np.random.Generator(np.random.SFC64(0x5EED)).random(PERIOD)
    uniform: Array = (2 * drawn - 1).astype(storage)
    return uniform


class MonteCarlo(Arithmetic):
    """Elementary operations on samples, each perturbed on its own.

    An operation whose result is y adds ``(units * u * |y| + smallest normal) * xi``, with u the unit roundoff
    and xi uniform in [-1, 1]. A sum of K terms t adds ``(u_acc * sqrt(v) + K * smallest normal) * xi``, with
    ``v = K/3 * y² + (K+1)/6 * max(sum t² - y²/K, 0)``: the variance of its rounding in an unknown order of
    summation. Each term that is smaller than the smallest normal number of what sums are kept in may be lost.
    Selections, masks and maxima add nothing.

    Attention weights may be computed from the logarithm of a row's sum, of whose rounding u_acc * |logarithm|
    each then has the same share, and so may they be for the derivative; the row sums in it may be those of
    outputs and their gradients, and what a row sums to may flow back to its largest entry (SPEC ALG-1 to
    ALG-3). The variance of a norm may be one of merged blocks, or Welford's, which errs by the rounding of a
    mean times the deviation, or one of a single pass over rows less one of their entries (SPEC ALG-5).

    In TF32 a factor x of a product is multiplied by ``1 + f * xi``, with f = 2^-11, in every first sample of
    two, and by
    ``1 - f * (1 + xi)`` in every second: a kernel may round its factors, or leave it to tensor cores, which
    read the upper 19 bits of a float32 number and so cut it off. That errs by up to 2 f, and always towards
    zero: in a sum of equal signs it does not average out. Sigma is a mean square error about the truth, so
    that samples with a bias tell how large it may be.

    Samples are computed in the type that holds the numbers of the precision: of float64 and float32 each is a
    correct run itself, in which what is rounded goes up or down at random. They are far smaller and faster so
    than in a wider type.

    Args:
        dtype: the precision or mode whose rounding is imitated.
        samples: how many there are side by side.
        first: the number of the first of them; it decides its noise, and whether it has the bias.
    """

    lead = 1

    def __init__(self, dtype: str, samples: int, first: int = 0) -> None:
        target = precision(dtype)
        super().__init__(target.storage.name)
        self.samples, self.first, self.closed = (
            samples,
            first,
            True,
        )  # which errs by all that the other way does, and more
        self.target = target
        self._roundoff, self._accumulation, self._least = (
            target.unit_roundoff,
            target.accumulation,
            target.smallest_normal,
        )
        self._lost = min(
            target.smallest_normal, precision("float32").smallest_normal
        )  # half precisions sum in float32
        self._half = self._roundoff > self._accumulation
        self._places = np.random.Generator(np.random.SFC64([first, 0x5EED]))

    def override(self, a: Node, values: Array, unrounded: bool = False) -> Node:
        """Return given values in place of computed ones.

        Half precisions may hold on to wider values than those that they deliver, and so does what says so:
        there the given ones are perturbed, but for constants that absorb what they came from.
        """
        given = self.leaf(values).value
        if self._half or unrounded:
            perturbed = self.settle(given)
            given = perturbed if a.constant is None else np.where(a.constant, given, perturbed)
        return self._replacing(a, given)

    def uncertain(self, a: Node, size: Array) -> Node:
        """Perturb an input by what it may differ from the one that is given."""
        values = self._perturbed(a.value, self._of(size[None]))
        return Node(values, a.shape, taped=False)

    def given_gradient(self, values: Array) -> Array:
        """Return a gradient that stands in place of a computed one, perturbed as it may have been rounded
        when it was delivered.
        """
        return self.settle(self.leaf(values).value)

    def affine(self, subscripts: str, a: Node, b: Node, bias: Node) -> Node:
        """Contract two tensors and add a third.

        A framework may add the bias after the products or begin the sum with it: where nothing is rounded
        between the two, it is one more term in an unknown order.
        """
        if self._half:
            return super().affine(subscripts, a, b, bias)
        left, right = self._factor(a.value), self._factor(b.value)
        added = bias.value.reshape(
            (len(bias.value), *(1,) * (len(subscripts.partition("->")[2]) - len(bias.shape)), *bias.shape)
        )
        summed = self.settle_sum(
            self._contract(subscripts, left, right) + added,
            lambda: self._squares(subscripts, left, right) + np.square(self._one(added), dtype=np.float64),
            count_terms(subscripts, a.shape) + 1,
        )
        return self._record(summed, *self._pulls(subscripts, a, b), (bias, self._bias_pullback(bias)))

    def settle(self, values: Array, units: float = 1.0, absolute: float = 0.0) -> Array:
        """Perturb the result of an operation (:meth:`Arithmetic.settle`).

        One that is exact where numbers are so small that they may be lost.
        """
        share, least = units * self._roundoff, absolute * self._roundoff + self._least
        if not (units or absolute) and not ((abs(values) < least / self._roundoff) & (values != 0)).any():
            return values
        flat = values.reshape(len(values), -1)

        def size(part: slice) -> Array:
            own: Array = abs(flat[:, part])
            lost = least if absolute else least * (own > 0)  # zero is exact
            own *= share
            own += lost
            return own

        return self._perturbed(values, size)

    def settle_sum(
        self, values: Array, squares: Callable[[], Array], terms: float | Array, wide: bool = True
    ) -> Array:
        """Perturb a sum (:meth:`Arithmetic.settle_sum`), and round it to the precision if sums are wider
        than that.
        """
        # Each sample's own sum would say the same but for rounding: one estimate serves all.
        one, powers = self._one(values), squares()
        count = (
            max(terms, 1.0)
            if isinstance(terms, (int, float))
            else np.broadcast_to(np.maximum(terms, 1.0), powers.shape).reshape(1, -1)
        )
        flat, flat_powers = (x.reshape(len(x), -1) for x in (one, powers))
        roundoff = self._accumulation if wide else self._roundoff

        def size(part: slice) -> Array:
            terms = count if isinstance(count, (int, float)) else count[:, part]
            share = (terms + 1) / 6
            square: Array = np.square(flat[:, part], dtype=np.float64)
            # v as it says above, multiplied out: where squares sum to less than that of the mean, the first
            # term alone is left.
            power: Array = flat_powers[:, part] * share
            power += (terms / 3 - share / terms) * square
            np.maximum(power, square * (terms / 3), out=power)
            self._add_up(power, square, flat_powers[:, part])
            lost = (terms * self._lost + self._least) * (
                (power > 0) | (flat[:, part] != 0)
            )  # zero is exact; squares may underflow
            np.sqrt(power, out=power)
            power *= roundoff
            power += lost
            return power

        summed = self._perturbed(values, size)
        return self.settle(summed) if self._half else summed

    def _add_up(self, power: Array, square: Array, squares: Array) -> None:
        """Raise the variance of sums of equal terms, whose partial sums may all be rounded the same way.

        N terms err up to n/2 of their sum.

        The square of a sum over the sum of the squares is a whole number where all terms that are not zero
        are equal.
        """
        count = np.divide(square, squares, out=np.zeros_like(square), where=squares > 0)
        equal = abs(count - np.rint(count)) <= EQUAL * count
        np.maximum(power, np.square(count / 2) * square, out=power, where=equal)

    def vary_softmax(
        self, value: Array, x: Array, floor: float | Array | None, logarithms: Callable[[], Array]
    ) -> Array:
        """Perturb a row's weights together, by what the logarithm of its sum may err.

        (:meth:`Arithmetic.vary_softmax`).
        """
        return value * self._row_noise(1.0, logarithms())

    def vary_log_softmax(
        self, value: Array, x: Array, logarithms: Callable[[], Array], floor: float | None
    ) -> Array:
        """Perturb a row together, by what the logarithm of its sum may err.

        (:meth:`Arithmetic.vary_log_softmax`).
        """
        return value + self._row_noise(0.0, logarithms())

    def vary_row_sums(self, sums: Array, products: Array) -> Array:
        """Perturb row sums by what those of other products may err (:meth:`Arithmetic.vary_row_sums`)."""
        return self.settle_sum(
            sums,
            lambda: np.square(self._one(products), dtype=np.float64).sum(-1, keepdims=True),
            products.shape[-1],
            wide=False,
        )

    def vary_largest(self, gradient: Array, x: Array, terms: Array, shares: Array) -> Array:
        """Perturb the gradient of a row's largest entry by what the row may sum to.

        (:meth:`Arithmetic.vary_largest`).

        That flows back to the entry that is taken off: to the largest, and of a running maximum, from either
        end, to each that was the largest so far. There it is the rounding of the sums of terms, and of shares
        of the whole, up to the next larger entry.
        """
        x, terms, shares = (self._one(values) for values in (x, terms, shares))
        total = terms.sum(-1, keepdims=True, dtype=np.float64)
        # Entries that were equal before this noise differ by it now.
        reach, summed = 2 * self._roundoff * abs(x), (terms, shares * total)
        back = [values[..., ::-1] for values in (x, reach, *summed)]
        size = np.maximum(_rounding_up_to_larger(x, reach, *summed), _rounding_up_to_larger(*back)[..., ::-1])
        size = np.where(np.isfinite(size), size * self._roundoff, 0.0).reshape(-1)
        places = np.flatnonzero(size)
        perturbed = (
            np.broadcast_to(gradient, (self.samples, *gradient.shape[1:])).reshape(self.samples, -1).copy()
        )
        perturbed[:, places] = self._perturbed(perturbed[:, places], self._of(size[None, places]))
        return perturbed.reshape(self.samples, *gradient.shape[1:])

    def _row_noise(self, about: float, logarithms: Array) -> Array:
        """Return numbers about one, as far from it as the logarithm of a row's sum may err.

        Where it says nothing, that one.
        """
        size = self._accumulation * np.where(np.isfinite(logarithms), abs(logarithms), 0.0)
        return self._perturbed(np.full_like(size, about), self._of(size))

    def round_sum(self, values: Array, value: float, rounded: str) -> Array:
        """Add a constant and round.

        (:meth:`Arithmetic.round_sum`), to either side where a sum lies near the middle between two numbers.

        Too few samples would meet that by their own noise, and a correct run does once in many. Scores that a
        run delivered are its own.
        """
        if len(values) > 1 or self.samples == 1:
            near = NEAR * self._roundoff * abs(values).max(-1, keepdims=True)
            values = self._perturbed(values, self._of(np.broadcast_to(near, values.shape)))
        return super().round_sum(values, value, rounded)

    def center(self, x: Node, mean: Node) -> Node:
        """Perturb by how much rows differ from their mean.

        Multiplied out, both are rounded before their difference is taken (ALG-5).

        So are the gradients on their two ways back, which cancel where a row has one element.
        """
        back, both = self._unbroadcast(mean), 2 * self._accumulation
        return self._record(
            self._perturbed(self.settle(x.value - mean.value), self._of(both * abs(x.value))),
            (x, lambda gradient: self._perturbed(gradient, self._of(both * abs(gradient)))),
            (mean, lambda gradient: -back(gradient)),
        )

    def vary_total(self, total: Node, parts: Sequence[Node]) -> Node:
        """Perturb a sum of squares by what one sum over all tensors may err, in any order.

        (:meth:`Arithmetic.vary_total`).
        """
        if len(parts) == 1:
            return total

        def squares() -> Array:
            return np.asarray(
                [
                    sum(
                        float(np.square(np.square(self._one(part.value), dtype=np.float64)).sum())
                        for part in parts
                    )
                ]
            )

        return self._record(
            self.settle_sum(total.value, squares, sum(math.prod(part.shape) for part in parts)),
            (total, lambda gradient: gradient),
        )

    def vary_variance(self, variance: Node, mean: Node, centered: Node) -> Node:
        """Perturb the variance of rows as ways to compute it in one pass may err (ALG-5).

        By updates, or of blocks that are merged, it errs by the rounding of a mean times the deviation. As a
        mean square less the square of the mean, after one of the row's entries was taken off, it errs by the
        rounding of both.
        """
        squares = np.square(centered.value, dtype=np.float64)
        shift = np.sqrt(
            np.square(squares).mean(-1, keepdims=True)
        )  # the square of what the mean differs by from an entry
        merged = 2 * abs(mean.value) * np.sqrt(variance.value)
        shifted = math.sqrt(centered.shape[-1] / 3) * (variance.value + 3 * shift)
        size = (self._accumulation * np.hypot(merged, shifted)).astype(variance.value.dtype)
        return self._record(
            np.maximum(self._perturbed(variance.value, self._of(size)), 0),
            (variance, lambda gradient: gradient),
        )

    def _bias_pullback(self, bias: Node) -> Pullback:
        """Return how a gradient sums to that of a bias.

        Terms that are nearly equal are all rounded the same way when they are added one by one in few bits:
        the errors of the partial sums do not cancel, and are taken together.
        """
        if not (self.narrow_bias_gradients and self.target.name == "bfloat16"):
            return self._unbroadcast(bias)

        def pullback(gradient: Array) -> Array:
            partial = abs(np.cumsum(self._one(gradient), axis=1)).sum(1)
            return self._perturbed(gradient.sum(1), self._of(self._roundoff * partial + self._least))

        return pullback

    def _contract(self, subscripts: str, a: Array, b: Array) -> Array:
        """Contract sample by sample; an operand that is the same for all of them is taken as it is."""
        left, result = subscripts.split("->")
        indices = [
            f"z{index}" if len(x) > 1 else index for index, x in zip(left.split(","), (a, b), strict=True)
        ]
        sampled = "z" if len(a) > 1 or len(b) > 1 else ""
        contracted = contract(
            f"{','.join(indices)}->{sampled}{result}", *(x if len(x) > 1 else x[0] for x in (a, b))
        )
        return contracted if sampled else contracted[None]

    def _squares(self, subscripts: str, a: Array, b: Array) -> Array:
        """Return the sums of the squares of the products of a contraction.

        To say how large noise is, a few digits are enough.
        """
        largest = [float(abs(self._one(x)).max(initial=0.0)) or 1.0 for x in (a, b)]
        left, right = (
            np.square(self._flushed(self._one(x) / size, 1e-15), dtype=np.float32)
            for x, size in zip((a, b), largest, strict=True)
        )
        squares = self._contract(subscripts, left, right).astype(np.float64)
        squares *= np.square(np.float64(largest[0]) * largest[1])
        return squares

    def _flushed(self, values: Array, least: float) -> Array:
        """Return values with those that are all but zero set to zero, with which processors multiply very
        slowly.
        """
        small = abs(values) < least
        return np.where(small, values.dtype.type(0), values) if small.any() else values

    def _factor(self, values: Array) -> Array:
        """Perturb a factor of a matrix product by what rounding it may change, or cutting it off (TF32)."""
        if not self.target.factors:
            return values
        towards_zero = np.arange(self.first, self.first + self.samples) % 2
        return self._perturbed(values, self._of(self.target.factors * values), towards_zero)

    def _of(self, size: Array) -> Size:
        """Return what gives the sizes of noise for some columns of an array that is laid out sample by
        sample.
        """
        flat = size.reshape(len(size), -1)
        return lambda part: flat[:, part]

    def _perturbed(self, values: Array, size: Size, below: NDArray[np.integer] | None = None) -> Array:
        """Return samples of values that may err by a size.

        Args:
            size: gives the sizes for some columns of the array laid out as (1 or samples, …).
            below: by how many sizes the errors of each sample lie below zero in the mean, where they do.
        """
        perturbed = np.empty((self.samples, *values.shape[1:]), values.dtype)
        flat, out = values.reshape(len(values), -1), perturbed.reshape(self.samples, -1)
        for part in self._parts(out.shape[1]):
            noise = self._noise(out[:, part].shape)
            if below is not None:
                noise = noise - below[:, None]
            np.multiply(noise, size(part), out=out[:, part])
            out[:, part] += flat[:, part]
        return perturbed

    def _parts(self, columns: int) -> Iterator[slice]:
        width = max(1, BLOCK // self.samples)
        return (slice(start, min(start + width, columns)) for start in range(0, columns, width))

    def _noise(self, shape: tuple[int, ...]) -> Array:
        """Return numbers uniform in [-1, 1]."""
        count = shape[0] * shape[1]
        start = int(self._places.integers(PERIOD - count))
        return _uniform(self.precision.storage)[start : start + count].reshape(shape)


def _rounding_up_to_larger(x: Array, reach: Array, *summed: Array) -> Array:
    """Return how many unit roundoffs sums of each row may err, from its start as far as an entry stays the
    largest; 0 where one never is.

    Args:
        reach: by how much an entry may be less than another and still be as large.
    """
    size, shape = x.shape[-1], x.shape
    count, power = np.arange(1, size + 1), np.zeros(shape)
    for terms in summed:
        total, squares = (
            np.cumsum(values, -1, dtype=np.float64) for values in (terms, np.square(terms, dtype=np.float64))
        )
        power += count / 3 * np.square(total) + (count + 1) / 6 * np.maximum(
            squares - np.square(total) / count, 0
        )
    largest = np.maximum.accumulate(x, -1)
    larger = x[..., 1:] - reach[..., 1:] > largest[..., :-1]
    ends = np.append(larger, np.ones((*shape[:-1], 1), bool), -1)
    end = np.minimum.accumulate(np.where(ends, count - 1, size)[..., ::-1], -1)[..., ::-1]
    rounding: Array = np.sqrt(np.where(x + reach >= largest, np.take_along_axis(power, end, -1), 0.0))
    return rounding
