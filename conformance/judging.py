"""The judge of one run: every tensor against what is expected of it, in one way or both."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Run
from concord.backends.wire import misfits
from concord.conformance import tolerance
from concord.conformance.estimate import Z
from concord.conformance.expectation import (
    Expectation,
    JudgedProblem,
    Pinned,
    is_gradient,
    is_tap_gradient,
    subject_of,
)
from concord.conformance.explain import Diagnosis
from concord.conformance.explain.breakdown import axes_of, break_down
from concord.conformance.explain.diagnosis import diagnose
from concord.conformance.padding import blind_samples, uncomputed
from concord.conformance.scoring import OUT_OF_RANGE, finite_alone, judge_tensor, scores_of
from concord.conformance.verdict import DECLARED, NOT_EXPOSED, UNUSED, Judgement, Row, Verdict
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import (
    KNOWN_DEVIATIONS,
    UNCOMPUTED_PADDING,
    WIDER_OUTPUT,
    Deviations,
    declared,
    in_precision,
)
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights, trainable
from concord.spec.precision import precision
from concord.spec.tensors import axis_sizes, from_output_on, output_name

WIDER = "holds numbers that the precision has not: it was computed in a wider one"
"""Note of a tensor that has more digits than its run."""

PADDING = "rows of padding, which the run declares not to compute"
"""Why elements are not judged where a run declares that."""

NEAR = 0.5
"""Share of a tolerance from which on it is derived again: from the run's own taps, with all samples."""

SUM = " + "
"""Stands between the names of tensors of which a published one is the sum."""

Published = Callable[[Deviations], Expectation]
"""Gives what was published, for a backend that declares deviations."""


def judge(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    run: Run,
    part: str = "model",
    expectation: Published | None = None,
    dtype: str | None = None,
    end_to_end: bool = True,
) -> Verdict:
    """Judge a run against the oracle.

    Every tensor that it delivers, each step by itself and from the inputs (SPEC PRT-2).

    Args:
        config: the member of the family that the run was asked to compute.
        weights: its weights, by canonical name, before they were rounded to the precision of the run (SPEC
            WGT-1, PRC-2).
        batch: its inputs (SPEC INP-1).
        part: one of :data:`concord.spec.tensors.PARTS`.
        run: what a backend returned, or a :class:`concord.backends.interface.Run` made of tensors from
            anywhere. A tap that it lacks is not judged, and :attr:`Verdict.unchecked` says so; if
            ``run.info`` declares ``not_exposed``, any other that it lacks diverges. Gradients come all
            or none. ``run.info`` may declare ``deviations`` too (:mod:`concord.spec.deviations`, SPEC PRC-4).
        expectation: gives tensors to compare with in place of the reference's, end to end; one may be the sum
            of several, by all their names (:data:`SUM`).
        dtype: the precision or mode to judge by; by default the run's.
        end_to_end: whether to judge end to end too where that does not decide: forward alone for a large
            model; else it takes as long as all the rest.

    Raises:
        SpecError: for a deviation that cannot be understood.
        Misfit: for tensors that nobody knows, or of wrong shapes or types.
    """
    training = run.steps or "steps" in run.requested  # of a step the expectation says what is right
    wrong = [] if training else misfits(run, config, batch, part)
    if wrong:
        raise Misfit(wrong)
    dtype = dtype or run.dtype
    wanted = "gradients" in run.requested and (expectation is not None or bool(run.gradients))
    deviations = in_precision(declared(run.info.get("deviations", [])), dtype)
    case = JudgedProblem(
        config, weights, batch, part, dtype, deviations, wanted, tuple(run.info.get("unrounded_taps", ()))
    )

    def verdict(declaring: Deviations) -> Verdict:
        followed = {name: value for name, value in declaring.items() if not KNOWN_DEVIATIONS[name].excuses}
        judging = _Judging(
            replace(case, deviations=followed),
            run,
            {name for name, value in declaring.items() if value and name not in followed},
        )
        return judging.verdict(expectation, expectation is None and bool(run.taps), end_to_end)

    found = verdict(deviations)
    if found.status != "diverges":
        return found

    def would_agree(name: str) -> bool:
        """Return whether the run would agree, where it is still judged, if it declared a deviation.

        Tried only where its worst elements lie where that shows.
        """
        if name in deviations or not _shows(case, name, found):
            return False
        declaring = verdict({**deviations, name: 1.0})
        return declaring.status != "diverges" and any(row.status == "agrees" for row in declaring.table)

    def search() -> tuple[Diagnosis | None, str]:
        names = [name for name, known in KNOWN_DEVIATIONS.items() if known.alone]
        undeclared = next((name for name in names if would_agree(name)), "")
        return found.explained().diagnosis, undeclared

    return replace(found, search=search)


