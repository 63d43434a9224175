"""Monte Carlo arithmetic: each operation adds noise the size of its rounding error.

Samples form a leading axis, which has size 1 in a value without noise.
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

# Number of elements to perturb at a time: few enough to stay in the cache.
BLOCK = 1 << 16

# Number of random numbers, which are drawn once; each operation reads them from a random position.
PERIOD = (1 << 18) + 29

# Near a tie with a mask constant, a score may err by this many unit roundoffs of its row's largest one. The
# noise of sixteen samples would miss such a tie, but one of many correct runs encounters it (decision 0016).
NEAR = 16.0

# Terms count as equal if their effective number differs from an integer by at most this share.
EQUAL = 1e-5


@functools.cache
def _uniform(storage: np.dtype) -> Array:
    numbers = np.random.Generator(np.random.SFC64(0x5EED)).random(PERIOD)
    uniform: Array = (2 * numbers - 1).astype(storage)
    return uniform


class MonteCarlo(Arithmetic):
    """Elementary operations on samples, each perturbed independently.

    An operation with result y adds ``(units * u * |y| + smallest normal) * xi``, where u is the unit roundoff
    and xi is uniform in [-1, 1]. A sum of K terms t adds ``(u_acc * sqrt(v) + K * smallest normal) * xi``
    with ``v = K/3 * y² + (K+1)/6 * max(sum t² - y²/K, 0)``, the variance of its rounding in a random order of
    summation. Selections, masks and maxima add nothing.

    Samples also carry errors of admissible algorithms (SPEC ALG-1 to ALG-5). A float64 or float32 sample is
    itself a correct run with random rounding.

    Args:
        dtype: precision or mode whose rounding is simulated.
        samples: number of simultaneous samples.
        first: index of the first sample, which determines its noise and TF32 truncation.
    """

    lead = 1

    def __init__(self, dtype: str, samples: int, first: int = 0) -> None:
        target = precision(dtype)
        super().__init__(target.storage.name)
        # The closed form of a norm's derivative has all errors of the other form, and more.
        self.samples, self.first, self.closed = (
            samples,
            first,
            True,
        )
        self.target = target
        self._roundoff, self._accumulation, self._least = (
            target.unit_roundoff,
            target.accumulation,
            target.smallest_normal,
        )
        # Half precisions sum in float32, where smaller terms survive.
        self._lost = min(target.smallest_normal, precision("float32").smallest_normal)
        self._half = self._roundoff > self._accumulation
        self._places = np.random.Generator(np.random.SFC64([first, 0x5EED]))

    def override(self, a: Node, values: Array) -> Node:
        """Replace computed values with pinned ones."""
        pinned = self.leaf(values).value
        if self._half:
            # A fused half-precision step continues with more digits than it returns, unless a constant
            # absorbs its score.
            perturbed = self.settle(pinned)
            pinned = perturbed if a.constant is None else np.where(a.constant, pinned, perturbed)
        return self._replacing(a, pinned)

    def uncertain(self, a: Node, size: Array) -> Node:
        """Perturb an input by its possible error."""
        values = self._perturbed(a.value, self._of(size[None]))
        return Node(values, a.shape, taped=False)

    def given_gradient(self, values: Array) -> Array:
        """Perturb a pinned gradient by the rounding of its output."""
        return self.settle(self.leaf(values).value)

    def affine(self, subscripts: str, a: Node, b: Node, bias: Node) -> Node:
        """Contract two tensors and add a bias."""
        if self._half:
            return super().affine(subscripts, a, b, bias)
        left, right = self._factor(a.value), self._factor(b.value)
        # A framework may add the bias last or start the sum with it, so it is one more term in random order.
        # With the bias added only last, correct runs were up to 9 sigma off (decision 0010).
        added = bias.value.reshape(
            (len(bias.value), *(1,) * (len(subscripts.partition("->")[2]) - len(bias.shape)), *bias.shape)
        )
        summed = self.settle_sum(
            self._contract(subscripts, left, right) + added,
            lambda: self._squares(subscripts, left, right) + np.square(self._one(added), dtype=np.float64),
            count_terms(subscripts, a.shape) + 1,
        )
        return self._record(summed, *self._pulls(subscripts, a, b), (bias, self._bias_pullback(bias)))

    def settle(self, values: Array, units: float = 1.0, absolute: float | Array = 0.0) -> Array:
        """Perturb the result of an operation."""
        share, least, is_relative = units * self._roundoff, self._least, not np.any(absolute)
        # An exact operation errs only in results so small that they may be flushed to zero.
        if is_relative and not units and not ((abs(values) < least / self._roundoff) & (values != 0)).any():
            return values
        flat = values.reshape(len(values), -1)

        def size(part: slice) -> Array:
            own: Array = abs(flat[:, part])
            lost = least * (own > 0) if is_relative else least  # zero is exact
            own *= share
            own += lost
            if isinstance(absolute, np.ndarray):
                own += self._roundoff * absolute.reshape(flat.shape)[:, part]
            elif absolute:
                own += self._roundoff * absolute
            return own

        return self._perturbed(values, size)

    def settle_sum(
        self, values: Array, squares: Callable[[], Array], terms: float | Array, wide: bool = True
    ) -> Array:
        """Perturb a sum."""
        # The sums of all samples agree up to rounding, so one estimate suffices.
        sample, powers = self._one(values), squares()
        count = (
            max(terms, 1.0)
            if isinstance(terms, (int, float))
            else np.broadcast_to(np.maximum(terms, 1.0), powers.shape).reshape(1, -1)
        )
        flat, flat_powers = (x.reshape(len(x), -1) for x in (sample, powers))
        roundoff = self._accumulation if wide else self._roundoff

        def size(part: slice) -> Array:
            terms = count if isinstance(count, (int, float)) else count[:, part]
            share = (terms + 1) / 6
            square: Array = np.square(flat[:, part], dtype=np.float64)
            # The variance v of the class docstring, expanded. Rounding can make the second term negative; the
            # maximum then keeps only the first.
            power: Array = flat_powers[:, part] * share
            power += (terms / 3 - share / terms) * square
            np.maximum(power, square * (terms / 3), out=power)
            self._add_up(power, square, flat_powers[:, part])
            # A sum of zeros is exact. Squares of small terms may underflow, so the sum is checked too.
            lost = (terms * self._lost + self._least) * ((power > 0) | (flat[:, part] != 0))
            np.sqrt(power, out=power)
            power *= roundoff
            power += lost
            return power

        summed = self._perturbed(values, size)
        # Half precisions accumulate in float32 and round the sum once more (SPEC PRC-2).
        return self.settle(summed) if self._half else summed

    def _add_up(self, power: Array, square: Array, squares: Array) -> None:
        # Partial sums of N equal terms may all be rounded the same way, and then err by up to N/2 of their
        # sum. The square of a sum over the sum of squares is an integer where all nonzero terms are equal.
        count = np.divide(square, squares, out=np.zeros_like(square), where=squares > 0)
        equal = abs(count - np.rint(count)) <= EQUAL * count
        np.maximum(power, np.square(count / 2) * square, out=power, where=equal)

    def vary_softmax(
        self, value: Array, x: Array, floor: float | Array | None, logarithms: Callable[[], Array]
    ) -> Array:
        """Perturb a row's weights by the error of its log-sum-exp."""
        return value * self._row_noise(1.0, logarithms())

    def vary_log_softmax(
        self, value: Array, x: Array, logarithms: Callable[[], Array], floor: float | None
    ) -> Array:
        """Perturb a row by the error of its log-sum-exp."""
        return value + self._row_noise(0.0, logarithms())

    def vary_row_sums(self, sums: Array, products: Array) -> Array:
        """Perturb row sums by the error of the equal sums of ``products``."""
        return self.settle_sum(
            sums,
            lambda: np.square(self._one(products), dtype=np.float64).sum(-1, keepdims=True),
            products.shape[-1],
            wide=False,
        )

    def vary_largest(self, gradient: Array, x: Array, terms: Array, shares: Array) -> Array:
        """Perturb the gradient of a row's largest entry by the sum's rounding."""
        # A manually written softmax rarely stops the gradient at the maximum, so the rounding of the row sum
        # flows back there. It reaches the largest entry or, with a running maximum from either end, each
        # entry that was the largest so far. With 263 keys the resulting error was 2 to 18 tolerances
        # (decision 0018).
        x, terms, shares = (self._one(values) for values in (x, terms, shares))
        total = terms.sum(-1, keepdims=True, dtype=np.float64)
        # Noise has made equal entries differ here.
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
        # Rows without a usable log-sum-exp (NaN) get no noise.
        size = self._accumulation * np.where(np.isfinite(logarithms), abs(logarithms), 0.0)
        return self._perturbed(np.full_like(size, about), self._of(size))

    def round_sum(self, values: Array, value: float, rounded: str) -> Array:
        """Add a mask constant and round, to either side near a tie."""
        # Scores returned by a run have no samples: they are the run's own, so their sum rounds only one way.
        if len(values) > 1 or self.samples == 1:
            near = NEAR * self._roundoff * abs(values).max(-1, keepdims=True)
            values = self._perturbed(values, self._of(np.broadcast_to(near, values.shape)))
        return super().round_sum(values, value, rounded)

    def center(self, x: Node, mean: Node) -> Node:
        """Subtract the mean of each row."""
        # In the expanded form x r - m r, both products are rounded before they cancel (SPEC ALG-5). So are
        # the gradients on the two paths back, which cancel where a row has one element.
        back, both = self._unbroadcast(mean), 2 * self._accumulation
        return self._record(
            self._perturbed(self.settle(x.value - mean.value), self._of(both * abs(x.value))),
            (x, lambda gradient: self._perturbed(gradient, self._of(both * abs(gradient)))),
            (mean, lambda gradient: -back(gradient)),
        )

    def vary_total(self, total: Node, parts: Sequence[Node]) -> Node:
        """Perturb a sum of squares as one long sum."""
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
        """Perturb by the error of one-pass algorithms (SPEC ALG-5)."""
        # Welford's updates and merged blocks err by the rounding of a mean times the deviation. Other kernels
        # shift a row by one of its entries; their mean square and squared mean each err by rounding.
        squares = np.square(centered.value, dtype=np.float64)
        shift = np.sqrt(np.square(squares).mean(-1, keepdims=True))
        merged = 2 * abs(mean.value) * np.sqrt(variance.value)
        shifted = math.sqrt(centered.shape[-1] / 3) * (variance.value + 3 * shift)
        size = (self._accumulation * np.hypot(merged, shifted)).astype(variance.value.dtype)
        return self._record(
            np.maximum(self._perturbed(variance.value, self._of(size)), 0),
            (variance, lambda gradient: gradient),
        )

    def _bias_pullback(self, bias: Node) -> Pullback:
        if not (self.narrow_bias_gradients and self.target.name == "bfloat16"):
            return self._unbroadcast(bias)

        def pullback(gradient: Array) -> Array:
            # An accumulator with few bits rounds sums of nearly equal terms the same way, so their errors add
            # up instead of cancelling.
            partial = abs(np.cumsum(self._one(gradient), axis=1)).sum(1)
            return self._perturbed(gradient.sum(1), self._of(self._roundoff * partial + self._least))

        return pullback

    def _contract(self, subscripts: str, a: Array, b: Array) -> Array:
        operands, result = subscripts.split("->")
        # An operand shared by all samples is contracted once.
        indices = [
            f"z{index}" if len(x) > 1 else index for index, x in zip(operands.split(","), (a, b), strict=True)
        ]
        sampled = "z" if len(a) > 1 or len(b) > 1 else ""
        contracted = contract(
            f"{','.join(indices)}->{sampled}{result}", *(x if len(x) > 1 else x[0] for x in (a, b))
        )
        return contracted if sampled else contracted[None]

    def _squares(self, subscripts: str, a: Array, b: Array) -> Array:
        # A noise size needs few digits, so float32 suffices once the factors are scaled to 1.
        largest = [float(abs(self._one(x)).max(initial=0.0)) or 1.0 for x in (a, b)]
        left, right = (
            np.square(self._flushed(self._one(x) / size, 1e-15), dtype=np.float32)
            for x, size in zip((a, b), largest, strict=True)
        )
        squares = self._contract(subscripts, left, right).astype(np.float64)
        squares *= np.square(np.float64(largest[0]) * largest[1])
        return squares

    def _flushed(self, values: Array, least: float) -> Array:
        # Processors multiply subnormal numbers very slowly.
        small = abs(values) < least
        return np.where(small, values.dtype.type(0), values) if small.any() else values

    def _factor(self, values: Array) -> Array:
        if not self.target.factors:
            return values
        # Tensor cores may read the upper 19 bits and truncate the rest. The error is up to twice as large,
        # and always towards zero, so it does not average out in a sum of equal signs. Every second sample
        # truncates; sigma is a mean square error about the truth, so a biased sample counts equally well
        # (decision 0013).
        towards_zero = np.arange(self.first, self.first + self.samples) % 2
        return self._perturbed(values, self._of(self.target.factors * values), towards_zero)

    def _of(self, size: Array) -> Size:
        flat = size.reshape(len(size), -1)
        return lambda part: flat[:, part]

    def _perturbed(self, values: Array, size: Size, below: NDArray[np.integer] | None = None) -> Array:
        """Samples of values, each with its own noise.

        Args:
            size: noise sizes for some columns, as (1 or samples, …).
            below: negative of each sample's mean error, in noise sizes.
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
        count = shape[0] * shape[1]
        start = int(self._places.integers(PERIOD - count))
        return _uniform(self.precision.storage)[start : start + count].reshape(shape)


def _rounding_up_to_larger(x: Array, reach: Array, *summed: Array) -> Array:
    """Rounding, in unit roundoffs, of each row's partial sums before the next larger entry.

    It is 0 where an entry is not the largest so far; entries closer than ``reach`` count as equal.
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
