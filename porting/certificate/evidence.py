"""What the target computes, judged by the oracle with the weights of the source.

The same judge as everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concord.backends.interface import Run
from concord.conformance.campaign import Job, Report, Settings, conduct
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.judging import judge
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.verdict import Result, Row, Verdict, verdict_lines
from concord.porting.certificate.certificate import FAILED, NOT_APPLICABLE, PROVEN, UNVERIFIED, Item, Ran
from concord.porting.certificate.inputs import LONG, Inputs
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import Deviations
from concord.spec.parameters import Weights
from concord.spec.tensors import OF_IDS, output_name
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

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

SMALL = 2_000_000
"""Parameters up to which everything is judged on every input, and end to end too; of a larger model gradients
on the sentences alone,
and the longest input in float32, each step by itself (:func:`spared`)."""

MEDIUM = 40_000_000
"""Parameters up to which an optimizer step is judged in the last precision, every sample of whose rounding
moves all of them, and gradients in all precisions."""

STEP = "optimizer step"

KINDS = ("outputs", "taps", "loss", "gradients", STEP)

HOME = "source's framework: "
"""What claims begin with that are about the source, run in its own framework."""


@dataclass(frozen=True)
class Model:
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

    source: Model | None = None

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


def jobs(source: Model, target: Model, given: Inputs, dtypes: Sequence[str], step: bool) -> list[Job]:
    """Return the runs of the target."""
    found: list[Job] = []
    small = source.count <= SMALL
    first = next(iter(given.batches.values()))
    for name, batch in given.batches.items():
        for dtype in dtypes:
            if small or (name, dtype) != (LONG, "float64"):
                gradients = small or (batch is first and dtype in _differentiated(source, dtypes))
                found.append(
                    Ported(
                        "target",
                        name,
                        dtype,
                        target.part,
                        target.config,
                        target.weights,
                        batch,
                        gradients=gradients,
                        end_to_end=small or name != LONG,
                        source=source,
                    )
                )
    if step:
        training = Training(RECIPE, [[first]], reported=(0,))
        found += [_step(source, target, first, training, dtype) for dtype in _stepped(source, dtypes)]
    return found


def _step(source: Model, target: Model, batch: Batch, training: Training, dtype: str) -> Ported:
    def expected(deviations: Deviations) -> Expectation:
        return of_training(
            JudgedTraining(source.config, source.weights, training, source.part, dtype, deviations)
        )

    return Ported(
        "target",
        STEP,
        dtype,
        target.part,
        target.config,
        target.weights,
        batch,
        expected,
        training=training,
        source=source,
    )


def _differentiated(source: Model, dtypes: Sequence[str]) -> Sequence[str]:
    """Return the precisions in which gradients are judged."""
    return dtypes if source.count <= MEDIUM else dtypes[-1:]


def _stepped(source: Model, dtypes: Sequence[str]) -> Sequence[str]:
    """Return the precisions in which an optimizer step is judged."""
    return dtypes if source.count <= SMALL else dtypes[-1:]


def spared(source: Model, given: Inputs, dtypes: Sequence[str]) -> Iterator[Item]:
    """Yield what is not judged of a model of real size, and why."""
    if source.count <= SMALL:
        return
    names = list(given.batches)
    if LONG in names and "float64" in dtypes:
        yield Item(
            f"input: {LONG}",
            UNVERIFIED,
            (
                "in float64 it is not run: the judge computes in a wider type, and the model has "
                f"{source.count:,} parameters; float32 is"
            ),
            dtype="float64",
        )
    if names[1:]:
        yield Item(
            "gradients on other inputs",
            UNVERIFIED,
            (
                f"the model has {source.count:,} parameters; gradients are judged on {names[0]} alone, not "
                f"on {', '.join(names[1:])}"
            ),
        )
    for dtype in set(dtypes) - set(_differentiated(source, dtypes)):
        yield Item(
            "gradients",
            UNVERIFIED,
            f"the model has {source.count:,} parameters; gradients are judged in {dtypes[-1]} alone",
            dtype=dtype,
        )
    for dtype in () if steps_problem(source) else set(dtypes) - set(_stepped(source, dtypes)):
        yield Item(
            STEP,
            UNVERIFIED,
            f"the model has {source.count:,} parameters; a step is judged in {dtypes[-1]} alone",
            dtype=dtype,
        )


def steps_problem(source: Model) -> str:
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
    source: Model,
    target: Model,
    given: Inputs,
    backends: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    progress: Callable[[str, str], None],
    explain: bool,
) -> Evidence:
    """Run the target on every backend and judge it.

    Args:
        explain: whether it is to be found out why something diverges.
    """
    if (
        source.part != target.part
        or set(source.weights) != set(target.weights)
        or any(source.weights[name].shape != array.shape for name, array in target.weights.items())
    ):
        reason = "the target has not the parameters of the source: there is nothing to run in its place"
        return Evidence(tuple(Item(kind, UNVERIFIED, reason) for kind in KINDS), (), {}, {})
    problem = steps_problem(source)
    report = conduct(jobs(source, target, given, dtypes, not problem), backends, settings, progress)
    reading = _Reading(output_name(source.config, source.part), explain, problem)
    left_out = tuple(spared(source, given, dtypes))
    already = {(item.name, item.dtype) for item in left_out}
    items = tuple(
        item
        for backend in backends
        for dtype in dtypes
        for item in reading.items(report, backend, dtype)
        if (item.name, dtype) not in already
    )
    runs = tuple(reading.ran(result) for result in report.results)
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for result in report.results:
        for row in result.verdict.table if result.verdict else ():
            if row.status in ("agrees", "diverges"):
                worst = errors.setdefault(result.backend, {}).setdefault(result.dtype, {})
                worst[row.tensor] = max(worst.get(row.tensor, 0.0), digits(row.ratio))
    return Evidence(
        (*items, *left_out),
        runs,
        errors,
        {name: _environment(said) for name, said in report.environments.items()},
    )


def at_home(
    source: Model,
    given: Inputs,
    backend: str,
    dtypes: Sequence[str],
    settings: Settings,
    progress: Callable[[str, str], None],
) -> Evidence:
    """Run the source in its own framework, on the sentences, and judge it as the target is.

    What both are within tolerance of is the same.

    Of a large model no gradients are asked for: they are judged in the target.
    """
    name, batch = next(iter(given.batches.items()))
    gradients = source.count <= SMALL
    jobs = [
        Ported(
            "source",
            name,
            dtype,
            source.part,
            source.config,
            source.weights,
            batch,
            gradients=gradients,
            source=source,
        )
        for dtype in dtypes
    ]
    report = conduct(jobs, (backend,), settings, progress)
    reading = _Reading(output_name(source.config, source.part), True, "")
    kinds = ("outputs", "taps", "loss", "gradients") if gradients else ("outputs", "taps")
    items = [
        dataclasses.replace(item, name=HOME + item.name)
        for dtype in dtypes
        for item in reading.items(report, backend, dtype)
        if item.name in kinds
    ]
    if not gradients:
        items.append(
            Item(
                f"{HOME}gradients",
                UNVERIFIED,
                f"the model has {source.count:,} parameters; gradients are judged in the target alone",
            )
        )
    runs = tuple(dataclasses.replace(reading.ran(result), side="source") for result in report.results)
    return Evidence(
        tuple(items), runs, {}, {name: _environment(said) for name, said in report.environments.items()}
    )


def digits(value: float) -> float:
    """Return an error with the digits that are kept of it."""
    return float(f"{value:.3g}")


def _environment(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: said[key]
        for key in (
            "version",
            "device",
            "threads",
            "precision_switches",
            "deviations",
            "import_seconds",
            "peak_memory_bytes",
        )
        if key in said
    }


def kind_of(row: Row, result: Result) -> str:
    """Return of which kind a tensor of a run is."""
    if result.case == STEP:
        return STEP
    if row.tensor.startswith("gradients."):
        return "gradients"
    return "loss" if row.tensor == "loss" else "taps"


def _from_the_inputs(row: Row) -> Row:
    """Return a row as it is judged from the inputs on, where it is."""
    return (
        dataclasses.replace(row, local=None, status=row.end_to_end.status, note=row.end_to_end.note)
        if row.end_to_end
        else row
    )


class _Reading:
    """What results say of each kind of tensor.

    Args:
        output: the name of the tap that the model hands out.
        explain: whether it is to be found out why something diverges.
        problem: why no optimizer step was made; empty: one was.
    """

    def __init__(self, output: str, explain: bool, problem: str) -> None:
        self.output, self.explain, self.problem = output, explain, problem

    def rows(self, result: Result) -> Iterator[tuple[str, Row]]:
        """Yield the tensors of a run, each with its kind. The output is a tap too.

        As such each step counts by itself, as the output all of them together.
        """
        for row in result.verdict.table if result.verdict else ():
            kind = kind_of(row, result)
            if row.tensor == self.output and kind == "taps":
                yield "outputs", _from_the_inputs(row)
            yield kind, _from_the_inputs(row) if kind == "loss" else row

    def ran(self, result: Result) -> Ran:
        """Return what is kept of a run."""
        worst: dict[str, float] = {}
        rows = [(kind, row) for kind, row in self.rows(result) if row.status in ("agrees", "diverges")]
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
        judged = [(result, row) for result, row in rows if row.status in ("agrees", "diverges")]
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