def _shows(case: JudgedProblem, deviation: str, verdict: Verdict) -> bool:
    """Return whether the worst elements of the first divergence lie where a deviation shows."""
    first = verdict.first_divergence
    assert first is not None
    if deviation == WIDER_OUTPUT:
        return first.note == WIDER and first.tensor in from_output_on(case.config, case.part)
    if first.deciding is None or first.deciding.breakdown is None or first.axes[:1] != ("batch",):
        return False
    if deviation == UNCOMPUTED_PADDING:
        where = uncomputed(case.config, case.batch, case.part, first.tensor, first.axes)
    else:
        where = blind_samples(case.config, case.batch).reshape(-1, *[1] * (len(first.axes) - 1))
    # Whoever does not compute a row leaves hardly anything right in it: a few elements have another reason.
    sizes, touched = axis_sizes(case.config), 1
    for by_row in first.deciding.breakdown.maps[:1]:  # a tensor of one row for each sample has no map
        if by_row.axes in (("batch", "tokens"), ("batch", "query")):
            touched = sum(level is not None and level >= 0 for row in by_row.levels for level in row)
    if 0 < 2 * first.deciding.beyond < touched * math.prod(sizes.get(axis, 1) for axis in first.axes):
        return False
    # An axis of length 1 holds for all places.
    return all(
        np.broadcast_to(where, np.maximum(np.shape(where), np.add(one.index, 1)))[one.index]
        for one in first.deciding.breakdown.worst
    )


def delivered(run: Run, output: str) -> dict[str, Array]:
    """Return every tensor of a run by the name that a verdict gives it.

    Args:
        output: the name of the part's result.
    """
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items() if array is not None}
    gradients = {f"gradients.{name}": array for name, array in {**run.gradients, **by_taps}.items()}
    return {**run.results(output), **run.taps, **gradients, **run.steps}


class Misfit(SpecError):
    """What a run holds cannot be what was asked for; nothing can be judged."""


