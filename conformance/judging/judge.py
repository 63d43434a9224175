"""The judge of a run against a reference."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from concord.conformance.judging.breakdown import break_down
from concord.conformance.judging.estimate import Z, is_half
from concord.conformance.judging.exemptions import OUT_OF_RANGE, PADDING, UNUSED
from concord.conformance.judging.expectation import Expectation, is_gradient, is_tap_gradient, subject_of
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.protocol import Pin, Reference
from concord.conformance.judging.scoring import finite_alone, judge_tensor, mostly, scores_of
from concord.conformance.judging.verdict import Judgement, Row, Verdict
from concord.spec.arrays import Array, Ids
from concord.spec.precision import precision

MISSING = "missing: the backend returned no such tensor"

# Judgements by tensor.
Judgements = dict[str, Judgement]

# Note of a tensor that has more digits than its run.
WIDER = "holds values that the precision cannot represent: it was computed in a wider one"


# A first look does not decide beyond this share of a tolerance: correct runs reached 0.41 with eight samples.
NEAR = 0.5


class Judge:
    """Judge of every tensor, locally and end to end (SPEC PRT-2).

    Args:
        tensors: tensors of the run by the reference's names.
        whole: tensors of a separate run, which do not depend on these activations.

    Attributes:
        unused: activations found to be unused by the model.
    """

    def __init__(
        self, reference: Reference, tensors: Mapping[str, Array], whole: Collection[str] = ()
    ) -> None:
        self.reference, self.tensors, self.whole = reference, dict(tensors), frozenset(whole)
        for name, activation in reference.activations.items():
            array = tensors.get(name)
            if array is None or array.shape != activation.shape:
                continue
            excused = reference.excused(name)
            if np.any(excused):  # uncomputed padding may be NaN, which would spread to judged elements
                self.tensors[name] = np.where(excused & ~np.isfinite(array), array.dtype.type(0), array)
        self.unused: frozenset[str] = frozenset()
        self.broken = {name: why for name in reference.activations if (why := self.unjudgeable(name))}

    def explain(self, verdict: Verdict) -> Explanation | None:  # noqa: ARG002 - subclasses know
        """Why the run diverges, if known."""
        return None

    def table(self, local: bool = True) -> list[Row]:
        """Judge every tensor end to end, and perhaps locally."""
        steps = self.judge_steps() if local else {}
        ends = self.judge_whole(deciding=not local)
        self.broken |= {f"gradients.taps.{name}": ("not exposed", UNUSED) for name in self.unused}
        return [self.row(name, steps.get(name), ends.get(name)) for name in self.reference.activations]

    def row(self, name: str, step: Judgement | None, end: Judgement | None) -> Row:
        """Row of a tensor; a local judgement has priority."""
        activation = self.reference.activations[name]
        if name in self.broken:
            status, note = self.broken[name]
            step = end = None
        else:
            deciding = step or end
            assert deciding is not None
            status, note = deciding.status, deciding.note
        size = step.size if step else end.size if end else math.prod(activation.shape)
        return Row(name, activation.clause, status, step, end, note, size, activation.axes or ())

    def unjudgeable(self, name: str) -> tuple[str, str] | None:
        """Status and note of a tensor that cannot or need not be compared."""
        activation, actual = self.reference.activations[name], self.tensors.get(name)
        if actual is None:
            return ("not exposed", activation.absent) if activation.absent else ("diverges", MISSING)
        if actual.shape != activation.shape:
            return "diverges", f"has shape {actual.shape} but must be {activation.shape}"
        target = precision(activation.dtype)
        # float32 values in a float32 array need no check; half precisions are stored in float32.
        shortened = is_half(activation.dtype) or actual.dtype != target.storage
        if not activation.wider and shortened and not target.holds(actual):
            return "diverges", WIDER
        why = self.reference.contradiction(name)
        return ("diverges", why) if why else None

    # Local judgement, from the run's own tensors.

    def pin(self, name: str) -> Array | None:
        """The run's tensor that replaces the reference's, if any."""
        activation = self.reference.activations.get(name)
        if activation is None or not activation.pinned or subject_of(name) in self.unused:
            return None
        array = self.tensors.get(name)
        return None if array is None or array.shape != activation.shape else array

    @property
    def pinned(self) -> list[str]:
        """Names of the run's tensors from which others are computed."""
        return [name for name in self.reference.activations if self.pin(name) is not None]

    def judge_steps(self) -> Judgements:
        """Judge each step locally."""
        judgements, _ = self.judge_from(self.pin)
        # A zero gradient that diverges may be correct. Some modules return an activation that the model does
        # not use, and autograd returns zeros or None for it.
        zero = [
            subject_of(name) for name in self.pinned if is_tap_gradient(name) and not self.tensors[name].any()
        ]
        if any(
            (judgement := judgements.get(f"gradients.taps.{tap}")) and judgement.status == "diverges"
            for tap in zero
        ):
            self.unused = self.passed_by(frozenset(zero))
        return self.judge_from(self.pin)[0] if self.unused else judgements

    def passed_by(self, zero: frozenset[str]) -> frozenset[str]:
        """Unused activations, with a zero gradient."""

        def passing(name: str) -> Array | None:
            return None if subject_of(name) in zero else self.pin(name)

        judgements, expected = self.judge_from(passing)

        def is_passed_by(tap: str) -> bool:
            tap_gradient = f"gradients.taps.{tap}"
            stopped = self.reference.compute_exactly(
                lambda name: self.pin(name) if name == tap_gradient else passing(name)
            )
            alternative = replace(expected, values={**expected.values, **stopped})
            behind = [
                name
                for name in judgements
                if is_gradient(name)
                and not np.array_equal(stopped[name], expected.values[name], equal_nan=True)
            ]
            # Either the model bypasses the tap, or its gradient is wrongly cut off. If it is bypassed,
            # gradients behind it agree without the zero and diverge with it.
            return not behind or any(
                judgements[name].status == "agrees"
                and self.judgement(name, alternative, True).status == "diverges"
                for name in behind
            )

        return frozenset(filter(is_passed_by, zero))

    def judge_from(self, pin: Pin) -> tuple[Judgements, Expectation]:
        """Judge locally, given some tensors of the run."""
        names = [
            name
            for name in self.judged
            if name not in self.whole and (not is_tap_gradient(name) or pin(name) is not None)
        ]
        return self.look(pin, names)

    @property
    def judged(self) -> list[str]:
        """Names of the comparable tensors."""
        return [name for name in self.reference.activations if name not in self.broken]

    def judge_whole(self, deciding: bool = False) -> Judgements:
        """Judge end to end."""
        names = [name for name in self.judged if not is_tap_gradient(name)]
        return self.look(None, names, deciding)[0]

    def look(
        self, pin: Pin | None, names: Collection[str], deciding: bool = True
    ) -> tuple[Judgements, Expectation]:
        """Judge with the first estimate that is decisive, and also return that expectation."""
        judgements: Judgements = {}
        expected = Expectation("", {}, {})  # for tensors judged only locally
        for expected in self.reference.expect(pin):
            judged = [name for name in names if name in expected.sigmas]
            sound = pin is None or self.sound(pin, expected)
            judgements = {
                name: self.judgement(name, expected, pin is not None, sound, deciding) for name in judged
            }
            # A few samples do not reveal what rounding determines.
            unsure = expected.few and (
                expected.undecided_rows
                or any(judgement.status == "undetermined" for judgement in judgements.values())
            )
            if not unsure and all(judgement.ratio <= NEAR for judgement in judgements.values()):
                break
        return judgements, expected

    def sound(self, pin: Pin, expected: Expectation) -> bool:
        """Whether the run's forward pass is finite where it should be."""
        return all(
            np.isfinite(array).all() or not np.isfinite(expected.values[name]).all()
            for name in expected.values
            if not is_gradient(name) and (array := pin(name)) is not None
        )

    def judgement(
        self, name: str, expected: Expectation, local: bool, sound: bool = True, deciding: bool = True
    ) -> Judgement:
        """Judge one tensor, locally or end to end.

        Args:
            deciding: whether to break down a divergence's error.
        """
        activation, actual = self.reference.activations[name], self.tensors[name]
        value = expected.values[name]
        if why := expected.silent(name, local, sound):
            return Judgement("undetermined", size=value.size, note=why)
        value, sigma, why = self.settle(name, expected, actual, local)
        excused = self.reference.excused(name)
        if np.any(excused):
            sigma, why = np.where(excused, np.nan, sigma), PADDING
        rows = self.rows_in_use(name)
        if rows is not None:
            actual = actual[rows]
        elif activation.rows is not None:
            value, sigma = expected.whole(name, actual.shape)
        if name in expected.singular:
            sigma = finite_alone(sigma, value, actual)
        elif not sound:
            sigma = finite_alone(sigma, value)
        independent = expected.independent.get(name, np.inf)
        judgement = judge_tensor(actual, value, sigma, activation.dtype, why, independent)
        if judgement.status == "agrees" and judgement.note:  # some elements are not judged
            unjudged = np.isnan(sigma) & np.logical_not(excused)
            if mostly(unjudged, value, activation.dtype):  # then almost any value agrees
                return Judgement("undetermined", size=value.size, note=judgement.note)
        if judgement.status == "agrees" and expected.coherent:
            judgement = expected.coherent.judge(name, actual - value, sigma, judgement)
        if deciding and judgement.status == "diverges" and activation.axes is not None:
            axes = activation.axes if rows is None else (f"{activation.axes[0]} in use", *activation.axes[1:])
            scores = scores_of(actual, value, sigma)
            judgement = replace(judgement, breakdown=break_down(actual, value, sigma, scores, axes, rows))
        if rows is None or not judgement.element:
            return judgement
        return replace(judgement, element=(int(rows[judgement.element[0]]), *judgement.element[1:]))

    def rows_in_use(self, name: str) -> Ids | None:
        """Compared rows of a table's gradient, or None for all."""
        activation = self.reference.activations[name]
        if activation.rows is None:
            return None
        unused_rows = np.delete(self.tensors[name], activation.rows, axis=0)
        zero = abs(unused_rows) <= Z * precision(activation.dtype).smallest_normal
        return activation.rows if zero.all() else None  # a row that must be zero is also compared

    def settle(
        self, name: str, expected: Expectation, actual: Array, local: bool
    ) -> tuple[Array, Array, str]:
        """Value, sigma, and the reason for NaN in sigma."""
        if name in expected.ties:
            return *expected.ties[name].settle(actual), expected.ties[name].why
        return expected.values[name], expected.determined(name, local), OUT_OF_RANGE
