"""How far correct training may lie from the oracle's, step after step: the same training in every arithmetic that rounds as a correct run may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from concord.conformance.estimate import FEW, SAMPLES, Cache, Observer, estimate, exact, least_sigma
from concord.conformance.expectation import Array, Expectation, JudgedTraining
from concord.conformance.tolerance import difference
from concord.conformance.verdict import STEP_SECTIONS, section_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.deviations import Deviations
from concord.spec.precision import precision
from concord.spec.training.trajectory import Trajectory

SIMILAR = 2.0**-10
"""Share of a tensor's largest number by which deviations may change a step for which a first look takes another's sigma."""


class Envelope:
    """The oracle's training, and how far a correct one may lie from it.

    A step is the unit. Steps that follow each other carry rounding on; after :meth:`load` a step starts from what is given.

    Args:
        case: the training.
        brief: whether a first look is enough: few samples, one shadow, and no corner of a ReLU is turned. What comes near a tolerance by it has
            to be judged by the whole.
        again: whether each step starts from a given state, and what follows from a norm is judged given that: all arithmetics clip by the oracle's.
    """

    def __init__(self, case: JudgedTraining, brief: bool = False, again: bool = False) -> None:
        self.case, self.brief, self.again = case, brief, again
        self.count = FEW if brief else SAMPLES
        self.start: tuple[Mapping[str, Array], int] | None = None
        self.truth = case.trajectory(exact(case.dtype))
        self.others: dict[Arithmetic, Trajectory] = {}
        self.elements = 0

    def load(self, state: Mapping[str, Array], steps: int) -> None:
        """Go on from elsewhere (:meth:`concord.spec.training.trajectory.Trajectory.load`); rounding begins anew."""
        self.start = (state, steps)
        self.truth.load(state, steps)
        self.others = {}

    def step(self, window: Sequence[Batch], last: bool = False) -> Expectation:
        """Return what a step of these batches yields in correct training, as ``steps.<number>.<name>``.

        Args:
            last: whether no step follows from it: nothing is kept, so that one training at a time is in memory.
        """
        return self.around(self.advance(window), window, last)

    def advance(self, window: Sequence[Batch]) -> dict[str, Array]:
        """Make the oracle's step, and return its tensors."""
        prefix, values, before = f"steps.{self.truth.steps}.", dict[str, Array](), self.truth.a.elements
        self.truth.step(window, lambda name, array: values.__setitem__(prefix + name, array))
        # What a sample holds: of a batch on its way forward, or of the model, if that is more.
        self.elements = max(
            (self.truth.a.elements - before) // max(len(window), 1),
            sum(array.size for array in self.case.weights.values()),
        )
        return values

    def around(self, values: Mapping[str, Array], window: Sequence[Batch], last: bool = False) -> Expectation:
        """Return the step that the oracle has made, and how far correct training may lie from it."""
        prefix = f"steps.{self.truth.steps - 1}."
        norm = values.get(f"{prefix}norm") if self.again else None

        def compute(arithmetic: Arithmetic, observer: Observer) -> None:
            other = self.others.get(arithmetic) or self.begun(arithmetic)
            other.norm = norm
            other.step(window, lambda name, array: observer(prefix + name, array))
            if not last:
                self.others[arithmetic] = other

        _, sigmas = estimate(
            compute,
            self.case.dtype,
            values,
            arithmetics=list(self.others) or None,
            elements=self.elements,
            count=self.count,
            corners=self.case.config.rectifies and not self.brief,
        )
        return expectation(self.case, dict(values), sigmas)

    def fork(self, case: JudgedTraining, truth: Trajectory) -> Envelope:
        """Return the envelope of a training that went the same way up to the step that the oracles of both have just made."""
        forked = Envelope(case, self.brief, self.again)
        forked.start, forked.truth, forked.elements = self.start, truth, self.elements
        forked.others = {arithmetic: case.trajectory(arithmetic) for arithmetic in self.others}
        for arithmetic, own in forked.others.items():
            own.follow(self.others[arithmetic])
        return forked

    def begun(self, arithmetic: Arithmetic) -> Trajectory:
        """Return a trajectory in some arithmetic, where the oracle's began."""
        trajectory = self.case.trajectory(arithmetic)
        if self.start is not None:
            trajectory.load(*self.start)
        return trajectory


def expectation(case: JudgedTraining, values: dict[str, Array], sigmas: dict[str, Array]) -> Expectation:
    """Return what is expected of training; what one tensor comes to says nothing of the next."""
    shapes = {name: value.shape for name, value in values.items()}
    return Expectation(
        case.dtype, values, sigmas, {name: case.clause(name) for name in values}, {}, shapes, chained=False
    )


