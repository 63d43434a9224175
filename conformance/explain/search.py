"""The search: which hypotheses give what was delivered, and hold in other computations too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.effort import Effort
from concord.conformance.explain.hypothesis import INAPPLICABLE, Cause, Hypothesis, caused
from concord.spec.arrays import Array

MUCH_BETTER = 8.0
"""How many times smaller the error under one hypothesis must be for another, at the edge of its tolerance,
to be dropped.
"""

EDGE = 0.5
"""From which share of the tolerance on an error lies at its edge."""


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that explains a tensor.

    Attributes:
        prediction: of what is delivered under it.
        distance: by how many tolerances what was delivered lies off it.
    """

    hypothesis: Hypothesis
    prediction: Prediction
    distance: float


class Search:
    """One search for the hypothesis that explains a computation to within its tolerance.

    Args:
        computation: that went wrong.
        effort: what it may take: when that is spent, what was found by then is the answer, and not a sure
            one.
        others: computations that it has to hold in too.

    Attributes:
        refuted: what explains the computation, and does not hold in others.
    """

    def __init__(
        self, computation: Computation, effort: Effort | None = None, others: Sequence[Computation] = ()
    ) -> None:
        self.computation, self.effort, self.others = computation, effort or Effort(), others
        self.refuted: list[Explanation] = []

    def cause(
        self, stages: Iterable[Iterable[Hypothesis]], readings: Iterable[Hypothesis] = ()
    ) -> Cause | None:
        """Return what explains the computation.

        Args:
            stages: hypotheses that are tried together: the first that explain it are the answer.
            readings: those that were read off what was delivered: the first is believed.
        """
        with np.errstate(all="ignore"):  # what is not finite is compared as such
            for hypotheses in stages:
                if found := self.explaining(hypotheses):
                    return self.conclude(found)
            if not self.effort.untried:
                for one in readings:
                    return caused(self.computation.subject, [one], one.sure)
        return None

    def explaining(self, hypotheses: Iterable[Hypothesis]) -> list[Explanation]:
        """Return the hypotheses under which the tensor is right, and which do not leave it as it should be.

        Of several that are one mistake in other words, the first.
        """
        found: list[Explanation] = []
        asked = self.computation
        for one in asked.chosen(self.tried(hypotheses)):
            if found and self.effort.spent():
                self.effort.untried += 1
                continue
            try:
                prediction = asked.predict(one)
            except INAPPLICABLE:
                continue
            known = any(
                (one.name == other.hypothesis.name or not asked.same_name)
                and asked.same(prediction, other.prediction)
                for other in found
            )
            if not known and asked.explains(prediction):
                holds = all(other.compatible(one) for other in self.others)
                explanation = Explanation(one, prediction, asked.distance(prediction))
                (found if holds else self.refuted).append(explanation)
        return found

    def tried(self, hypotheses: Iterable[Hypothesis]) -> Iterator[tuple[Hypothesis, Array]]:
        """Yield hypotheses that come near the tensor, and what it is under each."""
        for hypothesis in self.effort.among(hypotheses, self.computation.trial):
            with contextlib.suppress(*INAPPLICABLE):
                value = self.computation.values(hypothesis)
                if self.computation.near(hypothesis, value):
                    yield hypothesis, value

    def conclude(self, found: Sequence[Explanation], since: str = "") -> Cause:
        """Return the cause: what explains the tensor best, and all that explains it as well.

        Args:
            since: from which step on, where it does not hold in steps before.
        """
        best = min(one.distance for one in found)
        kept = [one.hypothesis for one in found if one.distance <= max(EDGE, MUCH_BETTER * best)]
        sure = len(found) == 1 and best <= EDGE and not kept[0].rare and not self.effort.untried
        shown = [hypothesis for hypothesis in kept if not hypothesis.rare] or kept
        # An option that is wrong is the plainest reason.
        return caused(self.computation.subject, sorted(shown, key=lambda one: not one.fields), sure, since)
