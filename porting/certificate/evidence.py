"""What the target computes, judged by the oracle with the weights of the source.

The same judge as everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from concord.backends.interface import Run
from concord.conformance.campaign import Job, Report, Settings, conduct
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.judging import judge
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

FORWARD = ("outputs", "taps")

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
        return judge(
            self.source.config,
            self.source.weights,
            self.batch,
            run,
            self.source.part,
            self.expectation,
            self.derive,
            rules,
            self.end_to_end,
        )


def _job(
    side: str, source: JudgedModel, run: JudgedModel, name: str, batch: Batch, dtype: str, **more: Any
) -> Ported:
    return Ported(side, name, dtype, run.part, run.config, run.weights, batch, source=source, **more)


def jobs(
    source: JudgedModel, target: JudgedModel, given: Inputs, dtypes: Sequence[str], step: bool
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
                more = {"gradients": gradients, "end_to_end": whole}
                found.append(_job("target", source, target, name, batch, dtype, **more))
    training = Training(RECIPE, [[first]], reported=(0,))
    for dtype in _up_to(SMALL, source, dtypes) if step else ():
        expected = functools.partial(_expected, source, training, dtype)
        found.append(
            _job("target", source, target, STEP, first, dtype, expectation=expected, training=training)
        )
    return found


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
    """What the target computed, and what the judge says."""

    items: tuple[Item, ...]
    runs: tuple[Ran, ...]
    errors: dict[str, dict[str, dict[str, float]]]
    environments: dict[str, Any]


def gather(
    source: JudgedModel,
    target: Checkpoint,
    given: Inputs,
    asked: Asked,
    settings: Settings,
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
        return _nothing(error.problems[0])
    shapes = ({name: array.shape for name, array in one.weights.items()} for one in (source, ported))
    if source.part != ported.part or next(shapes) != next(shapes):
        return _nothing(
            "the target has not the parameters of the source: there is nothing to run in its place"
        )
    problem, dtypes = steps_problem(source), asked.dtypes
    report = conduct(
        jobs(source, ported, given, dtypes, not problem),
        asked.backends,
        settings,
        lambda backend, done: tell(f"{backend}: {done}"),
    )
    reading = _Reading(output_name(source.config, source.part), explain, problem)
    left_out = tuple(spared(source, given, dtypes))
    already = {(item.name, item.dtype) for item in left_out}
    found = reading.evidence(report, asked.backends, dtypes)
    items = (*(item for item in found.items if (item.name, item.dtype) not in already), *left_out)
    for result in report.results:
        for row in result.verdict.table if result.verdict else ():
            if row.status in JUDGED:
                worst = found.errors.setdefault(result.backend, {}).setdefault(result.dtype, {})
                worst[row.tensor] = max(worst.get(row.tensor, 0.0), digits(row.ratio))
    return dataclasses.replace(found, items=items)


def _nothing(why: str) -> Evidence:
    return Evidence(tuple(Item(kind, UNVERIFIED, why) for kind in KINDS), (), {}, {})


def at_home(
    source: JudgedModel, given: Inputs, asked: Asked, settings: Settings, tell: Callable[[str], None]
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
    reading = _Reading(output_name(source.config, source.part), True, "")
    found = reading.evidence(report, (asked.home,), asked.dtypes)
    kinds = KINDS[:-1] if gradients else FORWARD
    items = [dataclasses.replace(item, name=HOME + item.name) for item in found.items if item.name in kinds]
    if not gradients:
        why = f"the model has {source.count:,} parameters; gradients are judged in the target alone"
        items.append(Item(f"{HOME}gradients", UNVERIFIED, why))
    runs = tuple(dataclasses.replace(run, side="source") for run in found.runs)
    return dataclasses.replace(found, items=tuple(items), runs=runs)


def digits(value: float) -> float:
    """Return an error with the digits that are kept of it."""
    return float(f"{value:.3g}")


ENVIRONMENT = (
    *("version", "device", "threads", "precision_switches", "deviations"),
    *("import_seconds", "peak_memory_bytes"),
)
"""What is kept of what a backend says of itself."""

JUDGED = ("agrees", "diverges")


def _from_the_inputs(row: Row) -> Row:
    """Return a row as it is judged from the inputs on, where it is."""
    found = row.end_to_end
    return dataclasses.replace(row, local=None, status=found.status, note=found.note) if found else row


class _Reading:
    """What results say of each kind of tensor.

    Args:
        output: the name of the tap that the model hands out.
        explain: whether it is to be found out why something diverges.
        problem: why no optimizer step was made; empty: one was.
    """

    def __init__(self, output: str, explain: bool, problem: str) -> None:
        self.output, self.explain, self.problem = output, explain, problem

    def evidence(self, report: Report, backends: Sequence[str], dtypes: Sequence[str]) -> Evidence:
        """Return what runs prove, and what is kept of each."""
        return Evidence(
            tuple(
                item
                for backend in backends
                for dtype in dtypes
                for item in self.items(report, backend, dtype)
            ),
            tuple(self.ran(result) for result in report.results),
            {},
            {
                name: {key: said[key] for key in ENVIRONMENT if key in said}
                for name, said in report.environments.items()
            },
        )

    def rows(self, result: Result) -> Iterator[tuple[str, Row]]:
        """Yield the tensors of a run, each with its kind. The output is a tap too.

        As such each step counts by itself, as the output all of them together.
        """
        for row in result.verdict.table if result.verdict else ():
            gradient = row.tensor.startswith("gradients.")
            kind = "gradients" if gradient else "loss" if row.tensor == "loss" else "taps"
            kind = STEP if result.case == STEP else kind
            if row.tensor == self.output and kind == "taps":
                yield "outputs", _from_the_inputs(row)
            yield kind, _from_the_inputs(row) if kind == "loss" else row

    def ran(self, result: Result) -> Ran:
        """Return what is kept of a run."""
        worst: dict[str, float] = {}
        rows = [(kind, row) for kind, row in self.rows(result) if row.status in JUDGED]
        for kind, row in rows:
            worst[kind] = max(worst.get(kind, 0.0), digits(row.ratio))
        first = result.first_divergence
        words = (
            f"first at {first.tensor}, {digits(first.ratio)} times its tolerance" if first else result.detail
        )
        return Ran(
            result.backend,
            result.case,
            result.dtype,
            result.status,
            sum(kind != "outputs" for kind, _ in rows),
            worst,
            words,
        )

    def items(self, report: Report, backend: str, dtype: str) -> Iterator[Item]:
        """Yield what the runs of a backend in a precision prove."""
        results = [result for result in report.results if (result.backend, result.dtype) == (backend, dtype)]
        for kind in KINDS:
            if kind == STEP and self.problem:
                yield Item(
                    kind, NOT_APPLICABLE if "alone" in self.problem else UNVERIFIED, self.problem, "", dtype
                )
            else:
                yield self.item(
                    kind,
                    [result for result in results if (result.case == STEP) == (kind == STEP)],
                    functools.partial(Item, backend=backend, dtype=dtype),
                )

    def item(self, kind: str, results: Sequence[Result], make: Callable[..., Item]) -> Item:
        """Return what runs prove of one kind of tensor."""
        lost = [result for result in results if result.verdict is None]
        if lost:
            return make(
                kind,
                UNVERIFIED,
                f"{lost[0].case}: {lost[0].status}{f': {lost[0].detail}' if lost[0].detail else ''}",
            )
        rows = [(result, row) for result in results for of, row in self.rows(result) if of == kind]
        judged = [(result, row) for result, row in rows if row.status in JUDGED]
        if not judged:
            missing = sorted({row.note for _, row in rows if row.note})
            return make(kind, UNVERIFIED, f"nothing was judged{': ' if missing else ''}{', '.join(missing)}")
        _, worst = max(judged, key=lambda pair: pair[1].ratio)
        found = {"worst": digits(worst.ratio), "tensor": worst.tensor}
        wrong = [(result, row) for result, row in judged if row.status == "diverges"]
        if wrong:
            return make(
                kind,
                FAILED,
                (
                    f"{len(wrong)} of {len(judged)} tensors lie beyond their tolerance, first "
                    f"{self.why(*wrong[0])}"
                ),
                **found,
            )
        within = "tensor within its tolerance" if len(judged) == 1 else "tensors within their tolerances"
        cases = list(dict.fromkeys(result.case for result, _ in judged))
        few, lost_digits = (
            sum(row.status == status for _, row in rows) for status in ("not exposed", "undetermined")
        )
        more = f"; {few} are not handed out" * bool(
            few
        ) + f"; of {lost_digits} rounding leaves nothing to judge" * bool(lost_digits)
        return make(
            kind,
            PROVEN,
            f"{len(judged)} {within} on {', '.join(cases)}{more}",
            **found,
        )

    def why(self, result: Result, row: Row) -> str:
        """Return where a run went wrong, and what explains that if it is asked for."""
        said = f"{row.tensor} on {result.case}"
        if not self.explain or result.verdict is None:
            return said
        return f"{said}: {'; '.join(line.strip() for line in verdict_lines(result.verdict)[1:])}"
