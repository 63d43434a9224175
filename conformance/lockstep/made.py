"""A step that a backend made, and what it would have come to with one thing wrong on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from concord.backends.interface import Run
from concord.conformance.bugs.bug import Bug, Change
from concord.conformance.bugs.training.step import STAGES, stages
from concord.conformance.bugs.training.tape import BuggedTrajectory
from concord.conformance.estimate import FEW, Cache, Observer, estimate, exact
from concord.conformance.expectation import Array, Expectation, JudgedTraining, digest, root_mean_square
from concord.conformance.explain.hypothesis import INAPPLICABLE
from concord.conformance.explain.reading import CLEAR
from concord.conformance.judging import judge
from concord.conformance.lockstep.envelope import Start, expectation
from concord.conformance.scoring import judge_tensor
from concord.conformance.verdict import Verdict, section_of
from concord.spec.arithmetic import Arithmetic


@dataclass(frozen=True)
class MadeStep:
    """A step that a backend made.

    Attributes:
        case: the training, with the deviations of the backend.
        start: the step, and the state of the oracle before it.
        delivered: what the backend reported of it.
        expected: what is expected of it.
        known: gradients that were computed for this step.
    """

    case: JudgedTraining
    start: Start
    delivered: Mapping[str, Array]
    expected: Expectation
    known: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> Verdict:
        """What was reported, judged by what is expected."""
        nothing, case = np.zeros(0), self.case
        run = Run(nothing, nothing, dtype=case.dtype, requested=("steps",), steps=dict(self.delivered))
        expected, batch = self.expected, self.start.batches[0]
        return judge(
            case.config, case.weights, batch, run, case.part, lambda given: expected, dtype=case.dtype
        )

    @cached_property
    def tensor(self) -> str:
        """The first that diverges; empty if none does."""
        row = self.verdict.first_divergence
        return row.tensor if row else ""

    @property
    def statuses(self) -> set[tuple[str, str]]:
        """Of each tensor, its section and its status."""
        return {(section_of(row.tensor), row.status) for row in self.verdict.table}

    def trajectory(self, change: Change, arithmetic: Arithmetic, known: Any = None) -> BuggedTrajectory:
        """Return training with a bug, before the step."""
        start, resumed = self.start, self.start.resumed
        trajectory = BuggedTrajectory(self.case, arithmetic, change, resumed, known)
        if start.earlier is not None:
            trajectory.place.resumed = resumed if resumed < start.step else 0
            trajectory.load(start.earlier.state, start.earlier.step)
            trajectory.step(start.earlier.batches, lambda name, values: None)
        trajectory.load(start.state, start.step)
        for name, size in start.carried.items():
            section, _, parameter = name.partition(".")
            own = section == "parameters"
            nodes, key = (trajectory.parameters, parameter) if own else (trajectory.optimizer.state, name)
            nodes[key] = arithmetic.uncertain(nodes[key], size)
        return trajectory

    def made(self, change: Change, arithmetic: Arithmetic, known: Any = None) -> dict[str, Array]:
        """Return what the step comes to in training with a bug."""
        found, prefix = dict[str, Array](), f"steps.{self.start.step}."
        self.trajectory(change, arithmetic, known).step(
            self.start.batches, lambda name, values: found.__setitem__(prefix + name, values)
        )
        return found

    def right(self, change: Change | None = None) -> dict[str, Array]:
        """Return what the step comes to in exact arithmetic, in right training unless a change is given."""
        return self.made(change or Change(), exact(self.case.dtype), self.known)

    @cached_property
    def key(self) -> str:
        """A digest of what the step is made from."""
        given = {
            f"{place}.{name}": np.asarray(array)
            for place, start in (("start", self.start), ("earlier", self.start.earlier))
            if start
            for name, array in start.state.items()
        }
        return digest([self.case.key, self.start.step, self.start.resumed], given)

    def tried(self, bug: Bug) -> dict[str, Array]:
        """Return what the step comes to with a bug, in exact arithmetic: the same for all backends."""

        def make() -> Expectation:
            return expectation(self.case, self.right(bug.change), {})

        found: Expectation = _tried.get(f"{self.key} {bug.name} {bug.what}", make)
        return found.values

    @property
    def stage(self) -> str:
        """Where in the step it diverges first."""
        return stage_of(self.tensor)

    def possible(self, bug: Bug) -> bool:
        """Return whether a bug may show first where the step diverges: what was reported before is right."""
        first, reported = STAGES.index(self.stage), {stage_of(name) for name in self.delivered}
        shown = {STAGES.index(stage) for stage in stages(bug.change, self.case.training.recipe)}
        return any(stage == first or (stage < first and STAGES[stage] not in reported) for stage in shown)

    def nearer(self, values: Mapping[str, Array]) -> bool:
        """Return whether the first tensor that diverges is much nearer to values than to what is right."""
        if not self.comparable(values):
            return False
        if self.tensor not in values:
            return True
        actual, right = self.delivered[self.tensor], self.expected.values.get(self.tensor)
        if right is None or right.shape != actual.shape:
            return True
        before, left = root_mean_square(actual - right), root_mean_square(actual - values[self.tensor])
        return CLEAR * left < before or not np.isfinite(before)

    def comparable(self, values: Mapping[str, Array]) -> bool:
        """Return whether the same tensors are among values as were reported."""
        asked = self.asked
        return values.keys() & asked == self.delivered.keys() & asked and all(
            values[name].shape == self.delivered[name].shape for name in values.keys() & asked
        )

    @property
    def asked(self) -> set[str]:
        """Tensors that the step may be compared by."""
        return {
            name
            for name in {*self.expected.values, *self.delivered}
            if section_of(name) != "rate" or name in self.delivered
        }

    def distance(self, bug: Bug, values: Mapping[str, Array]) -> float:
        """Return by how many tolerances what was reported lies off values with a bug, at most."""
        worst, sigmas = 0.0, self.tolerance(bug.change, values)
        for name in values.keys() & self.asked:
            actual, value = self.delivered[name], values[name]
            alike = ~np.isfinite(value) & (np.isnan(value) == np.isnan(actual)) & ~np.isfinite(actual)
            actual, value, sigma = (np.where(alike, 0.0, array) for array in (actual, value, sigmas[name]))
            judgement = judge_tensor(actual, value, np.where(alike, 1.0, sigma), self.case.dtype)
            worst = max(worst, judgement.ratio)
        return worst

    def tolerance(self, change: Change, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return how far rounding takes training with a bug from values."""

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            for name, array in self.made(change, arithmetic).items():
                observer(name, array)

        _, own = estimate(compute, self.case.dtype, values, count=FEW)
        given = self.expected.sigmas
        return {
            name: np.hypot(sigma, given[name])
            if name in given and given[name].shape == sigma.shape
            else sigma
            for name, sigma in own.items()
        }

    def compatible(self, bug: Bug) -> bool:
        """Return whether what was reported may be that of training with a bug, as far as it can be known."""
        try:
            values = self.tried(bug)
            if self.tensor and remembers(self, bug):
                return True  # of more steps than are made again
            return self.comparable(values) and self.distance(bug, values) <= 1
        except INAPPLICABLE:
            return False


_tried = Cache()


def remembers(made: MadeStep, bug: Bug) -> bool:
    """Return whether a bug keeps something from step to step."""
    trajectory = made.trajectory(bug.change, exact(made.case.dtype))
    return bool(trajectory.place.memory)


def stage_of(tensor: str) -> str:
    """Return to which of :data:`concord.conformance.bugs.training.step.STAGES` a tensor belongs."""
    return {"losses": "losses", "gradients": "gradients", "norm": "clipped", "clipped": "clipped"}.get(
        section_of(tensor), "moments"
    )