def given_norm(
    case: JudgedTraining,
    state: Mapping[str, Array],
    steps: int,
    window: Sequence[Batch],
    expected: Expectation,
    norm: Array,
) -> Expectation:
    """Return what is expected of a step whose gradients are clipped by the norm that a run itself reported of it.

    The norm is judged by itself. Its error is the same in every clipped gradient, and no noise of each element.

    Args:
        state: that the step starts from.
        steps: how many were made before.
        norm: (), finite.
    """
    prefix, values = f"steps.{steps}.", dict(expected.values)
    gradients = {
        name.removeprefix(f"{prefix}gradients."): value
        for name, value in values.items()
        if name.startswith(f"{prefix}gradients.")
    }
    trajectory = case.trajectory(exact(case.dtype))
    trajectory.load(state, steps)
    trajectory.norm = norm.astype(np.float64)
    trajectory.finish(gradients, {}, window, lambda name, value: values.__setitem__(prefix + name, value))
    return replace(expected, values={**values, f"{prefix}norm": expected.values[f"{prefix}norm"]})


def in_range(expected: Expectation, state: Mapping[str, Array]) -> Expectation:
    """Return what is expected of a step, where nothing is determined that follows from numbers out of range.

    What is not finite passes a ReLU that is closed, or a masked score, in one framework, which multiplies by 0, and not in another, which
    selects: from there on it is no question of right or wrong whether an element is finite.

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
    """The envelopes of one training for backends that declare different deviations, which share what they can.

    Args:
        case: without deviations: from it comes the oracle's state.
        deviations: of each backend.
        again: whether each step starts from a given state, and a first look is enough; else every difference between two
            oracles grows, and each has an envelope of its own from the step at which it first shows.
    """

    def __init__(self, case: JudgedTraining, deviations: Iterable[Deviations], again: bool) -> None:
        self.case, self.again, self.common = case, again, Envelope(case, again, again)
        self.cases = {key_of(each): replace(case, deviations=each) for each in deviations if each}
        self.truths = {key: Envelope(each, again, again) for key, each in self.cases.items()}
        self.own: dict[str, Envelope] = {}
        self.full: dict[str, Expectation] = {}
        self.window: Sequence[Batch] = ()
        self.judged: list[str] = []
        self.values: dict[str, Array] = {}
        self.theirs: dict[str, dict[str, Array]] = {}
        self.forked: dict[str, Envelope] = {}

    def state(self) -> dict[str, Array]:
        """Return where the oracle stands."""
        return self.common.truth.state()

    def advance(
        self,
        state: Mapping[str, Array] | None,
        steps: int,
        window: Sequence[Batch],
        deviations: Sequence[Deviations],
    ) -> None:
        """Make the oracle's step, after which :meth:`state` is where it ended.

        Args:
            state: that it starts from; None: where the step before ended.
            steps: how many were made before.
            deviations: of each backend that is judged.
        """
        self.full.clear()
        for envelope in (self.common, *self.truths.values()) if state is not None else ():
            envelope.load(state or {}, steps)
        self.window, self.judged, self.forked = window, [key_of(each) for each in deviations], dict(self.own)
        self.values = self.common.advance(window)
        self.theirs = {key: self.truths[key].advance(window) for key in dict.fromkeys(self.judged) if key}
        for key, theirs in self.theirs.items():
            if key not in self.forked and difference(theirs, self.values) > (SIMILAR if self.again else 0.0):
                self.forked[key] = self.common.fork(self.cases[key], self.truths[key].truth)

    def around(self) -> list[Expectation]:
        """Return what that step yields, and how far correct training may lie from it, for each backend by its deviations."""
        found = {"": self.common.around(self.values, self.window, last=self.again)}
        for key, theirs in self.theirs.items():
            found[key] = (
                self.forked[key].around(theirs, self.window, last=self.again)
                if key in self.forked
                else self.like(found[""], self.cases[key], theirs)
            )
        self.own = {} if self.again else self.forked
        return [found[key] for key in self.judged]

    def like(self, common: Expectation, case: JudgedTraining, values: dict[str, Array]) -> Expectation:
        """Return an expectation with the sigmas of one that hardly differs."""
        return expectation(
            case,
            values,
            {
                name: np.maximum(sigma, least_sigma(values[name], case.dtype))
                for name, sigma in common.sigmas.items()
            },
        )

    def whole(
        self, state: Mapping[str, Array], steps: int, window: Sequence[Batch], deviations: Deviations
    ) -> Expectation:
        """Return what a step from a state yields, with tolerances that more than a first look is taken for."""
        key = key_of(deviations)
        if key not in self.full:
            envelope = Envelope(self.cases.get(key, self.case), again=True)
            envelope.load(state, steps)
            self.full[key] = envelope.step(window, last=True)
        return self.full[key]


def key_of(deviations: Deviations) -> str:
    """Return a text that says which deviations these are; none: no text."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(deviations.items()))


_derived = Cache()


def of_training(case: JudgedTraining) -> Expectation:
    """Return what correct training reports, step by step, from the first weights on: rounding is carried through the steps."""
    found: Expectation = _derived.get(case.key, lambda: _of_training(case))
    return found


def _of_training(case: JudgedTraining) -> Expectation:
    envelope, values, sigmas = Envelope(case), dict[str, Array](), dict[str, Array]()
    for step, window in enumerate(case.training.windows):
        expected = envelope.step(window, last=step == len(case.training.windows) - 1)
        reported = [name for name in expected.values if case.training.reports(step, name.split(".", 2)[2])]
        values |= {name: expected.values[name] for name in reported}
        sigmas |= {name: expected.sigmas[name] for name in reported}
    return expectation(case, values, sigmas)
