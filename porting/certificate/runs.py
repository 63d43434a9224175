"""What the target computes, judged by the oracle with the weights of the source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from concord.backends.interface import Run
from concord.conformance.campaign import Job
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.verdict import Result, Row, Verdict, verdict_lines
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    OUTPUTS,
    PROVEN,
    UNVERIFIED,
    Asked,
    Claim,
)
from concord.porting.certificate.inputs import LONG
from concord.porting.checkpoint import Checkpoint
from concord.spec.batch import Batch
from concord.spec.deviations import Deviations
from concord.spec.errors import WeightsError
from concord.spec.tensors import OF_IDS
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

SMALL = 2_000_000
"""Parameters up to which everything is judged on every input, and end to end too; of a larger model gradients
on the sentences alone, and the longest input in float32, each step by itself."""

MEDIUM = 40_000_000
"""Parameters up to which an optimizer step is judged in the last precision, every sample of whose rounding
moves all of them, and gradients in all precisions."""

RECIPE = Recipe(
    algorithm="adam",
    learning_rate=2.0**-10,
    epsilon=1e-8,
    weight_decay=0.01,
    decay_form="times_rate",
    clipping="global_norm",
    clip_at=1.0,
)
"""Of the optimizer step: AdamW, as models like these are mostly trained on."""

JUDGED = ("agrees", "diverges")
"""Statuses of tensors that were judged."""

STEP, GRADIENTS, ELSEWHERE = "optimizer step", "gradients", "gradients on other inputs"

FORWARD = (OUTPUTS, "taps")

KINDS = (*FORWARD, "loss", GRADIENTS, STEP)
"""The kinds of tensors about which something is claimed."""

HOME = "source's framework: "
"""What claims begin with that are about the source, run in its own framework."""

FORWARD_PASSES, BACKWARD_PASSES = 12, 32
"""Passes of the reference that the tolerances of a forward pass take, and those of gradients: measured."""


@dataclass(frozen=True, kw_only=True)
class Ported(Job):
    """A run of the target, which is judged as a run of the source."""

    source: Job

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        """Judge what the target computed against what the source should."""
        right = {name: getattr(self.source, name) for name in ("config", "weights", "part")}
        return Job.judge(replace(self, **right), run, rules)


def size_of(model: Job) -> int:
    """Return how many parameters a model has."""
    return sum(array.size for array in model.weights.values())


def unjudged(source: Job, inputs: Sequence[str], asked: Asked) -> Iterator[Claim]:
    """Yield what is not judged of the target, each with its precision if it is judged in another, and why."""
    size, count, dtypes = size_of(source), f"the model has {size_of(source):,} parameters", asked.dtypes
    if asked.quick:
        yield Claim(
            "all else",
            UNVERIFIED,
            "a quick certificate: it was run forward in one precision, on sentences alone; no gradients, no "
            "optimizer step, and not the source's framework",
        )
        return
    if source.part not in OF_IDS:
        yield Claim(STEP, NOT_APPLICABLE, f"the part {source.part} is not trained alone")
    elif size > MEDIUM:
        most = f"how far a step may lie from the oracle's is derived for at most {MEDIUM:,}"
        yield Claim(STEP, UNVERIFIED, f"{count}; {most}")
    elif size > SMALL:
        for dtype in dtypes[:-1]:
            yield Claim(STEP, UNVERIFIED, f"{count}; a step is judged in {dtypes[-1]} alone", dtype=dtype)
    for dtype in dtypes[:-1] if size > MEDIUM else ():
        yield Claim(
            GRADIENTS, UNVERIFIED, f"{count}; gradients are judged in {dtypes[-1]} alone", dtype=dtype
        )
    if size > SMALL:
        yield Claim(f"{HOME}{GRADIENTS}", UNVERIFIED, f"{count}; gradients are judged in the target alone")
    first, *others = inputs
    if size > SMALL and LONG in inputs and "float64" in dtypes:
        why = f"in float64 it is not run: the judge computes in a wider type, and {count}; float32 is"
        yield Claim(f"input: {LONG}", UNVERIFIED, why, dtype="float64")
    if size > SMALL and others:
        why = f"{count}; gradients are judged on {first} alone, not on {', '.join(others)}"
        yield Claim(ELSEWHERE, UNVERIFIED, why)


def ported(source: Job, target: Checkpoint) -> Ported | str:
    """Return what runs the target in the place of the source; in words, why nothing can."""
    try:
        weights = target.weights()
    except WeightsError as error:
        return error.problems[0]
    shapes = [{name: array.shape for name, array in one.items()} for one in (source.weights, weights)]
    if source.part != target.part or shapes[0] != shapes[1]:
        return "the target has not the parameters of the source: there is nothing to run in its place"
    model = (target.part, target.config, weights)
    return Ported("target", source.case, source.dtype, *model, source.batch, source=source)


def jobs(
    target: Ported, batches: Mapping[str, Batch], asked: Asked, left_out: Sequence[Claim]
) -> Iterator[Job]:
    """Yield the runs of the target.

    Args:
        left_out: what :func:`unjudged` yields.
    """
    others = [*batches][1:]
    for case, batch in batches.items():
        for dtype in asked.dtypes:
            if is_among(left_out, f"input: {case}", dtype):
                continue
            gradients = not asked.quick and not is_among(left_out, GRADIENTS, dtype)
            if case in others:
                gradients &= not is_among(left_out, ELSEWHERE)
            whole = case != LONG or size_of(target) <= SMALL
            about = replace(target, case=case, batch=batch, dtype=dtype)
            yield replace(about, gradients=gradients, end_to_end=whole)
    training = Training(RECIPE, [[target.batch]], reported=(0,))
    for dtype in () if asked.quick else asked.dtypes:
        if not is_among(left_out, STEP, dtype):
            expected = partial(_expected, target.source, training, dtype)
            yield replace(target, case=STEP, dtype=dtype, expectation=expected, training=training)


def is_among(left_out: Sequence[Claim], name: str, dtype: str = "") -> bool:
    """Say whether a claim is among others: in every precision, or in this one."""
    return any(claim.name == name and claim.dtype in ("", dtype) for claim in left_out)


def _expected(source: Job, training: Training, dtype: str, deviations: Deviations) -> Expectation:
    judging = JudgedTraining(source.config, source.weights, training, source.part, dtype, deviations)
    return of_training(judging)


def work(runs: Sequence[Job]) -> int:
    """Return over about how many tokens the reference passes to judge runs."""
    return sum(
        (BACKWARD_PASSES if run.gradients or run.training else FORWARD_PASSES) * tokens_of(run.batch)
        for run in runs
    )


def tokens_of(batch: Batch) -> int:
    """Return the rows of a batch times its tokens."""
    return math.prod(next(iter(batch.arrays().values())).shape[:2])


def rows_of(result: Result, kind: str, output: str) -> list[Row]:
    """Return the tensors of one of :data:`KINDS` in a run.

    As a tap each step counts by itself, as output or loss all of them together.

    Args:
        output: the tap that the model hands out.
    """
    if STEP in (kind, result.case):
        return result.table if result.case == kind else []
    named = {OUTPUTS: output, "loss": "loss"}
    if kind in named:
        whole = [(row, row.end_to_end) for row in result.table if row.tensor == named[kind]]
        return [
            replace(row, local=None, status=end.status, note=end.note) if end else row for row, end in whole
        ]
    of_gradients = kind == GRADIENTS
    return [
        row
        for row in result.table
        if row.tensor != "loss" and row.tensor.startswith("gradients.") == of_gradients
    ]


def claim(name: str, kind: str, results: Sequence[Result], output: str) -> Claim:
    """Return what the runs of one backend in one precision prove of one kind of tensor."""
    runs = [result for result in results if (result.case == STEP) == (kind == STEP)]
    make = partial(Claim, name, backend=results[0].backend, dtype=results[0].dtype)
    if lost := next((result for result in runs if result.verdict is None), None):
        detail = f": {lost.detail}" if lost.detail else ""
        return make(UNVERIFIED, f"{lost.case}: {lost.status}{detail}")
    every = [(result, row) for result in runs for row in rows_of(result, kind, output)]
    found = [(result, row) for result, row in every if row.status in JUDGED]
    if not found:
        missing = sorted({row.note for _, row in every if row.note})
        return make(UNVERIFIED, f"nothing was judged{': ' if missing else ''}{', '.join(missing)}")
    worst = max((row for _, row in found), key=lambda row: row.ratio)
    make = partial(make, worst=float(f"{worst.ratio:.3g}"), tensor=worst.tensor)
    if wrong := [pair for pair in found if pair[1].status == "diverges"]:
        said = f"{len(wrong)} of {len(found)} tensors lie beyond their tolerance, first"
        return make(FAILED, f"{said} {_why(*wrong[0])}")
    within = "tensor within its tolerance" if len(found) == 1 else "tensors within their tolerances"
    said = f"{len(found)} {within} on {', '.join(dict.fromkeys(result.case for result, _ in found))}"
    for status, words in (
        ("not exposed", "; {} are not handed out"),
        ("undetermined", "; of {} rounding leaves nothing to judge"),
    ):
        count = sum(row.status == status for _, row in every)
        said += words.format(count) * bool(count)
    return make(PROVEN, said)


def _why(result: Result, row: Row) -> str:
    """Return where a run went wrong, and what explains that if it was asked for."""
    said = f"{row.tensor} on {result.case}"
    if result.verdict is None or result.verdict.search is not None:
        return said
    return f"{said}: {'; '.join(line.strip() for line in verdict_lines(result.verdict)[1:])}"
