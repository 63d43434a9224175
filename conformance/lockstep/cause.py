"""What explains a step that diverges: it is made again from the oracle's state with one thing wrong on purpose."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from concord.conformance.comparison import section_of
from concord.conformance.estimate import FEW, Cache, Observer, estimate, exact
from concord.conformance.expectation import Array, Expectation, JudgedTraining, digest, root_mean_square
from concord.conformance.explain import Cause
from concord.conformance.explain.hypothesis import INAPPLICABLE
from concord.conformance.explain.reading import CLEAR
from concord.conformance.explain.search import EDGE, MOST_NAMED, MUCH_BETTER
from concord.conformance.faults.training.fault import Change
from concord.conformance.faults.training.tape import FaultyTrajectory
from concord.conformance.lockstep.envelope import expectation
from concord.conformance.lockstep.hypotheses import STAGES, Hypothesis, hypotheses
from concord.conformance.lockstep.recovered import recovered
from concord.conformance.scoring import judge_tensor
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch


@dataclass(frozen=True)
class Start:
    """A step, and where training stood before it.

    Attributes:
        state, step: ``parameters.<name>`` and ``<slot>.<name>``, and how many steps were made before.
        window: the batches of the step.
        carried: sigma of the state, where rounding was carried on to it.
    """

    state: Mapping[str, Array]
    step: int
    window: Sequence[Batch]
    carried: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A step that diverges.

    Attributes:
        case: the training, with the deviations of the backend.
        start: the step, and the state of the oracle before it.
        delivered: what the backend reported of it.
        expected: what is expected of it.
        tensor: the first that diverges.
        earlier: the step before, if there was one.
        resumed: the step before which the backend last went on from a state that it was given; 0: at the start.
        known: gradients that were computed for this question.
    """

    case: JudgedTraining
    start: Start
    delivered: Mapping[str, Array]
    expected: Expectation
    tensor: str
    earlier: Start | None = None
    resumed: int = 0
    known: dict[Any, Any] = field(default_factory=dict)

    def made(
        self, change: Change, arithmetic: Arithmetic, known: dict[Any, Any] | None = None
    ) -> dict[str, Array]:
        """Return what the step comes to in training with a fault."""
        step, found = self.start.step, dict[str, Array]()
        trajectory = FaultyTrajectory(self.case, arithmetic, change, self.resumed, known)
        if self.earlier is not None:
            trajectory.place.resumed = self.resumed if self.resumed < step else 0
            trajectory.load(self.earlier.state, self.earlier.step)
            trajectory.step(self.earlier.window, lambda name, values: None)
        trajectory.load(self.start.state, step)
        for name, size in self.start.carried.items():
            nodes, key = (
                (trajectory.parameters, name.removeprefix("parameters."))
                if name.startswith("parameters.")
                else (trajectory.optimizer.state, name)
            )
            nodes[key] = arithmetic.uncertain(nodes[key], size)
        trajectory.step(
            self.start.window, lambda name, values: found.__setitem__(f"steps.{step}.{name}", values)
        )
        return found

    @functools.cached_property
    def key(self) -> str:
        """A digest of what the step is made from."""
        given = {
            f"{place}.{name}": np.asarray(array)
            for place, start in (("start", self.start), ("earlier", self.earlier))
            if start
            for name, array in start.state.items()
        }
        return digest([self.case.key, self.start.step, self.resumed], given)

    def tried(self, hypothesis: Hypothesis) -> dict[str, Array]:
        """Return what the step comes to under a hypothesis, in exact arithmetic: the same for all backends."""

        def make() -> Expectation:
            return expectation(
                self.case, self.made(hypothesis.change, exact(self.case.dtype), self.known), {}
            )

        found: Expectation = _tried.get(f"{self.key} {hypothesis.name} {hypothesis.text}", make)
        return found.values

    def stage(self) -> str:
        """Return where in the step it diverges first."""
        return stage_of(self.tensor)

    def possible(self, hypothesis: Hypothesis) -> bool:
        """Return whether a hypothesis may show first where the step does: what was reported before is right."""
        first, reported = STAGES.index(self.stage()), {stage_of(name) for name in self.delivered}
        stages = {STAGES.index(stage) for stage in hypothesis.stages(self.case.training.recipe)}
        return any(stage == first or (stage < first and STAGES[stage] not in reported) for stage in stages)

    def nearer(self, values: Mapping[str, Array]) -> bool:
        """Return whether the first tensor that diverges is much nearer to values than to what is right, and the same tensors are there."""
        if values.keys() & self.asked != self.delivered.keys() & self.asked or any(
            values[name].shape != self.delivered[name].shape for name in values.keys() & self.asked
        ):
            return False
        if self.tensor not in values:
            return True
        actual = self.delivered[self.tensor]
        right = self.expected.values.get(self.tensor)
        if right is None or right.shape != actual.shape:
            return True
        before, left = root_mean_square(actual - right), root_mean_square(actual - values[self.tensor])
        return CLEAR * left < before or not np.isfinite(before)

    @property
    def asked(self) -> set[str]:
        """Tensors that the step may be compared by."""
        return {
            name
            for name in {*self.expected.values, *self.delivered}
            if section_of(name) != "rate" or name in self.delivered
        }

    def distance(self, values: Mapping[str, Array], sigmas: Mapping[str, Array]) -> float:
        """Return by how many tolerances what was reported lies off values, at most."""
        worst = 0.0
        for name in values.keys() & self.asked:
            alike = (
                ~np.isfinite(values[name])
                & (np.isnan(values[name]) == np.isnan(self.delivered[name]))
                & ~np.isfinite(self.delivered[name])
            )
            actual, value, sigma = (
                np.where(alike, 0.0, array) for array in (self.delivered[name], values[name], sigmas[name])
            )
            worst = max(
                worst, judge_tensor(actual, value, np.where(alike, 1.0, sigma), self.case.dtype).ratio
            )
        return worst

    def tolerance(self, change: Change, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return how far a correct computation with a fault may lie from values: as far as rounding takes it, from a state that is off by as much as any may be."""

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


_tried = Cache()


def stage_of(tensor: str) -> str:
    """Return to which of :data:`concord.conformance.lockstep.hypotheses.STAGES` a tensor belongs."""
    return {"losses": "losses", "gradients": "gradients", "norm": "clipped", "clipped": "clipped"}.get(
        section_of(tensor), "moments"
    )


def cause_of(question: Question) -> Cause | None:
    """Return what explains a step that diverges: everything that a backend reported of it lies within the tolerances of training with that fault."""
    case, right = question.case, question.expected.values
    if any(
        array.dtype.kind != "f" or array.shape != right[name].shape
        for name, array in question.delivered.items()
        if name in right
    ):
        return None  # numbers that cannot be compared
    known = hypotheses(case.training.recipe, len(case.training.windows), question.start.step)
    with np.errstate(all="ignore"):  # what is not finite is compared as such
        found = explaining(question, known) or explaining(question, recovered(question))
    return conclude(found) if found else None


def explaining(question: Question, tried: Iterable[Hypothesis]) -> list[tuple[float, Hypothesis]]:
    """Return the hypotheses that explain a step, and by how many tolerances it lies off each."""
    found = []
    for hypothesis in tried:
        try:
            if not question.possible(hypothesis):
                continue
            values = question.tried(hypothesis)
            if question.nearer(values):
                distance = question.distance(values, question.tolerance(hypothesis.change, values))
                if distance <= 1:
                    found.append((distance, hypothesis))
        except INAPPLICABLE:
            continue
    return found


def conclude(found: Sequence[tuple[float, Hypothesis]]) -> Cause:
    """Return the cause: what explains a step best, and all that explains it as well."""
    best = min(distance for distance, _ in found)
    kept = [hypothesis for distance, hypothesis in found if distance <= EDGE or distance < MUCH_BETTER * best]
    names, clauses = (
        tuple(dict.fromkeys(getattr(hypothesis, of) for hypothesis in kept)) for of in ("name", "clause")
    )
    said = " or by ".join(f"{hypothesis.text} ({hypothesis.clause})" for hypothesis in kept[:MOST_NAMED])
    more = f" or by {len(kept) - MOST_NAMED} others" if len(kept) > MOST_NAMED else ""
    return Cause(
        " or ".join(names),
        f"{'explained' if len(names) == 1 else 'may be explained'} by {said}{more}",
        len(names) == 1,
        clauses,
    )
