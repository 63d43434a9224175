"""The judge of the family (SPEC PRT-2).

It is here, not in ``judging``, because a diverging verdict keeps it to search for the cause.
"""

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
    in_precision,
    parse_deviations,
)
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights
from concord.spec.tensors import axis_sizes, from_output_on

# A function that returns the published tensors for a backend with declared deviations.
Published = Callable[[Deviations], Expectation]


class Misfit(SpecError):
    """A run's tensors do not fit the request."""


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
    """Judge every tensor of a run, locally and end to end (SPEC PRT-2).

    Args:
        weights: unrounded weights by canonical name (SPEC WGT-1, PRC-2).
        run: tensors of any origin. Missing taps are in :attr:`Verdict.unchecked`; if ``run.info`` declares
            ``not_exposed``, others diverge. Give all gradients or none. ``run.info`` may declare
            ``deviations`` (SPEC PRC-4).
        part: one of :data:`concord.spec.tensors.PARTS`.
        expectation: returns end-to-end replacements of the reference's tensors; :data:`SUM` joins names.
        dtype: precision or mode to judge by; by default that of the run.
        end_to_end: judge end to end even if local judgement decides (for large models, only the forward
            pass).

    Raises:
        SpecError: for an invalid deviation.
        Misfit: for unknown tensors, wrong shapes or wrong types.
    """
    dtype = dtype or run.dtype
    deviations = in_precision(parse_deviations(run.info.get("deviations", [])), dtype)
    if expectation and (run.steps or "steps" in run.requested):  # training steps have no other reference
        reference = PublishedReference(functools.partial(expectation, _followed(deviations)))
        return Verdict(Judge(reference, run.steps).table(local=False))
    if problems := misfits(run, config, batch, part):
        raise Misfit(problems)
    gradients = "gradients" in run.requested and (expectation is not None or bool(run.gradients))
    case = JudgedProblem(config, weights, batch, part, dtype, deviations, gradients)
    return FamilyJudge(case, run, expectation, end_to_end).verdict()


class FamilyJudge(Judge):
    """The judge of one run (see :func:`judge`)."""

    reference: FamilyReference

    def __init__(
        self, case: JudgedProblem, run: Run, expectation: Published | None = None, end_to_end: bool = True
    ) -> None:
        self.case, self.run, self.expectation, self.end_to_end = case, run, expectation, end_to_end
        deviations = _followed(case.deviations)
        excuses = frozenset(
            name for name, value in case.deviations.items() if value and name not in deviations
        )
        published = expectation(deviations) if expectation else None
        reference = FamilyReference(replace(case, deviations=deviations), run, excuses, published, end_to_end)
        tensors = delivered(run, reference.output)
        for name in reference.activations:
            if SUM in name and tensors.keys() >= {*(parts := name.split(SUM))}:
                tensors[name] = np.add.reduce([tensors[part] for part in parts])
        super().__init__(reference, tensors)

    def verdict(self) -> Verdict:
        """Judge every tensor; a diverging verdict keeps the judge."""
        reference = self.reference
        table = self.table(local=reference.local)
        reference.case.forget()
        verdict = Verdict(table, outputs=(reference.output, "loss"))
        diverges = verdict.status == "diverges"
        case = reference.case if reference.local or (diverges and self.is_explicable(verdict)) else None
        return replace(verdict, case=case, judge=self if diverges else None)

    def is_explicable(self, verdict: Verdict) -> bool:
        divergence, reference = verdict.first_divergence, self.reference
        return bool(
            divergence
            and divergence.deciding
            and not reference.published
            and (divergence.local or not reference.local)
        )

    def explain(self, verdict: Verdict) -> Explanation | None:
        divergence, reference = verdict.first_divergence, self.reference
        assert divergence is not None
        explanation = Explanation(divergence.tensor, (divergence.clause,))
        if self.is_explicable(verdict):
            statuses = {row.tensor: row.status for row in verdict.table}
            taps, output = dict(reference.pinned(self.pin).taps), reference.output
            # A correct output refutes every cause before it, even in a run without activations.
            if statuses[output] == "agrees":
                taps[output] = self.tensors[output]
            taps = {name: tap.astype(np.float64) for name, tap in taps.items()}
            explanation = explain(reference.case, taps, divergence.tensor, self.tensors, statuses)
        names = (name for name, deviation in KNOWN_DEVIATIONS.items() if deviation.alone)
        undeclared = next((name for name in names if self.would_agree(name, verdict)), "")
        return replace(explanation, undeclared=undeclared)

    def would_agree(self, deviation: str, verdict: Verdict) -> bool:
        # Judge again only if the deviation affects the worst elements.
        if deviation in self.case.deviations or not _shows(self.case, deviation, verdict):
            return False
        case = replace(self.case, deviations={**self.case.deviations, deviation: 1.0})
        declaring = FamilyJudge(case, self.run, self.expectation, self.end_to_end).verdict()
        return declaring.status != "diverges" and any(row.status == "agrees" for row in declaring.table)


def _followed(deviations: Deviations) -> Deviations:
    return {name: value for name, value in deviations.items() if not KNOWN_DEVIATIONS[name].excuses}


def _shows(case: JudgedProblem, deviation: str, verdict: Verdict) -> bool:
    divergence = verdict.first_divergence
    assert divergence is not None
    if deviation == WIDER_OUTPUT:
        return divergence.note == WIDER and divergence.tensor in from_output_on(case.config, case.part)
    if (
        divergence.deciding is None
        or divergence.deciding.breakdown is None
        or divergence.axes[:1] != ("batch",)
    ):
        return False
    if deviation == UNCOMPUTED_PADDING:
        mask = uncomputed(case.config, case.batch, case.part, divergence.tensor, divergence.axes)
    else:
        mask = blind_samples(case.config, case.batch).reshape(-1, *[1] * (len(divergence.axes) - 1))
    # Nearly all elements of an uncomputed row are wrong; fewer indicate a different cause.
    sizes, wrong_rows = axis_sizes(case.config), 1
    for by_row in divergence.deciding.breakdown.maps[:1]:  # empty for a tensor with one row per sample
        if by_row.axes in (("batch", "tokens"), ("batch", "query")):
            wrong_rows = sum(level is not None and level >= 0 for row in by_row.levels for level in row)
    if (
        0
        < 2 * divergence.deciding.beyond
        < wrong_rows * math.prod(sizes.get(axis, 1) for axis in divergence.axes)
    ):
        return False
    # Broadcast: an axis of length 1 represents every index.
    return all(
        np.broadcast_to(mask, np.maximum(np.shape(mask), np.add(element.index, 1)))[element.index]
        for element in divergence.deciding.breakdown.worst
    )


def delivered(run: Run, output: str) -> dict[str, Array]:
    """Map a verdict's names to a run's tensors; ``output`` names the result."""
    by_taps = {f"taps.{name}": array for name, array in run.tap_gradients.items() if array is not None}
    gradients = {f"gradients.{name}": array for name, array in {**run.gradients, **by_taps}.items()}
    return {**run.results(output), **run.taps, **gradients, **run.steps}
