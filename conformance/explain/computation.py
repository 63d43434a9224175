"""A computation that went wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.judging import expectation
from concord.conformance.judging.estimate import R, Z
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.judging.verdict import Judgement
from concord.spec.arrays import Array

# An explanation must reduce the error by this factor, to exclude chance.
CLEAR = 5.0

# Fewer elements than these may be near a wrong prediction by chance, within its own wide sigma.
FEWEST = 30

# Minimum error, in sigma of the explaining arithmetic: a wide sigma covers any smaller error.
LEAST = 0.1

# Results of two hypotheses this close, in tolerances, are the same.
SAME = 0.01


@dataclass(frozen=True)
class Prediction:
    """A tensor under a hypothesis, with sigma; ``beside`` has other tensors of the run."""

    value: Array
    sigma: Array
    beside: Mapping[str, Prediction] = field(default_factory=dict)


class Computation(ABC):
    """A computation up to its first wrong tensor."""

    tensor: str
    actual: Array
    dtype: str
    delivered: Mapping[str, Array] = {}

    @property
    def subject(self) -> str:
        """Subject of the explanation; empty if the tensor's name already precedes it."""
        return self.tensor

    @abstractmethod
    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Predict the tensor with its sigma."""

    def values(self, hypothesis: Hypothesis) -> Array:
        return self.predict(hypothesis).value

    @cached_property
    def right(self) -> Prediction:
        return self.predict(RIGHT)

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:
        """Whether a value halves the error in at least half of the wrong elements."""
        actual, right = self.actual, self.right
        if value.shape != actual.shape or not same_infinities(actual, value):
            return False
        if not same_infinities(actual, right.value):
            return True
        error_before, error_after = abs(actual - right.value), abs(actual - value)
        wrong = np.maximum(error_before, error_after) > R * right.sigma
        return bool(wrong.any()) and float(np.mean(error_after[wrong] <= error_before[wrong] / 2)) >= 0.5

    def judged(self, actual: Array, prediction: Prediction) -> Judgement:
        return judge_tensor(actual, prediction.value, prediction.sigma, self.dtype)

    def one_cause(self, one: Hypothesis, other: Hypothesis) -> bool:
        return one.name == other.name

    def same(self, one: Prediction, other: Prediction) -> bool:
        return self.judged(one.value, other).ratio <= SAME

    def explains(self, prediction: Prediction) -> bool:
        """Whether the tensor agrees with a prediction that differs from the correct one."""
        judgement, before = (self.judged(self.actual, expected) for expected in (prediction, self.right))
        if judgement.status != "agrees" or before.ratio < CLEAR * judgement.ratio:
            return False
        if not same_infinities(prediction.value, self.right.value):
            return True
        left, error = (root_mean_square(self.actual - x.value) for x in (prediction, self.right))
        if self.actual.size < FEWEST and error < CLEAR * left:
            return False
        # Each must reject the other: a hypothesis without effect explains nothing, and neither does a sigma
        # that is wide enough for any value.
        return all(
            judgement.status == "diverges"
            for judgement in (
                self.judged(prediction.value, self.right),
                self.judged(self.right.value, prediction),
            )
        )

    def distance(self, prediction: Prediction) -> float:
        """Largest error of a prediction, in tolerances."""
        ratios = (
            self.judged(self.delivered[name], expected).ratio for name, expected in prediction.beside.items()
        )
        return max((self.judged(self.actual, prediction).ratio, *ratios))

    def compatible(self, hypothesis: Hypothesis) -> bool:
        """Whether a hypothesis leaves the tensor correct."""
        value = self.values(hypothesis)
        refuted = value.shape == self.actual.shape and self.judged(value, self.right).status == "diverges"
        return not refuted


def same_infinities(a: Array, b: Array) -> bool:
    return bool(
        np.array_equal(np.where(np.isfinite(a), 0.0, a), np.where(np.isfinite(b), 0.0, b), equal_nan=True)
    )


def within(error: Array, sigma: Array) -> bool:
    """Whether errors are rounding; False if sigma is not finite anywhere."""
    finite = np.isfinite(sigma) & np.ones_like(error, bool)
    if finite.size and not finite.any():
        return False
    error, sigma = error[finite], np.broadcast_to(sigma, finite.shape)[finite]
    if not np.isfinite(error).all():
        return False
    scores = np.where(error != 0, abs(error) / sigma, 0.0)
    return bool(scores.max(initial=0.0) <= Z and root_mean_square(error) <= R * root_mean_square(sigma))


def clear(before: Array, left: Array, sigma: Array) -> bool:
    """Whether the remaining error is rounding and :data:`CLEAR` times smaller than before."""
    scores = [root_mean_square(np.where(error != 0, error / sigma, 0.0)) for error in (before, left)]
    return within(left, sigma) and scores[0] > 0 and scores[0] >= CLEAR * scores[1]


def root_mean_square(values: Array) -> float:
    return expectation.root_mean_square(values[np.isfinite(values)])
