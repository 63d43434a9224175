"""The search for an explanation."""

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

# A hypothesis with an error at the edge of its tolerance is dropped if another error is smaller by this
# factor.
MUCH_BETTER = 8.0

# Share of the tolerance at which the edge begins.
EDGE = 0.5


class Spent(SpecError):
    """A search has used up its time."""


class Effort:
    """Time limit and counters of a search in one thread.

    Args:
        seconds: CPU time of this thread.

    Attributes:
        failures: faults of the search itself, as sentences.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        # Not wall-clock time: other load on the machine must not change the explanation.
        self.seconds, self.started = seconds, time.thread_time()
        self.tried = self.untried = 0
        self.failures: list[str] = []

    def spent(self) -> bool:
        return time.thread_time() - self.started > self.seconds

    def check(self) -> None:
        if self.spent():
            raise Spent(f"the limit of {self.seconds:g} s of CPU time is reached")

    def among(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        """Yield hypotheses until the time is up; count the rest."""
        for hypothesis in hypotheses:
            if self.spent():
                self.untried += 1
            else:
                self.tried += 1
                yield hypothesis

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record a failure within a block, and continue."""
        # A run may be wrong in an unforeseen way: it still gets its verdict, and other explanations are tried
        # (decision 19).
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
        text = (
            f"the search for a cause was cut short: {self.tried} of {self.tried + self.untried} known "
            f"explanations were tried"
        )
        return [*([text] if self.untried else []), *self.failures]


@dataclass(frozen=True)
class Fit:
    """A hypothesis that explains a tensor; ``distance`` is its largest error in tolerances."""

    hypothesis: Hypothesis
    prediction: Prediction
    distance: float


class Search:
    """Search for hypotheses that explain a computation within its tolerance.

    Args:
        effort: time limit, after which fitting hypotheses are uncertain.
        others: computations that must also confirm a hypothesis.
    """

    def __init__(
        self, computation: Computation, effort: Effort | None = None, others: Sequence[Computation] = ()
    ) -> None:
        self.computation, self.effort, self.others = computation, effort or Effort(), others
        self.refuted: list[Fit] = []

    def explain(
        self, stages: Iterable[Iterable[Hypothesis]], readings: Iterable[Hypothesis] = ()
    ) -> Explanation | None:
        """Explain the computation, or return None if no hypothesis is confirmed.

        Args:
            stages: groups of hypotheses, tried up to the first with a confirmed one.
            readings: hypotheses inferred from the tensor; the first is accepted untested.
        """
        with np.errstate(all="ignore"):  # infinities and NaN are compared as values
            for hypotheses in stages:
                if fits := self.explaining(hypotheses):
                    return self.conclude(fits)
            if not self.effort.untried:
                with self.effort.attempt("inferring a cause from the tensor"):
                    for reading in readings:
                        return explained_by(self.computation.subject, [reading], not reading.rare)
        return None

    def explaining(self, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
        """Hypotheses that predict the run's tensor but not the correct one, each bug once."""
        fits: list[Fit] = []
        computation = self.computation
        with self.effort.attempt("collecting possible explanations"):
            for hypothesis in self.near(hypotheses):
                if fits and self.effort.spent():
                    self.effort.untried += 1
                    continue
                with self.applying(hypothesis):
                    prediction = computation.predict(hypothesis)

                    def known_in(
                        earlier: Sequence[Fit],
                        hypothesis: Hypothesis = hypothesis,
                        prediction: Prediction = prediction,
                    ) -> bool:
                        return any(
                            computation.one_cause(hypothesis, other.hypothesis)
                            and computation.same(prediction, other.prediction)
                            for other in earlier
                        )

                    if known_in(fits) or not computation.explains(prediction):
                        continue
                    fit = Fit(hypothesis, prediction, computation.distance(prediction))
                    if all(other.compatible(hypothesis) for other in self.others):
                        fits.append(fit)
                    elif not known_in(self.refuted):
                        self.refuted.append(fit)
        return fits

    def near(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        # Exact values cost one computation, a tolerance one per sample: most hypotheses need only exact
        # values.
        for hypothesis in self.effort.among(hypotheses):
            is_near = False
            with self.applying(hypothesis):
                is_near = self.computation.near(hypothesis, self.computation.values(hypothesis))
            if is_near:
                yield hypothesis

    @contextlib.contextmanager
    def applying(self, hypothesis: Hypothesis) -> Iterator[None]:
        with (
            self.effort.attempt(f"trying {hypothesis.name} ({hypothesis.text})"),
            contextlib.suppress(*INAPPLICABLE),
        ):
            yield

    def conclude(self, fits: Sequence[Fit], since: str = "") -> Explanation:
        """Explain by the best fit and all equally good ones."""
        best = min(fit.distance for fit in fits)
        hypotheses = [fit.hypothesis for fit in fits if fit.distance <= max(EDGE, MUCH_BETTER * best)]
        certain = (
            len({fit.hypothesis.text for fit in fits}) == 1
            and best <= EDGE
            and not hypotheses[0].rare
            and not self.effort.untried
        )
        usual = [hypothesis for hypothesis in hypotheses if not hypothesis.rare] or hypotheses
        # A wrong option is the simplest reason, so it comes first.
        return explained_by(
            self.computation.subject,
            sorted(usual, key=lambda hypothesis: not hypothesis.fields),
            certain,
            since,
        )


_guard = threading.Lock()
_searches: list[threadpool_limits] = []


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    # Threads wait for one another, which takes twenty times as long on a busy core, and an effort counts the
    # time of one. The limit applies to the process: the first of several searches sets it, the last lifts it.
    with _guard:
        _searches.append(_searches[-1] if _searches else threadpool_limits(1))
    try:
        yield
    finally:
        with _guard:
            limit = _searches.pop()
            if not _searches:
                limit.restore_original_limits()
