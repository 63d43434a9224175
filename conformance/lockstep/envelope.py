"""How far correct training may lie from the reference's, step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from concord.conformance.judging.estimate import FEW, SAMPLES, Cache, Observer, estimate, exact
from concord.conformance.judging.expectation import Expectation, JudgedTraining
from concord.conformance.judging.verdict import STEP_SECTIONS, section_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.precision import precision
from concord.spec.training.reference_optimizer import moments
from concord.spec.training.trajectory import Trajectory


@dataclass(frozen=True)
class Start:
    """A step, and where training stood before it."""

    # By parameters.<name> and <moment>.<name>.
    state: Mapping[str, Array]
    step: int
    batches: Sequence[Batch]
    # Sigma of the state, where rounding was carried on to it.
    carried: Mapping[str, Array] = field(default_factory=dict)
    earlier: Start | None = None  # the step before
    resumed: int = 0  # the step before which the backend last went on from a given state; 0: at the start


class Envelope:
    """The reference's training, and how far a correct one may lie from it.

    Args:
        case: the training.
        resynchronised: whether each step starts from a given state, and all clip by the reference's norm.
    """

    def __init__(self, case: JudgedTraining, resynchronised: bool = False) -> None:
        self.case, self.resynchronised = case, resynchronised
        self.truth = case.trajectory(exact(case.dtype))
        self.others: dict[Arithmetic, Trajectory] = {}
        self.values: dict[str, Array] = {}
        self.looks: dict[bool, Expectation] = {}
        self.elements = 0

    def advance(self, start: Start) -> None:
        """Make the reference's step, from a given state or from where the step before ended."""
        self.start, self.looks, values = start, {}, dict[str, Array]()
        self.values = values
        if self.resynchronised:
            self.truth.load(start.state, start.step)
        prefix, before = f"steps.{start.step}.", self.truth.a.elements
        self.truth.step(start.batches, lambda name, array: values.__setitem__(prefix + name, array))
        # What a sample holds: of a batch on its way forward, or of the model, if that is more.
        self.elements = max(
            (self.truth.a.elements - before) // max(len(start.batches), 1),
            sum(array.size for array in self.case.weights.values()),
        )

    def around(self, whole: bool = True, last: bool = False) -> Expectation:
        """Return what is expected of the reference's last step.

        Args:
            whole: whether a first look is not enough: few samples, one low-precision run, no turned corners.
            last: whether no step follows from it: then one training at a time is in memory.
        """
        if whole in self.looks:
            return self.looks[whole]
        start, prefix = self.start, f"steps.{self.start.step}."
        norm = self.values.get(f"{prefix}norm") if self.resynchronised else None

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            other = self.others.get(arithmetic)
            if other is None:  # it begins where the reference's began
                other = self.case.trajectory(arithmetic)
                if self.resynchronised:
                    other.load(start.state, start.step)
            other.norm = norm
            other.step(start.batches, lambda name, array: observer(prefix + name, array))
            if not (last or self.resynchronised):
                self.others[arithmetic] = other

        _, sigmas = estimate(
            compute,
            self.case.dtype,
            self.values,
            arithmetics=list(self.others) or None,
            elements=self.elements,
            count=SAMPLES if whole else FEW,
            corners=self.case.config.rectifies and whole,
        )
        expected = self.looks[whole] = expectation(self.case, self.values, sigmas)
        return expected

    def of_run(self, delivered: Mapping[str, Array], whole: bool = True) -> Expectation:
        """Return what is expected of a run's step, which is clipped by its own norm."""
        expected, prefix = self.around(whole), f"steps.{self.start.step}."
        # The norm is judged by itself. Its error is the same in every clipped gradient, and no noise of each
        # element (decision 24).
        norm, right = delivered.get(f"{prefix}norm", np.zeros(0)), expected.values.get(f"{prefix}norm")
        known = norm.shape == () and norm.dtype.kind == "f" and np.isfinite(norm)
        if self.resynchronised and known and right is not None:
            values, gradient_prefix = dict(expected.values), f"{prefix}gradients."
            gradients = {
                name.removeprefix(gradient_prefix): array
                for name, array in values.items()
                if name.startswith(gradient_prefix)
            }
            trajectory = self.case.trajectory(exact(self.case.dtype))
            trajectory.load(self.start.state, self.start.step)
            trajectory.norm = norm.astype(np.float64)
            trajectory.finish(
                gradients,
                {},
                self.start.batches,
                lambda name, array: values.__setitem__(prefix + name, array),
            )
            expected = replace(expected, values={**values, f"{prefix}norm": right})
        return in_range(expected, self.start.state)


def expectation(case: JudgedTraining, values: dict[str, Array], sigmas: dict[str, Array]) -> Expectation:
    """Return what is expected of training."""
    # Not chained: an undecided tensor says nothing of the next.
    clauses = {name: case.clause(name) for name in values}
    return Expectation(case.dtype, values, sigmas, clauses, chained=False)


def in_range(expected: Expectation, state: Mapping[str, Array]) -> Expectation:
    """Return what is expected of a step; what follows from numbers out of range is undetermined.

    Args:
        state: from which the step starts.
    """
    # What is not finite passes a closed ReLU in a framework that multiplies by 0, and not in one that
    # selects: from there on, whether an element is finite is no question of right or wrong.
    largest, sigmas = precision(expected.dtype).largest, dict(expected.sigmas)
    sound = all(np.isfinite(values).all() for values in state.values())
    for section in STEP_SECTIONS:
        names = [
            name for name in sigmas if section_of(name) == section and section != "rate"
        ]  # which follows from no number of the model
        within = all(
            (abs(expected.values[name]) <= largest).all() and np.isfinite(sigmas[name]).all()
            for name in names
        )
        if section == "gradients":  # each of which may follow from any other
            sound = sound and within
        sigmas |= {name: np.full_like(sigmas[name], np.nan) for name in names if not sound}
        if section == "losses":
            sound = sound and within
    return replace(expected, sigmas=sigmas)


def rounded(case: JudgedTraining, state: Mapping[str, Array]) -> dict[str, Array]:
    """Return a state as the precision holds it."""
    return {name: precision(case.dtype).round(values) for name, values in state.items()}


def carried(case: JudgedTraining, step: int, expected: Expectation) -> dict[str, Array]:
    """Return sigma of the state from which the next step starts."""
    prefix, kept = f"steps.{step}.", ("parameters", *moments(case.training.recipe))
    return {
        name.removeprefix(prefix): sigma
        for name, sigma in expected.sigmas.items()
        if name.split(".")[2] in kept
    }


_derived = Cache()


def of_training(case: JudgedTraining) -> Expectation:
    """Return what correct training reports; rounding is carried through the steps."""
    expected: Expectation = _derived.get(case.key, lambda: _of_training(case))
    return expected


def _of_training(case: JudgedTraining) -> Expectation:
    envelope, values, sigmas = Envelope(case), dict[str, Array](), dict[str, Array]()
    for step, batches in enumerate(case.training.steps):
        envelope.advance(Start(case.start, step, batches))
        expected = envelope.around(last=step == len(case.training.steps) - 1)
        reported = [name for name in expected.values if case.training.reports(step, name.split(".", 2)[2])]
        values |= {name: expected.values[name] for name in reported}
        sigmas |= {name: expected.sigmas[name] for name in reported}
    return expectation(case, values, sigmas)
