"""The judge of the family: a run of one of its members before the oracle (SPEC PRT-2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from concord.backends.interface import Run
from concord.backends.wire import misfits
from concord.conformance.explain.family_explanation import explain
from concord.conformance.judging.expectation import Expectation, JudgedProblem
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.family import SUM, FamilyReference
from concord.conformance.judging.judge import WIDER, Judge
from concord.conformance.judging.padding import blind_samples, uncomputed
from concord.conformance.judging.protocol import PublishedReference
from concord.conformance.judging.verdict import Verdict
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
from concord.spec.parameters import Weights
from concord.spec.tensors import axis_sizes, from_output_on

Published = Callable[[Deviations], Expectation]
"""Gives what was published, for a backend that declares deviations."""


class Misfit(SpecError):
    """What a run holds cannot be what was asked for; nothing can be judged."""


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
        expectation: gives tensors to compare with in place of the oracle's, end to end; one may be the sum
            of several, by all their names (:data:`SUM`).
        dtype: the precision or mode to judge by; by default the run's.
        end_to_end: whether to judge end to end too where that does not decide; of a large model only the
            forward pass is, since all of it takes as long as the rest.

    Raises:
        SpecError: for a deviation that cannot be understood.
        Misfit: for tensors that nobody knows, or of wrong shapes or types.
    """
    dtype = dtype or run.dtype
    deviations = in_precision(declared(run.info.get("deviations", [])), dtype)
    if expectation and (run.steps or "steps" in run.requested):  # it alone says what is right of a step
        reference = PublishedReference(functools.partial(expectation, _followed(deviations)))
        return Verdict(Judge(reference, run.steps).table(local=False))
    if wrong := misfits(run, config, batch, part):
        raise Misfit(wrong)
    gradients = "gradients" in run.requested and (expectation is not None or bool(run.gradients))
    unrounded = tuple(run.info.get("unrounded_taps", ()))
    case = JudgedProblem(config, weights, batch, part, dtype, deviations, gradients, unrounded)
    return FamilyJudge(case, run, expectation, end_to_end).verdict()


class FamilyJudge(Judge):
    """A run of a member of the family before the oracle, or before published tensors.

    Args:
        case: what was asked of the run, with all deviations that it declares.
        run, expectation, end_to_end: as :func:`judge` takes them.
    """

    reference: FamilyReference

    def __init__(
        self, case: JudgedProblem, run: Run, expectation: Published | None = None, end_to_end: bool = True
    ) -> None:
        self.case, self.run, self.expectation, self.end_to_end = case, run, expectation, end_to_end
        kept = _followed(case.deviations)
        excuses = frozenset(name for name, value in case.deviations.items() if value and name not in kept)
        published = expectation(kept) if expectation else None
        reference = FamilyReference(replace(case, deviations=kept), run, excuses, published, end_to_end)
        tensors = delivered(run, reference.output)
        for name in reference.activations:
            if SUM in name and tensors.keys() >= {*(parts := name.split(SUM))}:
                tensors[name] = np.add.reduce([tensors[part] for part in parts])
        super().__init__(reference, tensors)

    def verdict(self) -> Verdict:
        """Judge every tensor."""
        reference = self.reference
        table = self.table(local=reference.local)
        reference.case.forget()
        found = Verdict(table, outputs=(reference.output, "loss"))
        wrong = found.status == "diverges"
        case = reference.case if reference.local or (wrong and self.is_explicable(found)) else None
        return replace(found, case=case, judge=self if wrong else None)

    def is_explicable(self, verdict: Verdict) -> bool:
        """Return whether the oracle computed what the first divergence was judged by."""
        first, reference = verdict.first_divergence, self.reference
        return bool(
            first and first.deciding and not reference.published and (first.local or not reference.local)
        )

    def explain(self, verdict: Verdict) -> Explanation | None:
        """Say why the run diverges, and which deviation it would have to declare."""
        first, reference = verdict.first_divergence, self.reference
        assert first is not None
        known = Explanation(first.tensor, (first.clause,))
        if self.is_explicable(verdict):
            pinned = reference.pinned(self.pin).taps
            taps = {name: tap.astype(np.float64) for name, tap in pinned.items()}
            statuses = {row.tensor: row.status for row in verdict.table}
            known = explain(reference.case, taps, first.tensor, self.tensors, statuses)
        names = (name for name, deviation in KNOWN_DEVIATIONS.items() if deviation.alone)
        undeclared = next((name for name in names if self.would_agree(name, verdict)), "")
        return replace(known, undeclared=undeclared)

    def would_agree(self, deviation: str, verdict: Verdict) -> bool:
        """Return whether the run would agree, where it is still judged, if it declared a deviation.

        Tried only where its worst elements lie where that shows.
        """
        if deviation in self.case.deviations or not _shows(self.case, deviation, verdict):
            return False
        case = replace(self.case, deviations={**self.case.deviations, deviation: 1.0})
        declaring = FamilyJudge(case, self.run, self.expectation, self.end_to_end).verdict()
        return declaring.status != "diverges" and any(row.status == "agrees" for row in declaring.table)


def _followed(deviations: Deviations) -> Deviations:
    """Return the deviations that the oracle follows; what the others name is left out by the judge."""
    return {name: value for name, value in deviations.items() if not KNOWN_DEVIATIONS[name].excuses}


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
