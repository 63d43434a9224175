"""A computation that went wrong, and what it would have come to with a bug: what a search asks of it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.judging import expectation
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.judging.verdict import Judgement
from concord.spec.arrays import Array

CLEAR = 5.0
"""How many times smaller an error must be under an explanation than without.

Chance makes smaller differences.
"""


LEAST = 0.1
"""How large an error must at least be, in sigma of the arithmetic that is to explain it.

A wide sigma would explain any smaller one.
"""

SAME = 0.01
"""Tolerances within which two hypotheses come to the same numbers."""


@dataclass(frozen=True)
class Prediction:
    """What a tensor is under a hypothesis, and the standard deviation of correct results then.

    Attributes:
        beside: the same of other tensors that were delivered with it, by name.
    """

    value: Array
    sigma: Array
    beside: Mapping[str, Prediction] = field(default_factory=dict)


class Computation(ABC):
    """What was computed, up to the first tensor that is wrong.

    Attributes:
        tensor: its name.
        actual: what was delivered of it.
        dtype: the precision.
        delivered: other tensors that were delivered with it, by name.
    """

    tensor: str
    actual: Array
    dtype: str
    delivered: Mapping[str, Array] = {}

    @property
    def subject(self) -> str:
        """The tensor that a sentence says to be explained; empty if the sentence stands beside its name."""
        return self.tensor

    @abstractmethod
    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Return the tensor under a hypothesis with its sigma."""

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, in exact arithmetic."""
        return self.predict(hypothesis).value

    @functools.cached_property
    def right(self) -> Prediction:
        """What the tensor should be."""
        return self.predict(RIGHT)

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        """Return whether a value halves the error where there is one, in most places.

        Only then its own sigma is worth deriving.
        """
        actual, right = self.actual, self.right
        if value.shape != actual.shape or not same_infinities(actual, value):
            return False
        if not same_infinities(actual, right.value):
            return True
        before, left = abs(actual - right.value), abs(actual - value)
        wrong = np.maximum(before, left) > R * right.sigma
        return bool(wrong.any()) and float(np.mean(left[wrong] <= before[wrong] / 2)) >= 0.5

    def judged(self, actual: Array, prediction: Prediction) -> Judgement:
        """Judge a tensor by what it should be then."""
        return judge_tensor(actual, prediction.value, prediction.sigma, self.dtype)

    def one_cause(self, one: Hypothesis, other: Hypothesis) -> bool:
        """Return whether two hypotheses are one cause where they come to the same numbers."""
        return one.name == other.name

    def same(self, one: Prediction, other: Prediction) -> bool:
        """Return whether two hypotheses come to the same numbers."""
        return self.judged(one.value, other).ratio <= SAME

    def explains(self, prediction: Prediction) -> bool:
        """Return whether the tensor is what was predicted, and that is not what it should be."""
        judgement, before = (self.judged(self.actual, one) for one in (prediction, self.right))
        if judgement.status != "agrees" or before.ratio < CLEAR * judgement.ratio:
            return False
        if not same_infinities(prediction.value, self.right.value):
            return True
        # Neither may pass for the other: a hypothesis without effect explains nothing, nor does a sigma that
        # allows anything.
        return all(
            judgement.status == "diverges"
            for judgement in (
                self.judged(prediction.value, self.right),
                self.judged(self.right.value, prediction),
            )
        )

    def distance(self, prediction: Prediction) -> float:
        """Return by how many tolerances what was delivered lies off a prediction, at most."""
        beside = (self.judged(self.delivered[name], one).ratio for name, one in prediction.beside.items())
        return max((self.judged(self.actual, prediction).ratio, *beside))

    def compatible(self, hypothesis: Hypothesis) -> bool:
        """Return whether what is right here may have been made with a bug."""
        value = self.values(hypothesis)
        shown = value.shape == self.actual.shape and self.judged(value, self.right).status == "diverges"
        return not shown


def same_infinities(a: Array, b: Array) -> bool:
    """Return whether two arrays are infinite, or no number, in the same places."""
    return bool(
        np.array_equal(np.where(np.isfinite(a), 0.0, a), np.where(np.isfinite(b), 0.0, b), equal_nan=True)
    )


def within(error: Array, sigma: Array) -> bool:
    """Return whether errors are rounding.

    Where sigma is not finite nothing is known, and what is nowhere known is not said to be.
    """
    known = np.isfinite(sigma) & np.ones_like(error, bool)
    if known.size and not known.any():
        return False
    error, sigma = error[known], np.broadcast_to(sigma, known.shape)[known]
    if not np.isfinite(error).all():
        return False
    scores = np.where(error != 0, abs(error) / sigma, 0.0)
    return bool(scores.max(initial=0.0) <= Z and root_mean_square(error) <= R * root_mean_square(sigma))


def clear(before: Array, left: Array, sigma: Array) -> bool:
    """Return whether what is left of an error is rounding, and much smaller than it was."""
    scores = [root_mean_square(np.where(error != 0, error / sigma, 0.0)) for error in (before, left)]
    return within(left, sigma) and scores[0] > 0 and scores[0] >= CLEAR * scores[1]


def root_mean_square(values: Array) -> float:
    """Return the root mean square of what is finite."""
    return expectation.root_mean_square(values[np.isfinite(values)])
