"""How far correct training may lie from the oracle's, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from concord.conformance.estimate import FEW, SAMPLES, Cache, Observer, estimate, exact, least_sigma
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.tolerance import difference
from concord.conformance.verdict import STEP_SECTIONS, section_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.deviations import NONE, Deviations
from concord.spec.precision import precision
from concord.spec.training.trajectory import Trajectory

SIMILAR = 2.0**-10
"""Share of a tensor's largest number by which a step that takes another's sigma at first may differ."""


@dataclass(frozen=True)
class Start:
    """A step, and where training stood before it.

    Attributes:
        state, step: ``parameters.<name>`` and ``<slot>.<name>``, and how many steps were made before.
        batches: of the step.
        carried: sigma of the state, where rounding was carried on to it.
        earlier: the step before, if there was one.
        resumed: the step before which the backend last went on from a state that it was given; 0: at the
            start.
    """

    state: Mapping[str, Array]
    step: int
    batches: Sequence[Batch]
    carried: Mapping[str, Array] = field(default_factory=dict)
    earlier: Start | None = None
    resumed: int = 0


class Envelope:
    """The oracle's training, and how far a correct one may lie from it.

    A step is the unit. Steps that follow each other carry rounding on; after :meth:`load` a step starts from
    what is given.

    Args:
        case: the training.
        again: whether each step starts from a given state, and all arithmetics clip by the oracle's norm.
        brief: whether a first look is enough: few samples, one low-precision run, and no corner of a ReLU
            is turned. What comes near a tolerance by it has to be judged by the whole.
    """

    def __init__(self, case: JudgedTraining, again: bool = False, brief: bool = False) -> None:
        self.case, self.again, self.brief = case, again, brief
        self.start: tuple[Mapping[str, Array], int] | None = None
        self.truth = case.trajectory(exact(case.dtype))
        self.others: dict[Arithmetic, Trajectory] = {}
        self.values: dict[str, Array] = {}
        self.elements = 0

    def load(self, state: Mapping[str, Array], steps: int) -> None:
        """Go on from a state after so many steps; rounding begins anew."""
        self.start = (state, steps)
        self.truth.load(state, steps)
        self.others = {}

    def step(self, batches: Sequence[Batch], last: bool = False) -> Expectation:
        """Return what a step of these batches yields in correct training, as ``steps.<number>.<name>``.

        Args:
            last: whether no step follows from it: nothing is kept, so that one training at a time is in
                memory.
        """
        self.advance(batches)
        return self.around(batches, last)

    def advance(self, batches: Sequence[Batch]) -> None:
        """Make the oracle's step."""
        prefix, before, values = f"steps.{self.truth.steps}.", self.truth.a.elements, dict[str, Array]()
        self.values = values
        self.truth.step(batches, lambda name, array: values.__setitem__(prefix + name, array))
        # What a sample holds: of a batch on its way forward, or of the model, if that is more.
        self.elements = max(
            (self.truth.a.elements - before) // max(len(batches), 1),
            sum(array.size for array in self.case.weights.values()),
        )

    def around(self, batches: Sequence[Batch], last: bool = False) -> Expectation:
        """Return the step that the oracle has made, and how far correct training may lie from it."""
        prefix, values = f"steps.{self.truth.steps - 1}.", self.values
        norm = values.get(f"{prefix}norm") if self.again else None

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            other = self.others.get(arithmetic)
            if other is None:  # it begins where the oracle's began
                other = self.case.trajectory(arithmetic)
                if self.start is not None:
                    other.load(*self.start)
            other.norm = norm
            other.step(batches, lambda name, array: observer(prefix + name, array))
            if not last:
                self.others[arithmetic] = other

        _, sigmas = estimate(
            compute,
            self.case.dtype,
            values,
            arithmetics=list(self.others) or None,
            elements=self.elements,
            count=FEW if self.brief else SAMPLES,
            corners=self.case.config.rectifies and not self.brief,
        )
        return expectation(self.case, dict(values), sigmas)


def expectation(case: JudgedTraining, values: dict[str, Array], sigmas: dict[str, Array]) -> Expectation:
    """Return what is expected of training; what one tensor comes to says nothing of the next."""
    shapes = {name: value.shape for name, value in values.items()}
    return Expectation(
        case.dtype, values, sigmas, {name: case.clause(name) for name in values}, {}, shapes, chained=False
    )


