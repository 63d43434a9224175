"""What the target computes, judged by the oracle with the weights of the source.

The same judge as everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from concord.backends.interface import Run
from concord.conformance.campaign import Job, Report, Setup, conduct
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.verdict import Result, Row, Verdict, verdict_lines
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    PROVEN,
    RECIPE,
    UNVERIFIED,
    Asked,
    Item,
    Ran,
)
from concord.porting.certificate.inputs import LONG, Inputs
from concord.porting.checkpoint import Checkpoint
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import Deviations
from concord.spec.errors import WeightsError
from concord.spec.parameters import Weights
from concord.spec.tensors import OF_IDS, output_name
from concord.spec.training.trajectory import Training

SMALL = 2_000_000
"""Parameters up to which everything is judged on every input, and end to end too; of a larger model gradients
on the sentences alone,
and the longest input in float32, each step by itself (:func:`spared`)."""

MEDIUM = 40_000_000
"""Parameters up to which an optimizer step is judged in the last precision, every sample of whose rounding
moves all of them, and gradients in all precisions."""

STEP = "optimizer step"

FORWARD_PASSES, BACKWARD_PASSES = 12, 32
"""Passes of the reference that the tolerances of a forward pass take, and those of gradients: measured."""

FORWARD = ("outputs", "taps")

JUDGED = ("agrees", "diverges")

KINDS = (*FORWARD, "loss", "gradients", STEP)

HOME = "source's framework: "
"""What claims begin with that are about the source, run in its own framework."""


@dataclass(frozen=True)
class JudgedModel:
    """A member of the family with weights: what the oracle computes, or the target."""

    config: EncoderConfig
    weights: Weights
    part: str

    @property
    def count(self) -> int:
        """Its parameters."""
        return sum(array.size for array in self.weights.values())


@dataclass(frozen=True)
class Ported(Job):
    """A run of the target, which is judged as a run of the source."""

    source: JudgedModel | None = None

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        """Judge what the target computed against what the source should."""
        assert self.source is not None
        config, weights, part = self.source.config, self.source.weights, self.source.part
        return Job.judge(dataclasses.replace(self, config=config, weights=weights, part=part), run, rules)


def _job(
    side: str, source: JudgedModel, run: JudgedModel, name: str, batch: Batch, dtype: str, **more: Any
) -> Ported:
    return Ported(side, name, dtype, run.part, run.config, run.weights, batch, source=source, **more)


def jobs(
    source: JudgedModel,
    target: JudgedModel,
    given: Inputs,
    dtypes: Sequence[str],
    step: bool,
    forward_only: bool = False,
) -> list[Job]:
    """Return the runs of the target."""
    found: list[Job] = []
    small = source.count <= SMALL
    first = next(iter(given.batches.values()))
    for name, batch in given.batches.items():
        for dtype in dtypes:
            if small or (name, dtype) != (LONG, "float64"):
                gradients = small or (batch is first and dtype in _up_to(MEDIUM, source, dtypes))
                whole = small or name != LONG
                more = {"gradients": gradients and not forward_only, "end_to_end": whole}
                found.append(_job("target", source, target, name, batch, dtype, **more))
    training = Training(RECIPE, [[first]], reported=(0,))
    for dtype in _up_to(SMALL, source, dtypes) if step else ():
        expected = functools.partial(_expected, source, training, dtype)
        found.append(
            _job("target", source, target, STEP, first, dtype, expectation=expected, training=training)
        )
    return found


def work(runs: Sequence[Job]) -> int:
    """Return over about how many tokens the reference passes to judge runs."""
    return sum(
        (BACKWARD_PASSES if run.gradients or run.training else FORWARD_PASSES) * tokens_of(run.batch)
        for run in runs
    )


def tokens_of(batch: Batch) -> int:
    """Return the rows of a batch times its tokens."""
    return math.prod(next(iter(batch.arrays().values())).shape[:2])


def _expected(source: JudgedModel, training: Training, dtype: str, deviations: Deviations) -> Expectation:
    judged = JudgedTraining(source.config, source.weights, training, source.part, dtype, deviations)
    return of_training(judged)


def _up_to(most: int, source: JudgedModel, dtypes: Sequence[str]) -> Sequence[str]:
    """Return the precisions in which a model is judged: of one of more parameters the last."""
    return dtypes if source.count <= most else dtypes[-1:]


def spared(source: JudgedModel, given: Inputs, dtypes: Sequence[str]) -> Iterator[Item]:
    """Yield what is not judged of a model of real size, and why."""
    if source.count <= SMALL:
        return
    first, *others = given.batches
    size = f"the model has {source.count:,} parameters"
    if LONG in given.batches and "float64" in dtypes:
        why = f"in float64 it is not run: the judge computes in a wider type, and {size}; float32 is"
        yield Item(f"input: {LONG}", UNVERIFIED, why, dtype="float64")
    if others:
        why = f"{size}; gradients are judged on {first} alone, not on {', '.join(others)}"
        yield Item("gradients on other inputs", UNVERIFIED, why)
    for kind, what, most in (("gradients", "gradients are", MEDIUM), (STEP, "a step is", SMALL)):
        skipped = set() if kind == STEP and steps_problem(source) else {*dtypes}
        for dtype in skipped - {*_up_to(most, source, dtypes)}:
            yield Item(kind, UNVERIFIED, f"{size}; {what} judged in {dtypes[-1]} alone", dtype=dtype)


def steps_problem(source: JudgedModel) -> str:
    """Return why no optimizer step is judged; empty: one is."""
    if source.part not in OF_IDS:
        return f"the part {source.part} is not trained alone"
    if source.count > MEDIUM:
        return (
            f"the model has {source.count:,} parameters; how far a step may lie from the oracle's is "
            f"derived for at most {MEDIUM:,}"
        )
    return ""


@dataclass(frozen=True)
class Evidence:
    """What was computed, and what the judge says."""

    items: tuple[Item, ...] = ()
    runs: tuple[Ran, ...] = ()
    errors: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Any] = field(default_factory=dict)


def gather(
    source: JudgedModel,
    target: Checkpoint,
    given: Inputs,
    asked: Asked,
    settings: Setup,
    tell: Callable[[str], None],
    explain: bool,
) -> Evidence:
    """Run the target on every backend and judge it.

    Args:
        explain: whether it is to be found out why something diverges.
    """
    try:
        ported = JudgedModel(target.config, target.weights(), target.part)
    except WeightsError as error:
        return nothing(error.problems[0])
    shapes = [{name: array.shape for name, array in one.weights.items()} for one in (source, ported)]
    if source.part != ported.part or shapes[0] != shapes[1]:
        return nothing(
            "the target has not the parameters of the source: there is nothing to run in its place"
        )
    problem, dtypes, quick = steps_problem(source), asked.dtypes, asked.quick
    runs = jobs(source, ported, given, dtypes, not (problem or quick), quick)
    report = conduct(runs, asked.backends, settings, lambda backend, done: tell(f"{backend}: {done}"))
    left_out = [] if quick else list(spared(source, given, dtypes))
    already = {(item.name, item.dtype) for item in left_out}
    judged = _Judged(report, output_name(source.config, source.part), explain)
    items = [
        judged.claim(kind, kind, backend, dtype)
        if kind != STEP or not problem
        else Item(kind, NOT_APPLICABLE if "alone" in problem else UNVERIFIED, problem, "", dtype)
        for backend in asked.backends
        for dtype in dtypes
        for kind in (FORWARD if quick else KINDS)
        if (kind, dtype) not in already
    ]
    return Evidence((*items, *left_out), judged.runs("target"), judged.errors(), judged.environments())


def nothing(why: str) -> Evidence:
    """Return the claims about what the target computes where it is not run."""
    return Evidence(tuple(Item(kind, UNVERIFIED, why) for kind in KINDS))


def at_home(
    source: JudgedModel, given: Inputs, asked: Asked, settings: Setup, tell: Callable[[str], None]
) -> Evidence:
    """Run the source in its own framework, on the sentences, and judge it as the target is.

    What both are within tolerance of is the same.

    Of a large model no gradients are asked for: they are judged in the target.
    """
    name, batch = next(iter(given.batches.items()))
    gradients = source.count <= SMALL
    jobs = [_job("source", source, source, name, batch, dtype, gradients=gradients) for dtype in asked.dtypes]
    report = conduct(
        jobs, (asked.home,), settings, lambda backend, done: tell(f"the source in {backend}: {done}")
    )
    judged = _Judged(report, output_name(source.config, source.part), True)
    kinds = KINDS[:-1] if gradients else FORWARD
    items = [
        judged.claim(f"{HOME}{kind}", kind, asked.home, dtype) for dtype in asked.dtypes for kind in kinds
    ]
    if not gradients:
        why = f"the model has {source.count:,} parameters; gradients are judged in the target alone"
        items.append(Item(f"{HOME}gradients", UNVERIFIED, why))
    return Evidence(tuple(items), judged.runs("source"), environments=judged.environments())


def digits(value: float) -> float:
    """Return an error with the digits that are kept of it."""
    return float(f"{value:.3g}")


ENVIRONMENT = (
    *("version", "device", "threads", "precision_switches", "deviations"),
    *("import_seconds", "peak_memory_bytes"),
)
"""What is kept of what a backend says of itself."""


def _from_the_inputs(row: Row) -> Row:
    """Return a row as it is judged from the inputs on, where it is."""
    found = row.end_to_end
    return dataclasses.replace(row, local=None, status=found.status, note=found.note) if found else row


class _Judged:
    """What results say of each kind of tensor.

    Args:
        output: the name of the tap that the model hands out.
        explain: whether it is to be found out why something diverges.
    """

    def __init__(self, report: Report, output: str, explain: bool) -> None:
        self.report, self.explain = report, explain
        self.found = [(result, [*self.rows(result, output)]) for result in report.results]

    def rows(self, result: Result, output: str) -> Iterator[tuple[str, Row]]:
        """Yield the tensors of a run, each with its kind. The output is a tap too.

        As such each step counts by itself, as the output all of them together.
        """
        for row in result.verdict.table if result.verdict else ():
            kind = "gradients" if row.tensor.startswith("gradients.") else "taps"
            kind = STEP if result.case == STEP else "loss" if row.tensor == "loss" else kind
            if row.tensor == output and kind == "taps":
                yield "outputs", _from_the_inputs(row)
            yield kind, _from_the_inputs(row) if kind == "loss" else row

    def errors(self) -> dict[str, Any]:
        """Return the largest error of each tensor, by backend and precision."""
        found: dict[str, Any] = {}
        for result in self.report.results:
            for row in result.verdict.table if result.verdict else ():
                if row.status in JUDGED:
                    worst = found.setdefault(result.backend, {}).setdefault(result.dtype, {})
                    worst[row.tensor] = max(worst.get(row.tensor, 0.0), digits(row.ratio))
        return found

    def environments(self) -> dict[str, Any]:
        """Return what each backend says of itself."""
        return {
            name: {key: said[key] for key in ENVIRONMENT if key in said}
            for name, said in self.report.environments.items()
        }

    def runs(self, side: str) -> tuple[Ran, ...]:
        """Return what is kept of each run."""
        found = []
        for result, rows in self.found:
            worst: dict[str, float] = {}
            judged = [(kind, row) for kind, row in rows if row.status in JUDGED]
            for kind, row in judged:
                worst[kind] = max(worst.get(kind, 0.0), digits(row.ratio))
            words = result.detail
            if first := result.first_divergence:
                words = f"first at {first.tensor}, {digits(first.ratio)} times its tolerance"
            count = sum(kind != "outputs" for kind, _ in judged)
            found.append(
                Ran(result.backend, result.case, result.dtype, result.status, count, worst, words, side)
            )
        return tuple(found)

    def claim(self, name: str, kind: str, backend: str, dtype: str) -> Item:
        """Return what the runs of a backend in a precision prove of one kind of tensor."""
        make = functools.partial(Item, name, backend=backend, dtype=dtype)
        runs = [
            (result, rows)
            for result, rows in self.found
            if (result.backend, result.dtype, result.case == STEP) == (backend, dtype, kind == STEP)
        ]
        if lost := next((result for result, _ in runs if result.verdict is None), None):
            detail = f": {lost.detail}" if lost.detail else ""
            return make(UNVERIFIED, f"{lost.case}: {lost.status}{detail}")
        every = [(result, row) for result, rows in runs for of, row in rows if of == kind]
        judged = [(result, row) for result, row in every if row.status in JUDGED]
        if not judged:
            missing = sorted({row.note for _, row in every if row.note})
            return make(UNVERIFIED, f"nothing was judged{': ' if missing else ''}{', '.join(missing)}")
        worst = max((row for _, row in judged), key=lambda row: row.ratio)
        make = functools.partial(make, worst=digits(worst.ratio), tensor=worst.tensor)
        if wrong := [pair for pair in judged if pair[1].status == "diverges"]:
            said = f"{len(wrong)} of {len(judged)} tensors lie beyond their tolerance, first"
            return make(FAILED, f"{said} {self.why(*wrong[0])}")
        within = "tensor within its tolerance" if len(judged) == 1 else "tensors within their tolerances"
        said = f"{len(judged)} {within} on {', '.join(dict.fromkeys(result.case for result, _ in judged))}"
        for status, words in (
            ("not exposed", "; {} are not handed out"),
            ("undetermined", "; of {} rounding leaves nothing to judge"),
        ):
            count = sum(row.status == status for _, row in every)
            said += words.format(count) * bool(count)
        return make(PROVEN, said)

    def why(self, result: Result, row: Row) -> str:
        """Return where a run went wrong, and what explains that if it is asked for."""
        said = f"{row.tensor} on {result.case}"
        if not self.explain or result.verdict is None:
            return said
        return f"{said}: {'; '.join(line.strip() for line in verdict_lines(result.verdict)[1:])}"
