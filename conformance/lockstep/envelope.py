"""Tolerances of correct training, step by step."""

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
    """A step, and the state before it."""

    # Keys are parameters.<name> and <moment>.<name>.
    state: Mapping[str, Array]
    step: int
    batches: Sequence[Batch]
    # Sigma of the state, if rounding is carried over.
    carried: Mapping[str, Array] = field(default_factory=dict)
    earlier: Start | None = None  # the step before
    resumed: int = 0  # the step at which the backend last resumed from a given state; 0 for never


class Envelope:
    """The reference's training, and tolerances around it.

    Args:
        resynchronised: whether steps start from a given state and use the reference's norm.
    """

    def __init__(self, case: JudgedTraining, resynchronised: bool = False) -> None:
        self.case, self.resynchronised = case, resynchronised
        self.truth = case.trajectory(exact(case.dtype))
        self.others: dict[Arithmetic, Trajectory] = {}
        self.values: dict[str, Array] = {}
        self.looks: dict[bool, Expectation] = {}
        self.elements = 0

    def advance(self, start: Start) -> None:
        """Run the reference's next step."""
        self.start, self.looks, values = start, {}, dict[str, Array]()
        self.values = values
        if self.resynchronised:
            self.truth.load(start.state, start.step)
        prefix, before = f"steps.{start.step}.", self.truth.a.elements
        self.truth.step(start.batches, lambda name, array: values.__setitem__(prefix + name, array))
        # Values per sample: those of a batch's forward pass or of the model, whichever are more.
        self.elements = max(
            (self.truth.a.elements - before) // max(len(start.batches), 1), self.case.elements
        )

    def around(self, whole: bool = True, last: bool = False) -> Expectation:
        """Expectation of the reference's last step.

        Args:
            whole: use all runs, not the few of a first look.
        """
        if whole in self.looks:
            return self.looks[whole]
        start, prefix = self.start, f"steps.{self.start.step}."
        norm = self.values.get(f"{prefix}norm") if self.resynchronised else None

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            other = self.others.get(arithmetic)
            if other is None:  # the reference starts the same way
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

    def of_run(self, values: dict[str, Array], whole: bool = True) -> Expectation:
        """Expectation of a run with these :meth:`exact_values`."""
        return in_range(replace(self.around(whole), values=values), self.start.state)

    def exact_values(self, delivered: Mapping[str, Array]) -> dict[str, Array]:
        """Exact values of the last step, clipped by a run's own norm."""
        values, prefix = dict(self.values), f"steps.{self.start.step}."
        # The norm is judged separately. Its error is the same in every clipped gradient, instead of noise per
        # element (decision 24).
        norm, right = delivered.get(f"{prefix}norm", np.zeros(0)), values.get(f"{prefix}norm")
        is_number = norm.shape == () and norm.dtype.kind == "f" and np.isfinite(norm)
        if self.resynchronised and is_number and right is not None:
            gradient_prefix = f"{prefix}gradients."
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
            values[f"{prefix}norm"] = right
        return values


def expectation(case: JudgedTraining, values: dict[str, Array], sigmas: dict[str, Array]) -> Expectation:
    """Expectation of training."""
    # Not chained, since an undetermined tensor does not affect the next.
    clauses = {name: case.clause(name) for name in values}
    return Expectation(case.dtype, values, sigmas, clauses, chained=False)


def in_range(expected: Expectation, state: Mapping[str, Array]) -> Expectation:
    """Mark results of out-of-range values as undetermined."""
    # A value that is not finite passes a closed ReLU in frameworks that multiply by 0, but not in those that
    # select. From there on, finiteness does not depend on correctness.
    largest, sigmas = precision(expected.dtype).largest, dict(expected.sigmas)
    sound = all(np.isfinite(values).all() for values in state.values())
    for section in STEP_SECTIONS:
        names = [
            name for name in sigmas if section_of(name) == section and section != "rate"
        ]  # independent of the model
        within = all(
            (abs(expected.values[name]) <= largest).all() and np.isfinite(sigmas[name]).all()
            for name in names
        )
        if section == "gradients":  # each gradient may depend on any other
            sound = sound and within
        sigmas |= {name: np.full_like(sigmas[name], np.nan) for name in names if not sound}
        if section == "losses":
            sound = sound and within
    return replace(expected, sigmas=sigmas)


def rounded(case: JudgedTraining, state: Mapping[str, Array]) -> dict[str, Array]:
    """Round a state to the precision."""
    return {name: precision(case.dtype).round(values) for name, values in state.items()}


def carried(case: JudgedTraining, step: int, expected: Expectation) -> dict[str, Array]:
    """Sigma of the next step's initial state."""
    prefix, kept = f"steps.{step}.", ("parameters", *moments(case.training.recipe))
    return {
        name.removeprefix(prefix): sigma
        for name, sigma in expected.sigmas.items()
        if name.split(".")[2] in kept
    }


_derived = Cache()


def of_training(case: JudgedTraining) -> Expectation:
    """Expectation of training over all steps."""
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