def given_norm(case: JudgedTraining, start: Start, expected: Expectation, norm: Array) -> Expectation:
    """Return what is expected of a step whose gradients are clipped by the norm that a run reported.

    The norm is judged by itself. Its error is the same in every clipped gradient, and no noise of each
    element.

    Args:
        norm: (), finite.
    """
    prefix, values = f"steps.{start.step}.", dict(expected.values)
    gradients = {
        name.removeprefix(f"{prefix}gradients."): value
        for name, value in values.items()
        if name.startswith(f"{prefix}gradients.")
    }
    trajectory = case.trajectory(exact(case.dtype))
    trajectory.load(start.state, start.step)
    trajectory.norm = norm.astype(np.float64)
    trajectory.finish(
        gradients, {}, start.batches, lambda name, value: values.__setitem__(prefix + name, value)
    )
    return replace(expected, values={**values, f"{prefix}norm": expected.values[f"{prefix}norm"]})


def in_range(expected: Expectation, state: Mapping[str, Array]) -> Expectation:
    """Return what is expected of a step, where nothing is determined that follows from numbers out of range.

    What is not finite passes a ReLU that is closed, or a masked score, in a framework that multiplies by 0,
    and not in one that selects: from there on it is no question of right or wrong whether an element is
    finite.

    Args:
        state: that the step starts from.
    """
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


class Envelopes:
    """The envelopes of one training for backends that declare different deviations.

    Args:
        case: without deviations: from it comes the oracle's state.
        deviations: of each backend.
        again: whether each step starts from a given state, and a first look is enough.
    """

    def __init__(self, case: JudgedTraining, deviations: Iterable[Deviations], again: bool) -> None:
        self.again = again
        self.each = {
            key_of(one): Envelope(replace(case, deviations=one), again, brief=again)
            for one in (NONE, *deviations)
        }
        self.found: dict[tuple[str, bool], Expectation] = {}

    def advance(self, start: Start) -> dict[str, Array]:
        """Make the oracle's step from a state, or from where the step before ended; return where it ends."""
        self.found = {}
        for envelope in self.each.values():
            if self.again or start.step == 0:
                envelope.load(start.state, start.step)
            envelope.advance(start.batches)
        return self.each[""].truth.state()

    def around(self, start: Start, deviations: Deviations, whole: bool = False) -> Expectation:
        """Return what that step yields, and how far correct training with deviations may lie from it.

        Args:
            whole: whether more than a first look is wanted, at a step from a given state.
        """
        key = key_of(deviations)
        if (key, whole) not in self.found:
            self.found[key, whole] = self._around(start, deviations, self.each[key], whole)
        return self.found[key, whole]

    def _around(self, start: Start, deviations: Deviations, envelope: Envelope, whole: bool) -> Expectation:
        values = envelope.values
        if whole:
            envelope = Envelope(envelope.case, again=True)
            envelope.load(start.state, start.step)
            return envelope.step(start.batches, last=True)
        if deviations and self.again and difference(values, self.each[""].values) <= SIMILAR:
            sigmas = {
                name: np.maximum(sigma, least_sigma(values[name], envelope.case.dtype))
                for name, sigma in self.around(start, NONE).sigmas.items()
            }
            return expectation(envelope.case, values, sigmas)
        return envelope.around(start.batches, last=self.again)


def key_of(deviations: Deviations) -> str:
    """Return a text that says which deviations these are; none: no text."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(deviations.items()))


_derived = Cache()


def of_training(case: JudgedTraining) -> Expectation:
    """Return what correct training reports; rounding is carried through the steps."""
    found: Expectation = _derived.get(case.key, lambda: _of_training(case))
    return found


def _of_training(case: JudgedTraining) -> Expectation:
    envelope, values, sigmas = Envelope(case), dict[str, Array](), dict[str, Array]()
    for step, batches in enumerate(case.training.steps):
        expected = envelope.step(batches, last=step == len(case.training.steps) - 1)
        reported = [name for name in expected.values if case.training.reports(step, name.split(".", 2)[2])]
        values |= {name: expected.values[name] for name in reported}
        sigmas |= {name: expected.sigmas[name] for name in reported}
    return expectation(case, values, sigmas)
