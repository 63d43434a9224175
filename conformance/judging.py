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
from concord.conformance.breakdown import axes_of, break_down
from concord.conformance.diagnosis import Diagnosis, diagnose
from concord.conformance.estimate import Z
from concord.conformance.expectation import (
    Expectation,
    Forced,
    JudgedProblem,
    is_gradient,
    is_tap_gradient,
    root_mean_square,
)
from concord.conformance.padding import blind_samples, uncomputed
from concord.conformance.scoring import OUT_OF_RANGE, judge_tensor, scores_of
from concord.conformance.verdict import DECLARED, NOT_DELIVERED, UNUSED, Judgement, Row, Verdict
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
from concord.spec.tensors import clause_of, from_output_on, output_name

Array = NDArray[np.floating]

WIDER = "holds numbers that the precision has not: it was computed in a wider one"
"""Note of a tensor that has more digits than its run."""

PADDING = "rows of padding, which the run declares not to compute"
"""Why elements are not judged where a run declares that."""

NEAR = 0.5
"""Share of a tolerance from which on it is derived again: from the run's own taps, with all samples."""

ZERO = 2.0**-24
"""Share of sigma up to which a gradient is zero but for the oracle's own rounding; then rounding is all that there is to judge."""

Derivation = Callable[[Mapping[str, Array]], dict[str, Array]]

Published = Callable[[Deviations], Expectation]
"""Gives what was published, for a backend that declares deviations."""


