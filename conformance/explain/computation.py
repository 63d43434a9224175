"""The interface of a search: a computation that went wrong, and its prediction under a hypothesis."""

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

# Factor by which an explanation must reduce the error: chance reduces it by less.
CLEAR = 5.0

# The least error, in sigma of the arithmetic that explains it: its wide sigma covers any smaller error too.
LEAST = 0.1

# Tolerances within which the results of two hypotheses are the same.
SAME = 0.01


@dataclass(frozen=True)
class Prediction:
    """A tensor under a hypothesis, and the standard deviation of correct results then.

    Attributes:
        beside: predictions of other tensors that were delivered with it, by name.
    """

    value: Array
    sigma: Array
    beside: Mapping[str, Prediction] = field(default_factory=dict)


class Computation(ABC):
    """A computation up to its first wrong tensor.

    Attributes:
        tensor: the name of that tensor.
        actual: its delivered values.
        delivered: other tensors that were delivered with it, by name.
    """

    tensor: str
    actual: Array
    dtype: str
    delivered: Mapping[str, Array] = {}

    @property
    def subject(self) -> str:
        """The subject of an explanation's sentence; empty where that stands beside the tensor's name."""
        return self.tensor

    @abstractmethod
    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Return the tensor under a hypothesis with its sigma."""

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, in exact arithmetic."""
        return self.predict(hypothesis).value

    @functools.cached_property
    def right(self) -> Prediction:
        """The prediction of a right run."""
        return self.predict(RIGHT)

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        """Return whether a value halves the error in at least half of the wrong elements."""
        actual, right = self.actual, self.right
        if value.shape != actual.shape or not same_infinities(actual, value):
            return False
        if not same_infinities(actual, right.value):
            return True
        before, left = abs(actual - right.value), abs(actual - value)
        wrong = np.maximum(before, left) > R * right.sigma
        return bool(wrong.any()) and float(np.mean(left[wrong] <= before[wrong] / 2)) >= 0.5

    def judged(self, actual: Array, prediction: Prediction) -> Judgement:
        """Judge a tensor by a prediction."""
        return judge_tensor(actual, prediction.value, prediction.sigma, self.dtype)

    def one_cause(self, one: Hypothesis, other: Hypothesis) -> bool:
        """Return whether two hypotheses with the same result are one cause."""
        return one.name == other.name

    def same(self, one: Prediction, other: Prediction) -> bool:
        """Return whether two predictions are the same, to within :data:`SAME` tolerances."""
        return self.judged(one.value, other).ratio <= SAME

    def explains(self, prediction: Prediction) -> bool:
        """Return whether the tensor agrees with a prediction that differs from the right one."""
        judgement, before = (self.judged(self.actual, expected) for expected in (prediction, self.right))
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
        """Return the largest error of a prediction in tolerances, over all its tensors."""
        beside = (
            self.judged(self.delivered[name], expected).ratio for name, expected in prediction.beside.items()
        )
        return max((self.judged(self.actual, prediction).ratio, *beside))

    def compatible(self, hypothesis: Hypothesis) -> bool:
        """Return whether a hypothesis leaves the tensor right: then this computation does not refute it."""
        value = self.values(hypothesis)
        shown = value.shape == self.actual.shape and self.judged(value, self.right).status == "diverges"
        return not shown


def same_infinities(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same infinities and NaN in the same places."""
    return bool(
        np.array_equal(np.where(np.isfinite(a), 0.0, a), np.where(np.isfinite(b), 0.0, b), equal_nan=True)
    )


def within(error: Array, sigma: Array) -> bool:
    """Return whether errors are rounding, where sigma is finite; False where it is finite nowhere."""
    known = np.isfinite(sigma) & np.ones_like(error, bool)
    if known.size and not known.any():
        return False
    error, sigma = error[known], np.broadcast_to(sigma, known.shape)[known]
    if not np.isfinite(error).all():
        return False
    scores = np.where(error != 0, abs(error) / sigma, 0.0)
    return bool(scores.max(initial=0.0) <= Z and root_mean_square(error) <= R * root_mean_square(sigma))


def clear(before: Array, left: Array, sigma: Array) -> bool:
    """Return whether the rest of an error is rounding, and :data:`CLEAR` times smaller than before."""
    scores = [root_mean_square(np.where(error != 0, error / sigma, 0.0)) for error in (before, left)]
    return within(left, sigma) and scores[0] > 0 and scores[0] >= CLEAR * scores[1]


def root_mean_square(values: Array) -> float:
    """Return the root mean square of the finite values."""
    return expectation.root_mean_square(values[np.isfinite(values)])
