"""Monte Carlo arithmetic: float64, perturbed after each operation by as much as rounding in a precision may err.

All samples are computed at once, along a leading axis: the first entry is left exact, the others each see their own
noise. A value that no noise has reached yet has a leading axis of size 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spec.arithmetic import Arithmetic, Pullback, Tensor, Values, contract, count_terms
from spec.precision import precision


class MonteCarlo(Arithmetic):
    """Elementary operations on samples, each perturbed on its own.

    An operation whose result is y adds ``(units * u * |y| + smallest normal) * xi``, with u the unit roundoff and xi
    uniform in [-1, 1]. A sum of K terms t adds ``(u_acc * sqrt(v) + K * smallest normal) * xi``, with
    ``v = K/3 * y² + (K+1)/6 * max(sum t² - y²/K, 0)``: the variance of its rounding in an unknown order of summation.
    Each term that is smaller than the smallest normal number of what sums are kept in may be lost.
    Selections, masks and maxima add nothing.

    In TF32 a factor x of a product is multiplied by ``1 + f * xi``, with f = 2^-11, in every first sample of two, and by
    ``1 - f * (1 + xi)`` in every second: a kernel may round its factors, or leave it to tensor cores, which read the upper 19 bits
    of a float32 number and so cut it off. That errs by up to 2 f, and always towards zero: in a sum of equal signs it does not
    average out. Sigma is a mean square error about the truth, so that samples with a bias tell how large it may be.

    Args:
        dtype: the precision or mode whose rounding is imitated.
        samples: how many perturbed samples there are.
        seed: of the noise.
    """

    lead = 1

    def __init__(self, dtype: str, samples: int, seed: int = 0) -> None:
        super().__init__("float64")
        target = precision(dtype)
        self.samples = samples
        self.target = target
        self._roundoff, self._accumulation, self._least = target.unit_roundoff, target.accumulation, target.smallest_normal
        self._lost = min(target.smallest_normal, precision("float32").smallest_normal)  # half precisions sum in float32
        self._noise_generator = np.random.Generator(np.random.SFC64([seed, 0x5EED]))

    def override(self, a: Tensor, values: NDArray[np.floating]) -> Tensor:
        """Return given values in place of computed ones.

        Half precisions may hold on to wider values than those that they deliver, so there the given ones are perturbed.
        """
        forced = self.leaf(values).value
        half = self._roundoff > self._accumulation
        return self._record(self.settle(forced) if half else forced, (a, lambda g: g))

    def affine(self, subscripts: str, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        """Contract two tensors and add a third.

        A framework may add the bias after the products or begin the sum with it: where nothing is rounded between the
        two, it is one more term in an unknown order.
        """
        if self._roundoff > self._accumulation:
            return super().affine(subscripts, a, b, bias)
        left, right, added = self._factor(a.value), self._factor(b.value), bias.value
        summed = self.settle_sum(
            self._contract(subscripts, left, right) + added,
            lambda: self._contract(subscripts, np.square(self._one(left)), np.square(self._one(right))) + np.square(self._one(added)),
            count_terms(subscripts, a.shape) + 1,
        )
        return self._record(summed, *self._pulls(subscripts, a, b), (bias, self._bias_pullback(bias)))

    def settle(self, values: Values, units: float = 1.0, absolute: float = 0.0) -> Values:
        """Perturb the result of an operation (:meth:`Arithmetic.settle`)."""
        size = abs(values)
        size *= units * self._roundoff
        size += absolute * self._roundoff + self._least
        return self._perturbed(values, size)

    def settle_sum(self, values: Values, squares: Callable[[], Values], terms: float | Values, wide: bool = True) -> Values:
        """Perturb a sum (:meth:`Arithmetic.settle_sum`), and round it to the precision if sums are wider than that."""
        power = np.square(self._one(values))
        terms = np.maximum(terms, 1.0)
        spread = np.maximum(squares() - power / terms, 0)
        # Each sample's own sum would say the same but for rounding: one estimate serves all.
        roundoff = self._accumulation if wide else self._roundoff
        size = roundoff * np.sqrt(terms / 3 * power + (terms + 1) / 6 * spread) + terms * self._lost + self._least
        summed = self._perturbed(values, size)
        return self.settle(summed) if self._roundoff > self._accumulation else summed

    def _bias_pullback(self, bias: Tensor) -> Pullback:
        """Return how a gradient sums to that of a bias.

        Terms that are nearly equal are all rounded the same way when they are added one by one in few bits: the errors
        of the partial sums do not cancel, and are taken together.
        """
        if not (self.narrow_bias_gradients and self.target.name == "bfloat16"):
            return self._unbroadcast(bias)

        def pullback(gradient: Values) -> Values:
            partial = abs(np.cumsum(self._one(gradient), axis=1)).sum(1)
            return self._perturbed(gradient.sum(1), self._roundoff * partial + self._least)

        return pullback

    def _contract(self, subscripts: str, a: Values, b: Values) -> Values:
        """Contract sample by sample; an operand that is the same for all of them is taken as it is."""
        left, result = subscripts.split("->")
        indices = [f"z{index}" if len(x) > 1 else index for index, x in zip(left.split(","), (a, b), strict=True)]
        sampled = "z" if len(a) > 1 or len(b) > 1 else ""
        contracted = contract(f"{','.join(indices)}->{sampled}{result}", *(x if len(x) > 1 else x[0] for x in (a, b)))
        return contracted if sampled else contracted[None]

    def _factor(self, values: Values) -> Values:
        """Perturb a factor of a matrix product by what rounding it may change, or cutting it off (TF32)."""
        if not self.target.factors:
            return values
        towards_zero = np.zeros((self.samples, *(1,) * (values.ndim - 1)), np.float32)
        towards_zero[1::2] = 1
        return self._perturbed(values, self.target.factors * values, towards_zero)

    def _perturbed(self, values: Values, size: Values, below: Values | None = None) -> Values:
        """Return samples of values that may err by a size; the first sample stays exact.

        Args:
            below: by how many sizes the errors lie below zero in the mean, where they do.
        """
        noise = self._noise_generator.random((self.samples, *values.shape[1:]), dtype=np.float32)
        noise *= 2
        noise -= 1
        if below is not None:
            noise -= below
        perturbed = np.empty((self.samples + 1, *values.shape[1:]))
        perturbed[0] = values[0]
        np.multiply(noise, size if len(size) == 1 else size[1:], out=perturbed[1:])
        perturbed[1:] += values if len(values) == 1 else values[1:]
        return perturbed