def judge(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    run: Run,
    part: str = "model",
    expectation: Published | None = None,
    derive: Derivation | None = None,
    dtype: str | None = None,
    end_to_end: bool = True,
) -> Verdict:
    """Judge a run against the oracle: every tensor that it delivers, each step by itself and from the inputs (SPEC PRT-2).

    Args:
        config: the member of the family that the run was asked to compute.
        weights: its weights, by canonical name, before they were rounded to the precision of the run (SPEC WGT-1, PRC-2).
        batch: its inputs (SPEC INP-1).
        part: one of :data:`concord.spec.tensors.PARTS`.
        run: what a backend returned, or a :class:`concord.backends.interface.Run` made of tensors from anywhere. A tap that
            it lacks is not judged, and :attr:`Verdict.unchecked` says so; if ``run.info`` declares ``undelivered_taps``, any other
            that it lacks diverges. Gradients come all or none. ``run.info`` may declare ``deviations`` too
            (:mod:`concord.spec.deviations`, SPEC PRC-4).
        expectation: gives tensors to compare with in place of the reference's, end to end.
        derive: how the tensors of the run become those that are expected, where they are not the same.
        dtype: the precision or mode to judge by; by default the run's.
        end_to_end: whether to judge end to end too where that does not decide: forward alone for a large model; else it takes as long as all the rest.

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
            derive,
            {name for name, value in declaring.items() if value and name not in followed},
        )
        return judging.verdict(expectation, expectation is None and bool(run.taps), end_to_end)

    found = verdict(deviations)
    if found.status != "diverges":
        return found

    def would_agree(name: str) -> bool:
        """Return whether the run would agree if it declared a deviation; tried only where its worst elements lie where that shows."""
        return (
            name not in deviations
            and _shows(case, name, found)
            and verdict({**deviations, name: 1.0}).status != "diverges"
        )

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
    shape = [
        max(sizes)
        for sizes in zip(
            np.shape(where), *(np.add(one.index, 1) for one in first.deciding.breakdown.worst), strict=True
        )
    ]
    return bool(all(np.broadcast_to(where, shape)[one.index] for one in first.deciding.breakdown.worst))


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
        excuses: what the run declares that the judge leaves out (:attr:`concord.spec.deviations.KnownDeviation.excuses`).
    """

    def __init__(
        self, case: JudgedProblem, run: Run, derive: Derivation | None, excuses: Set[str] = frozenset()
    ) -> None:
        self.case, self.run, self.excuses = case, run, excuses
        self.output = output_name(case.config, case.part)
        self.delivered = delivered(run, self.output)
        for name, array in self.delivered.items():
            if array.ndim and np.any(
                excused := self.excused(name, array.ndim)
            ):  # what is not finite would spread to what is judged
                self.delivered[name] = np.where(excused & ~np.isfinite(array), array.dtype.type(0), array)
        if derive:
            self.delivered = derive(self.delivered)
        self.declared = run.info.get("undelivered_taps")
        self.unused: frozenset[str] = frozenset()  # taps that the model turned out not to go on with

    def verdict(self, expectation: Published | None, local: bool, end_to_end: bool) -> Verdict:
        """Judge every requested tensor, in one way or both."""
        expected = (
            expectation(self.case.deviations) if expectation else self.from_the_inputs(local, end_to_end)
        )
        shapes = {name: self.shape(name, expected) for name in expected.shapes or expected.values}
        wanted = {
            name: expected.clauses[name]
            for name in shapes
            if self.requested(name) and (local or name in expected.values)
        }
        faults = {name: self.fault(name, clause, shapes[name]) for name, clause in wanted.items()}
        sound = [name for name in wanted if faults[name] is None]
        from_inputs = _EndToEnd(self, expected, deciding=not local).judgements(
            [name for name in sound if name in expected.sigmas]
        )
        del expected  # the other way takes as much memory
        by_step = self.local(sound, shapes) if local else {}
        self.case.forget()
        for name in (f"gradients.taps.{tap}" for tap in self.unused):
            faults[name] = Row(
                name,
                wanted[name],
                "undelivered",
                note=UNUSED,
                size=math.prod(shapes[name]),
                axes=axes_of(self.case, name, len(shapes[name])),
            )
        table = [
            faults[name]
            or self.row(name, clause, by_step.get(name), from_inputs.get(name), len(shapes[name]))
            for name, clause in wanted.items()
        ]
        table += [
            Row(name, clause_of(self.case.config, name, self.case.part), "undelivered", note=NOT_DELIVERED)
            for name in self.without_gradients()
        ]
        verdict = Verdict(table, case=self.case if local else None)
        first = verdict.first_divergence
        if first is None or expectation is not None or (first.local if local else first.end_to_end) is None:
            return verdict
        statuses = {row.tensor: row.status for row in table}
        forced = {name: tap.astype(np.float64) for name, tap in self.forced(shapes).taps.items()}
        return Verdict(
            table,
            case=self.case,
            search=lambda: (
                diagnose(self.case, forced, first.tensor, self.delivered, judge_tensor, statuses),
                "",
            ),
        )

    def from_the_inputs(self, local: bool, wanted: bool) -> Expectation:
        """Return what is expected from the inputs: where each step is judged, of a large model no gradients, and nothing at all unless it is wanted."""
        if not local or (wanted and not tolerance.is_large(self.case)):
            return tolerance.end_to_end(self.case)
        outline = tolerance.outline(self.case)
        if not wanted:
            return outline
        forward = tolerance.end_to_end(replace(self.case, gradients=False))
        return replace(outline, values=forward.values, sigmas=forward.sigmas)

    def shape(self, name: str, expectation: Expectation) -> tuple[int, ...]:
        """Return the whole shape of a tensor, of which an expectation may hold some rows alone."""
        if name in expectation.rows:
            return self.case.weights[name.removeprefix("gradients.")].shape
        return expectation.shapes[name] if name in expectation.shapes else expectation.values[name].shape

    def requested(self, name: str) -> bool:
        if is_tap_gradient(name):
            return name in self.delivered
        if is_gradient(name):
            return "gradients" in self.run.requested
        if name in self.run.steps or "steps" in self.run.requested:
            return True
        if name == "loss" and self.run.loss is None:  # without gradients nobody asked for it
            return "gradients" in self.run.requested
        return "taps" in self.run.requested or name in ("loss", self.output)

    def without_gradients(self) -> list[str]:
        """Return the gradients that were asked for, where the run delivers none at all."""
        if self.case.gradients or "gradients" not in self.run.requested:
            return []
        return [f"gradients.{name}" for name in trainable(self.case.config, self.case.part)]

    def fault(self, name: str, clause: str, shape: tuple[int, ...]) -> Row | None:
        """Return the row of a tensor whose values cannot be compared, or need not be."""
        actual = self.delivered.get(name)

        def fault(note: str, status: str = "diverges") -> Row:
            return Row(
                name,
                clause,
                status,
                note=note,
                size=math.prod(shape),
                axes=axes_of(self.case, name, len(shape)),
            )

        if actual is None:
            note = NOT_DELIVERED if self.declared is None else DECLARED
            return (
                fault(note, "undelivered")
                if self.may_lack(name)
                else fault("missing: the backend returned no such tensor")
            )
        if actual.shape != shape:
            return fault(f"has shape {actual.shape} but must be {shape}")
        target = precision(self.case.dtype)
        if (
            name not in self.may_be_wider
            and (self.half or actual.dtype != target.storage)
            and not target.holds(actual)
        ):
            return fault(WIDER)
        result = self.run.results(self.output).get(name)
        tap = self.run.taps.get(name)
        if (
            result is not None
            and tap is not None
            and not np.array_equal(target.round(result), target.round(tap), equal_nan=True)
        ):
            return fault(
                f"the run's {'output' if name == self.output else 'loss'} is not its tap of this name"
            )
        return None

    @functools.cached_property
    def may_be_wider(self) -> frozenset[str]:
        """The tensors that may have more digits than the run: output and loss, where other activations show its precision, or the run declares it."""
        results = frozenset(from_output_on(self.case.config, self.case.part))
        return results if WIDER_OUTPUT in self.excuses or self.run.taps.keys() - results else frozenset()

    def may_lack(self, name: str) -> bool:
        """Return whether a tensor may be missing: a tap that was declared away, or any if the backend does not say which it has not."""
        if (
            is_gradient(name)
            or name == self.output
            or "steps" in self.run.requested
            or (name == "loss" and "gradients" in self.run.requested)
        ):
            return False
        return self.declared is None or (
            name != "loss" and any(fnmatch.fnmatch(name, pattern) for pattern in self.declared)
        )

    def row(
        self, name: str, clause: str, local: Judgement | None, end_to_end: Judgement | None, rank: int
    ) -> Row:
        deciding = local or end_to_end
        assert deciding is not None
        return Row(
            name,
            clause,
            deciding.status,
            local,
            end_to_end,
            deciding.note,
            deciding.size,
            axes_of(self.case, name, rank),
        )

    @functools.cached_property
    def half(self) -> bool:
        """Whether the run is in a precision that sums in a wider one."""
        target = precision(self.case.dtype)
        return target.unit_roundoff > target.accumulation

    def forced(self, shapes: Mapping[str, tuple[int, ...]]) -> Forced:
        """Return the run's tensors that others can be recomputed from: the model goes on with them."""
        sound = {
            name: array
            for name, array in self.delivered.items()
            if array is not None and shapes.get(name) == array.shape
        }
        taps = {name: array for name, array in sound.items() if name in self.run.taps and name != "loss"}
        gradients = {
            name.removeprefix("gradients.taps."): array
            for name, array in sound.items()
            if is_tap_gradient(name)
        }
        return Forced(taps, gradients).without(self.unused)

    def local(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Judgement]:
        """Judge each step by itself; what the model does not go on with has no gradient to be judged."""
        forced = self.forced(shapes)
        found, _ = self.by_step(names, forced)
        zero = frozenset(tap for tap, gradient in forced.gradients.items() if not gradient.any())
        if all(
            found[name].status != "diverges"
            for name in (f"gradients.taps.{tap}" for tap in zero)
            if name in found
        ):
            return found
        self.unused = self.passed_by(names, forced, zero)
        return self.by_step(names, forced.without(self.unused))[0] if self.unused else found

    def passed_by(self, names: Sequence[str], forced: Forced, zero: frozenset[str]) -> frozenset[str]:
        """Return the taps that the model does not go on with: a gradient that would flow through them alone is right all the same, or there is none.

        Args:
            zero: taps whose gradient is zero. One that is cut off leaves none to what lies before it.
        """
        passing = forced.without(zero)
        found, expectation = self.by_step(names, passing)
        gradients = [name for name in found if is_gradient(name)]

        def is_passed_by(tap: str) -> bool:
            stopped = tolerance.plain(
                self.case, Forced(passing.taps, {**passing.gradients, tap: forced.gradients[tap]})
            ).values
            other = replace(expectation, values={**expectation.values, **stopped})
            behind = [
                name
                for name in gradients
                if not np.array_equal(stopped[name], expectation.values[name], equal_nan=True)
            ]
            return not behind or any(
                found[name].status == "agrees"
                and self.locally_at(name, other, sound=True).status == "diverges"
                for name in behind
            )

        return frozenset(filter(is_passed_by, zero))

    def by_step(self, names: Sequence[str], forced: Forced) -> tuple[dict[str, Judgement], Expectation]:
        """Judge each step by itself, from these tensors of the run; return by what, too."""
        skipped = {
            name
            for name in names
            if is_tap_gradient(name) and name.removeprefix("gradients.taps.") not in forced.gradients
        }
        names = [name for name in names if name not in skipped]
        sound = all(np.isfinite(tap).all() for tap in forced.taps.values())
        if not self.half:
            large = tolerance.is_large(self.case)
            first = (
                tolerance.local_exactly(self.case, forced, brief=True)
                if large
                else tolerance.local(self.case, forced)
            )
            found = self.locally(names, first, sound)
            # Few samples do not say what rounding decides.
            sure = not large or not (
                first.undecided_rows
                or any(judgement.status == "undetermined" for judgement in found.values())
            )
            if sure and all(judgement.ratio <= NEAR for judgement in found.values()):
                return found, first
            del first  # the next takes as much memory
        exactly = tolerance.local_exactly(self.case, forced)
        return self.locally(names, exactly, sound), exactly

    def locally(self, names: Sequence[str], expectation: Expectation, sound: bool) -> dict[str, Judgement]:
        return {name: self.locally_at(name, expectation, sound) for name in names}

    def locally_at(self, name: str, expectation: Expectation, sound: bool) -> Judgement:
        value, gradient = expectation.values[name], is_gradient(name)
        if gradient and not sound:
            return Judgement("undetermined", size=value.size, note="the forward pass is not finite")
        if name in expectation.unsettled and not expectation.settled(name).any():
            return Judgement(
                "undetermined", size=value.size, note="rounding decides a layer norm that it flows through"
            )
        if gradient and self.half and _is_noise(value, expectation.sigmas[name]):
            return Judgement("undetermined", size=value.size, note="rounding leaves no digit of it")
        sigma = expectation.sigmas[name]
        if name in expectation.unsettled:
            sigma = np.where(expectation.settled(name), sigma, np.nan)
        lenient = name in expectation.singular
        return self.judged(name, expectation, sigma, sound and not lenient, lenient)

    def excused(self, name: str, rank: int) -> NDArray[np.bool_] | bool:
        """Return which elements of a tensor are not judged, since the run declares that it does not compute them."""
        if UNCOMPUTED_PADDING not in self.excuses:
            return False
        return uncomputed(
            self.case.config, self.case.batch, self.case.part, name, axes_of(self.case, name, rank)
        )

    def judged(
        self,
        name: str,
        expectation: Expectation,
        sigma: Array,
        strict: bool,
        lenient: bool,
        deciding: bool = True,
    ) -> Judgement:
        """Judge one tensor; of a table's gradient the rows that are used, if the others are zero.

        Args:
            deciding: whether it is to be said where in the tensor the error lies, if it diverges.
        """
        actual, value = self.delivered[name], expectation.values[name]
        if name in expectation.undecided_rows:
            sigma = np.where(expectation.undecided_rows[name], np.nan, sigma)
        excused, why = self.excused(name, value.ndim), OUT_OF_RANGE
        if np.any(excused):
            sigma, why = np.where(excused, np.nan, sigma), PADDING
        rows = expectation.rows.get(name)
        if rows is not None:
            others = np.ones(len(actual), bool)
            others[rows] = False
            if (abs(actual[others]) > Z * precision(self.case.dtype).smallest_normal).any() or np.isnan(
                actual[others]
            ).any():
                rows, (value, sigma) = None, expectation.whole(name, actual.shape)
            else:
                actual = actual[rows]
        found = judge_tensor(actual, value, sigma, self.case.dtype, strict, lenient, why)
        if deciding and found.status == "diverges":
            axes = axes_of(self.case, name, value.ndim)
            axes = axes if rows is None else (f"{axes[0]} in use", *axes[1:])
            found = replace(
                found,
                breakdown=break_down(
                    actual, value, sigma, scores_of(actual, value, sigma, strict, lenient), axes, rows
                ),
            )
        return (
            replace(found, element=(int(rows[found.element[0]]), *found.element[1:]))
            if rows is not None and found.element
            else found
        )