class _Judging:
    """One run before its judge.

    Args:
        excuses: what the run declares that the judge leaves out
            (:attr:`concord.spec.deviations.KnownDeviation.excuses`).
    """

    def __init__(self, case: JudgedProblem, run: Run, excuses: Set[str] = frozenset()) -> None:
        self.case, self.run, self.excuses = case, run, excuses
        self.output, self.precision = output_name(case.config, case.part), precision(case.dtype)
        # Whether the precision sums in a wider one.
        self.half = self.precision.unit_roundoff > self.precision.accumulation
        self.delivered = delivered(run, self.output)
        for name, array in self.delivered.items():
            excused = self.excused(name, array.ndim) if array.ndim else False
            if np.any(excused):  # what is not finite would spread to what is judged
                self.delivered[name] = np.where(excused & ~np.isfinite(array), array.dtype.type(0), array)
        self.declared = run.info.get("not_exposed")
        self.stepping = "steps" in run.requested
        self.unused: frozenset[str] = frozenset()  # taps that the model turned out not to go on with

    def verdict(self, expectation: Published | None, local: bool, end_to_end: bool) -> Verdict:
        """Judge every requested tensor, in one way or both."""
        expected = expectation(self.case.deviations) if expectation else self.from_inputs(local, end_to_end)
        for name in expected.values:
            parts = name.split(SUM)
            if len(parts) > 1 and self.delivered.keys() >= {*parts}:
                self.delivered[name] = functools.reduce(np.add, [self.delivered[part] for part in parts])
        shapes = {name: self.shape(name, expected) for name in expected.shapes or expected.values}
        wanted = [name for name in shapes if self.requested(name) and (local or name in expected.values)]
        clauses = expected.clauses
        broken = {name: found for name in wanted if (found := self.unjudgeable(name, shapes[name]))}
        sound = [name for name in wanted if name not in broken]
        whole = {
            name: self.judged(name, expected, deciding=not local)
            for name in sound
            if name in expected.sigmas and not is_tap_gradient(name)
        }
        del expected  # the other way takes as much memory
        steps = self.local(sound, shapes) if local else {}
        self.case.forget()
        broken |= {f"gradients.taps.{name}": ("not exposed", UNUSED) for name in self.unused}
        table = []
        for name in wanted:
            step, end = (None, None) if name in broken else (steps.get(name), whole.get(name))
            deciding, shape = step or end, shapes[name]
            status, note = (deciding.status, deciding.note) if deciding else broken[name]
            size, axes = deciding.size if deciding else math.prod(shape), self.axes(name, len(shape))
            table.append(Row(name, clauses[name], status, step, end, note, size, axes))
        if "gradients" in self.run.requested and not self.case.gradients:  # the run delivers none at all
            names = (f"gradients.{name}" for name in trainable(self.case.config, self.case.part))
            table += [Row(name, self.case.clause(name), "not exposed", note=NOT_EXPOSED) for name in names]
        verdict = Verdict(table, outputs=(self.output, "loss"), case=self.case if local else None)
        first = verdict.first_divergence
        if first is None or expectation is not None or first.deciding is None or (local and not first.local):
            return verdict
        statuses = {row.tensor: row.status for row in table}
        taps = {name: tap.astype(np.float64) for name, tap in self.pinned(shapes).taps.items()}

        def search() -> tuple[Diagnosis | None, str]:
            return diagnose(self.case, taps, first.tensor, self.delivered, statuses), ""

        return replace(verdict, case=self.case, search=search)

    def from_inputs(self, local: bool, wanted: bool) -> Expectation:
        """Return what is expected from the inputs.

        Where each step is judged, of a large model no gradients.
        """
        if not local or (wanted and not tolerance.is_large(self.case)):
            return tolerance.end_to_end(self.case)
        outline = tolerance.outline(self.case)
        if not wanted:
            return outline
        forward = tolerance.end_to_end(replace(self.case, gradients=False))
        return replace(outline, values=forward.values, sigmas=forward.sigmas)

    def axes(self, name: str, rank: int) -> tuple[str, ...]:
        return axes_of(self.case, name, rank)

    def shape(self, name: str, expectation: Expectation) -> tuple[int, ...]:
        """Return the whole shape of a tensor, of which an expectation may hold some rows alone."""
        if name in expectation.rows:
            return self.case.weights[name.removeprefix("gradients.")].shape
        return expectation.shapes[name] if name in expectation.shapes else expectation.values[name].shape

    def requested(self, name: str) -> bool:
        if is_tap_gradient(name):
            return name in self.delivered
        if not is_gradient(name) and (self.stepping or name in self.run.steps):
            return True
        if is_gradient(name) or (name == "loss" and self.run.loss is None):
            return "gradients" in self.run.requested
        return "taps" in self.run.requested or name in ("loss", self.output)

    def unjudgeable(self, name: str, shape: tuple[int, ...]) -> tuple[str, str] | None:
        """Return status and note of a tensor whose values cannot be compared, or need not be."""
        actual = self.delivered.get(name)
        if actual is None:
            if self.may_lack(name):
                return "not exposed", NOT_EXPOSED if self.declared is None else DECLARED
            return "diverges", "missing: the backend returned no such tensor"
        if actual.shape != shape:
            return "diverges", f"has shape {actual.shape} but must be {shape}"
        shortened = self.half or actual.dtype != self.precision.storage
        if name not in self.may_be_wider and shortened and not self.precision.holds(actual):
            return "diverges", WIDER
        result, tap = self.run.results(self.output).get(name), self.run.taps.get(name)
        rounded = self.precision.round
        if result is not None and tap is not None:
            if np.array_equal(rounded(result), rounded(tap), equal_nan=True):
                return None
            kind = "output" if name == self.output else "loss"
            return "diverges", f"the run's {kind} is not its tap of this name"
        return None

    @functools.cached_property
    def may_be_wider(self) -> frozenset[str]:
        """Output and loss, which may have more digits if others show the run's precision, or it says so."""
        results = frozenset(from_output_on(self.case.config, self.case.part))
        return results if WIDER_OUTPUT in self.excuses or self.run.taps.keys() - results else frozenset()

    def may_lack(self, name: str) -> bool:
        """Return whether a tensor may be missing.

        A tap that was declared away, or any if none are declared.
        """
        needed = is_gradient(name) or name == self.output or self.stepping
        if needed or (name == "loss" and "gradients" in self.run.requested):
            return False
        return self.declared is None or (
            name != "loss" and any(fnmatch.fnmatch(name, pattern) for pattern in self.declared)
        )

    def pinned(self, shapes: Mapping[str, tuple[int, ...]]) -> Pinned:
        """Return the run's tensors that others can be recomputed from: the model goes on with them."""
        sound = {name: one for name, one in self.delivered.items() if shapes.get(name) == one.shape}
        taps = {name: array for name, array in sound.items() if name in self.run.taps and name != "loss"}
        gradients = {subject_of(name): array for name, array in sound.items() if is_tap_gradient(name)}
        return Pinned(taps, gradients).without(self.unused)

    def local(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Judgement]:
        """Judge each step by itself; what the model does not go on with has no gradient to be judged."""
        pinned = self.pinned(shapes)
        found, _ = self.by_step(names, pinned)
        zero = frozenset(tap for tap, gradient in pinned.gradients.items() if not gradient.any())
        if any((one := found.get(f"gradients.taps.{tap}")) and one.status == "diverges" for tap in zero):
            self.unused = self.passed_by(names, pinned, zero)
        return self.by_step(names, pinned.without(self.unused))[0] if self.unused else found

    def passed_by(self, names: Sequence[str], pinned: Pinned, zero: frozenset[str]) -> frozenset[str]:
        """Return the taps that the model does not go on with.

        A gradient that would flow through them alone is right all the same, or there is none.

        Args:
            zero: taps whose gradient is zero. One that is cut off leaves none to what lies before it.
        """
        passing = pinned.without(zero)
        found, expectation = self.by_step(names, passing)

        def is_passed_by(tap: str) -> bool:
            closed = Pinned(passing.taps, {**passing.gradients, tap: pinned.gradients[tap]})
            stopped = tolerance.plain(self.case, closed)
            other = replace(expectation, values={**expectation.values, **stopped})
            behind = [
                name
                for name in found
                if is_gradient(name)
                and not np.array_equal(stopped[name], expectation.values[name], equal_nan=True)
            ]
            return not behind or any(
                found[name].status == "agrees" and self.judged(name, other, local=True).status == "diverges"
                for name in behind
            )

        return frozenset(filter(is_passed_by, zero))

    def by_step(self, names: Sequence[str], pinned: Pinned) -> tuple[dict[str, Judgement], Expectation]:
        """Judge each step by itself, from these tensors of the run; return by what, too."""
        given = {f"gradients.taps.{tap}" for tap in pinned.gradients}
        names = [name for name in names if name in given or not is_tap_gradient(name)]
        sound = all(np.isfinite(tap).all() for tap in pinned.taps.values())

        def judged(expected: Expectation) -> dict[str, Judgement]:
            return {name: self.judged(name, expected, local=True, sound=sound) for name in names}

        if not self.half:
            large = tolerance.is_large(self.case)
            look = tolerance.local_exactly(self.case, pinned, brief=True) if large else None
            first = look or tolerance.local(self.case, pinned)
            found = judged(first)
            # Few samples do not say what rounding decides.
            unsure = large and (
                first.undecided_rows or any(one.status == "undetermined" for one in found.values())
            )
            if not unsure and all(one.ratio <= NEAR for one in found.values()):
                return found, first
            del first, look  # the next takes as much memory
        exactly = tolerance.local_exactly(self.case, pinned)
        return judged(exactly), exactly

    def excused(self, name: str, rank: int) -> NDArray[np.bool_] | bool:
        """Return which elements are not judged, since the run declares that it does not compute them."""
        if UNCOMPUTED_PADDING not in self.excuses:
            return False
        return uncomputed(self.case.config, self.case.batch, self.case.part, name, self.axes(name, rank))

    def judged(
        self,
        name: str,
        expected: Expectation,
        local: bool = False,
        sound: bool = True,
        deciding: bool = True,
    ) -> Judgement:
        """Judge one tensor in one way; of a table's gradient the rows that are used, if the others are zero.

        Args:
            sound: whether the forward pass is finite.
            deciding: whether it is to be said where in the tensor the error lies, if it diverges.
        """
        actual, value = self.delivered[name], expected.values[name]
        if why := expected.silent(name, local, sound):
            return Judgement("undetermined", size=value.size, note=why)
        sigma, excused, why = expected.determined(name, local), self.excused(name, value.ndim), OUT_OF_RANGE
        if np.any(excused):
            sigma, why = np.where(excused, np.nan, sigma), PADDING
        rows = expected.rows.get(name)
        if rows is not None:
            others = np.delete(actual, rows, axis=0)
            if (abs(others) > Z * self.precision.smallest_normal).any() or np.isnan(others).any():
                rows, (value, sigma) = None, expected.whole(name, actual.shape)
            else:
                actual = actual[rows]
        if name in expected.singular:
            sigma = finite_alone(sigma, value, actual)
        elif not sound:
            sigma = finite_alone(sigma, value)
        found = judge_tensor(actual, value, sigma, self.case.dtype, why)
        if deciding and found.status == "diverges":
            axes = self.axes(name, value.ndim)
            axes = axes if rows is None else (f"{axes[0]} in use", *axes[1:])
            scores = scores_of(actual, value, sigma)
            found = replace(found, breakdown=break_down(actual, value, sigma, scores, axes, rows))
        if rows is None or not found.element:
            return found
        return replace(found, element=(int(rows[found.element[0]]), *found.element[1:]))
