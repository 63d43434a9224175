"""The search: which hypotheses give what was delivered, hold in other computations too, and what it takes.

What else a machine does must not change what is found: time is that of the processor, in this thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from concord.conformance.explain.computation import Computation, Prediction
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis, explained_by
from concord.conformance.judging.explanation import Explanation
from concord.spec.errors import SpecError

MUCH_BETTER = 8.0
"""How many times smaller the error under one hypothesis must be for another, at the edge of its tolerance,
to be dropped.
"""

EDGE = 0.5
"""From which share of the tolerance on an error lies at its edge."""


class Spent(SpecError):
    """What a search may take is spent."""


class Effort:
    """What one search may take, in the thread that makes it, and what became of it.

    Args:
        seconds: of processor time of this thread.

    Attributes:
        tried: how many hypotheses there was time for.
        untried: how many there were besides.
        failures: steps of the search that failed, in sentences: faults of the search itself.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self.started = seconds, time.thread_time()
        self.tried = self.untried = 0
        self.failures: list[str] = []

    def spent(self) -> bool:
        """Return whether the time is spent."""
        return time.thread_time() - self.started > self.seconds

    def check(self) -> None:
        """Stop what is computed for the search.

        Raises:
            Spent: if the time is spent.
        """
        if self.spent():
            raise Spent(f"{self.seconds:g} s of the processor are spent")

    def among(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        """Yield hypotheses until the time is spent, and count the others."""
        for hypothesis in hypotheses:
            if self.spent():
                self.untried += 1
            else:
                self.tried += 1
                yield hypothesis

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after a step of the search that fails, and note it.

        A run that is wrong in an unforeseen way still has its verdict, and all other explanations are tried.
        """
        try:
            yield
        except Spent:
            self.untried += 1
        except Exception as error:
            failure = f"{what} failed: {type(error).__name__}: {error}"
            if failure not in self.failures:
                self.failures.append(failure)

    @property
    def notes(self) -> list[str]:
        """What is to be said of a search that was cut short, or that failed in part."""
        text = (
            f"the search for a cause was cut short: {self.tried} of {self.tried + self.untried} known "
            f"explanations were tried"
        )
        return [*([text] if self.untried else []), *self.failures]


@dataclass(frozen=True)
class Fit:
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
        self.refuted: list[Fit] = []

    def explain(
        self, stages: Iterable[Iterable[Hypothesis]], readings: Iterable[Hypothesis] = ()
    ) -> Explanation | None:
        """Return what explains the computation; None if nothing does.

        Args:
            stages: hypotheses that are tried together: the first that explain it are the answer.
            readings: those that were read off what was delivered: the first is believed.
        """
        with np.errstate(all="ignore"):  # what is not finite is compared as such
            for hypotheses in stages:
                if found := self.explaining(hypotheses):
                    return self.conclude(found)
            if not self.effort.untried:
                with self.effort.attempt("reading a cause off the tensor"):
                    for one in readings:
                        return explained_by(self.computation.subject, [one], not one.rare)
        return None

    def explaining(self, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
        """Return the hypotheses under which the tensor is right, and which do not leave it as it should be.

        Of several that are one bug in other words, the first.
        """
        found: list[Fit] = []
        asked = self.computation
        with self.effort.attempt("a list of explanations"):
            for one in self.near(hypotheses):
                if found and self.effort.spent():
                    self.effort.untried += 1
                    continue
                with self.applying(one):
                    prediction = asked.predict(one)

                    def known_in(
                        those: Sequence[Fit],
                        one: Hypothesis = one,
                        prediction: Prediction = prediction,
                    ) -> bool:
                        return any(
                            asked.one_cause(one, other.hypothesis)
                            and asked.same(prediction, other.prediction)
                            for other in those
                        )

                    if known_in(found) or not asked.explains(prediction):
                        continue
                    explanation = Fit(one, prediction, asked.distance(prediction))
                    if all(other.compatible(one) for other in self.others):
                        found.append(explanation)
                    elif not known_in(self.refuted):
                        self.refuted.append(explanation)
        return found

    def near(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        """Yield hypotheses that come near the tensor: their own tolerance is worth deriving."""
        for hypothesis in self.effort.among(hypotheses):
            near = False
            with self.applying(hypothesis):
                near = self.computation.near(hypothesis, self.computation.values(hypothesis))
            if near:
                yield hypothesis

    @contextlib.contextmanager
    def applying(self, one: Hypothesis) -> Iterator[None]:
        """Leave out a hypothesis that does not apply; one that fails in another way is noted."""
        with self.effort.attempt(f"trying {one.name} ({one.text})"), contextlib.suppress(*INAPPLICABLE):
            yield

    def conclude(self, found: Sequence[Fit], since: str = "") -> Explanation:
        """Name what explains the tensor best, and all that explains it as well.

        Args:
            since: from which step on, where it does not hold in steps before.
        """
        best = min(one.distance for one in found)
        kept = [one.hypothesis for one in found if one.distance <= max(EDGE, MUCH_BETTER * best)]
        sure = (
            len({one.hypothesis.text for one in found}) == 1
            and best <= EDGE
            and not kept[0].rare
            and not self.effort.untried
        )
        shown = [hypothesis for hypothesis in kept if not hypothesis.rare] or kept
        # An option that is wrong is the plainest reason.
        return explained_by(
            self.computation.subject, sorted(shown, key=lambda one: not one.fields), sure, since
        )


_guard = threading.Lock()
_searches: list[threadpool_limits] = []


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have NumPy multiply in the thread that asks for it.

    Threads that wait for a busy core take twenty times as long as one.

    The limit holds for the whole process, and is lifted when the last of several searches is done.
    """
    with _guard:
        _searches.append(_searches[-1] if _searches else threadpool_limits(1, user_api="blas"))
    try:
        yield
    finally:
        with _guard:
            limit = _searches.pop()
            if not _searches:
                limit.restore_original_limits()