class _EndToEnd:
    """The judgement of one run end to end."""

    def __init__(self, judging: _Judging, expectation: Expectation, deciding: bool) -> None:
        self.judging, self.expectation, self.deciding = judging, expectation, deciding

    def judgements(self, names: Sequence[str]) -> dict[str, Judgement]:
        """Judge tensors; gradients by taps are judged locally alone."""
        return {name: self.judged(name) for name in names if not is_tap_gradient(name)}

    def judged(self, name: str) -> Judgement:
        size = self.expectation.values[name].size
        if is_gradient(name) and self.expectation.overflowing:
            return Judgement("undetermined", size=size, note="the forward pass is out of range")
        if name in self.expectation.undecided:
            return Judgement("undetermined", size=size, note="rounding may have grown beyond a tenth of it")
        lenient = name in self.expectation.singular
        return self.judging.judged(
            name, self.expectation, self.expectation.sigmas[name], not lenient, lenient, self.deciding
        )


def _is_noise(value: Array, sigma: Array) -> bool:
    """Return whether rounding is larger than a gradient that is not zero in exact arithmetic.

    In few bits a softmax of large scores has but one weight, and what flows back through it is a difference of equal
    numbers: rounding, times weights that are large. Few samples say little of how far that may go.
    """
    size, noise = root_mean_square(value), root_mean_square(sigma)
    return noise * ZERO < size < noise
