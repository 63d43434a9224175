"""A backend's training step, and the same step with a bug."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.training.edited_step import CLAUSE_OF, STAGES, stages
from concord.conformance.bugs.training.edited_trajectory import BuggedTrajectory
from concord.conformance.explain.computation import CLEAR, SAME, Computation, Prediction
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.judging.estimate import FEW, Observer, estimate, exact
from concord.conformance.judging.expectation import Expectation, JudgedTraining, root_mean_square
from concord.conformance.judging.judge import Judge
from concord.conformance.judging.protocol import PublishedReference
from concord.conformance.judging.verdict import Judgement, Verdict, section_of
from concord.conformance.lockstep.envelope import Start
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array


class DeliveredStep(Computation):
    """A backend's step, explained by repeating it with a bug.

    A bug explains it if the whole report agrees.

    Args:
        looks: functions that return expectations, the final look last.
    """

    subject = ""

    def __init__(
        self,
        case: JudgedTraining,
        start: Start,
        delivered: Mapping[str, Array],
        *looks: Callable[[], Expectation],
    ) -> None:
        self.case, self.start, self.dtype, self.delivered = case, start, case.dtype, delivered
        self.known: dict[Any, Any] = {}  # gradients computed for this step
        judge = Judge(PublishedReference(*looks), delivered)
        judgements, self.expected = judge.look(None, judge.judged)
        self.verdict = Verdict(
            [judge.row(name, None, judgements.get(name)) for name in judge.reference.activations]
        )
        row = self.verdict.first_divergence
        self.tensor = row.tensor if row else ""
        self.actual = delivered.get(self.tensor, UNREPORTED)

    @cached_property
    def right(self) -> Prediction:
        """The expected value of the divergent tensor."""
        return Prediction(self.expected.values[self.tensor], self.expected.sigmas[self.tensor])

    def trajectory(
        self, change: Change, arithmetic: Arithmetic, known: Any = None, earlier: Start | None = None
    ) -> BuggedTrajectory:
        """Training with a bug, before the step."""
        start, resumed = self.start, self.start.resumed
        trajectory = BuggedTrajectory(self.case, arithmetic, change, resumed, known)
        trajectory.place.resumed = resumed if resumed < start.step else 0
        if earlier is not None:
            trajectory.load(earlier.state, earlier.step)
            trajectory.step(earlier.batches, lambda name, values: None)
        trajectory.load(start.state, start.step)
        for name, size in start.carried.items():
            section, _, parameter = name.partition(".")
            is_parameter = section == "parameters"
            nodes, key = (
                (trajectory.parameters, parameter) if is_parameter else (trajectory.optimizer.state, name)
            )
            nodes[key] = arithmetic.uncertain(nodes[key], size)
        return trajectory

    def step(self, change: Change, arithmetic: Arithmetic, known: Any = None) -> dict[str, Array]:
        """Run the step with a bug."""
        tensors, prefix = dict[str, Array](), f"steps.{self.start.step}."
        # The previous step is repeated only for a bug that depends on it.
        for earlier in (None, self.start.earlier) if self.start.earlier else (None,):
            trajectory = self.trajectory(change, arithmetic, known, earlier)
            trajectory.step(
                self.start.batches, lambda name, values: tensors.__setitem__(prefix + name, values)
            )
            if not trajectory.place.memory:
                break
        return tensors

    def exactly(self, change: Change) -> dict[str, Array]:
        """Run the step exactly."""
        return self.step(change, exact(self.dtype), self.known)

    def tried(self, hypothesis: Hypothesis) -> dict[str, Array]:
        """The exact step under a hypothesis, if its report has the same tensors."""
        tensors = self.exactly(hypothesis.change)
        reported, shapes = (
            {name: array.shape for name, array in arrays.items() if name in self.asked}
            for arrays in (self.delivered, tensors)
        )
        if reported != shapes:
            raise LookupError("not the tensors that were reported")
        return tensors

    @cached_property
    def asked(self) -> set[str]:
        """Names of compared tensors."""
        names = {*self.expected.values, *self.delivered}
        return {name for name in names if section_of(name) != "rate" or name in self.delivered}

    @property
    def stage(self) -> str:
        """The stage of the divergence."""
        return stage_of(self.tensor)

    def possible(self, change: Change) -> bool:
        """Whether a bug may first appear at this stage."""
        first, reported = STAGES.index(self.stage), {stage_of(name) for name in self.delivered}
        shown = {STAGES.index(stage) for stage in stages(change, self.case.training.recipe)}
        return any(stage == first or (stage < first and STAGES[stage] not in reported) for stage in shown)

    def values(self, hypothesis: Hypothesis) -> Array:
        """The exact divergent tensor under a hypothesis."""
        if not self.possible(hypothesis.change):
            raise LookupError("it shows elsewhere")
        return self.tried(hypothesis).get(self.tensor, UNREPORTED)

    def near(self, hypothesis: Hypothesis, value: Array) -> bool:  # noqa: ARG002
        """Whether a value substantially reduces the error."""
        # Compare root mean squares, because a step's many values change together.
        if not self.actual.size:
            return True
        before, after = (root_mean_square(self.actual - other) for other in (self.right.value, value))
        return CLEAR * after < before or not np.isfinite(before)

    def predict(self, hypothesis: Hypothesis) -> Prediction:
        """Predict the divergent tensor, and all others."""
        every = self.predictions(hypothesis)
        prediction = every.pop(self.tensor, Prediction(UNREPORTED, UNREPORTED))
        return Prediction(prediction.value, prediction.sigma, every)

    def predictions(self, hypothesis: Hypothesis) -> dict[str, Prediction]:
        """Predict every reported tensor."""
        values = self.tried(hypothesis)

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            for name, array in self.step(hypothesis.change, arithmetic).items():
                observer(name, array)

        _, sigmas = estimate(compute, self.dtype, values, count=FEW)
        allowed = self.expected.sigmas
        return {
            name: Prediction(
                value, np.hypot(sigmas[name], allowed[name]) if name in allowed else sigmas[name]
            )
            for name, value in values.items()
            if name in self.asked
        }

    def judged(self, actual: Array, prediction: Prediction) -> Judgement:
        """Judge a tensor; equal NaN or infinite elements agree."""
        value = prediction.value
        alike = ~np.isfinite(value) & (np.isnan(value) == np.isnan(actual)) & ~np.isfinite(actual)
        finite_actual, value, sigma = (
            np.where(alike, 0.0, array) for array in (actual, value, prediction.sigma)
        )
        return super().judged(finite_actual, Prediction(value, np.where(alike, 1.0, sigma)))

    def explains(self, prediction: Prediction) -> bool:
        """Whether the whole report is as predicted."""
        shown = not self.actual.size or super().explains(prediction)
        return shown and self.distance(prediction) <= 1

    def one_cause(self, one: Hypothesis, other: Hypothesis) -> bool:
        """Whether two hypotheses are one cause."""
        recipes = one.change.places == other.change.places == {"recipe"}
        return super().one_cause(one, other) or (recipes and not {one.name, other.name}.isdisjoint(CLAUSE_OF))

    def same(self, one: Prediction, other: Prediction) -> bool:
        """Whether two predictions are the same."""
        beside = (self.judged(value.value, other.beside[name]) for name, value in one.beside.items())
        return super().same(one, other) and all(judgement.ratio <= SAME for judgement in beside)

    def compatible(self, hypothesis: Hypothesis) -> bool:
        """Whether training with a bug could give this report."""
        change = hypothesis.change
        try:
            trajectory = self.trajectory(change, exact(self.dtype), self.known, self.start.earlier)
            if self.tensor and trajectory.place.memory:
                return True  # it depends on more steps than are repeated
            every = self.predictions(hypothesis)
            return all(
                self.judged(self.delivered[name], prediction).ratio <= 1 for name, prediction in every.items()
            )
        except INAPPLICABLE:
            return False


# A tensor that was not reported.
UNREPORTED = np.zeros(0)


def stage_of(tensor: str) -> str:
    """A tensor's stage (:data:`concord.conformance.bugs.training.edited_step.STAGES`)."""
    return {"losses": "losses", "gradients": "gradients", "norm": "clipped", "clipped": "clipped"}.get(
        section_of(tensor), "moments"
    )
