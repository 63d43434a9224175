"""Why not a fixed tolerance? The field's usual criteria beside the judge, on the same faults and the same
right runs.

What a criterion compares with is the float64 oracle, as its users would. Faults are the mutants, each in the
standard case that was made to show it; right runs are the right variations
(:mod:`concord.conformance.variations`), and random cases on unchanged backends. Runs are spread over the
backends one by one, so that each is made once.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request, Run, Unsupported
from concord.backends.pool import Pool, Supervisor
from concord.backends.worker import Worker, WorkerFailure
from concord.conformance import record
from concord.conformance.bugs.bug import Bug
from concord.conformance.campaign import Job, Settings
from concord.conformance.check import job_of
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.mutants import matrix
from concord.conformance.mutants.matrix import Progress, plugin
from concord.conformance.report import within
from concord.conformance.variations.backend import run as run_variation
from concord.conformance.variations.catalogue import ALL as VARIATIONS
from concord.spec.cases import build_case, standard_cases
from concord.spec.files import write_text
from concord.spec.reference import reference
from concord.spec.tensors import output_name

Array = NDArray[np.floating]
Passes = Callable[[Array, Array], bool]
"""Takes what a run computed and what the oracle says, in float64 and where the oracle is finite."""

OURS = "this project"

# The criteria. Where one is not defined, as a correlation with a constant is not, it passes.


def allclose(tolerance: float, actual: Array, value: Array) -> bool:
    """Whether no element is further off than so much of itself, plus so much."""
    return bool(np.allclose(actual, value, rtol=tolerance, atol=tolerance))


def largest_error(limit: float, actual: Array, value: Array) -> bool:
    """Whether no element is further off than the limit."""
    return bool((abs(actual - value) <= limit).all())


def cosine(least: float, actual: Array, value: Array) -> bool:
    """Whether the cosine of the angle between the two is large enough."""
    norms = np.linalg.norm(actual) * np.linalg.norm(value)
    return bool(norms == 0 or np.vdot(actual, value) >= least * norms)


def correlation(least: float, actual: Array, value: Array) -> bool:
    """Whether Pearson's correlation is large enough."""
    return cosine(least, actual - actual.mean(), value - value.mean()) if value.size else True


def squared_error(limit: float, actual: Array, value: Array) -> bool:
    """Whether the squared error, as a share of the squares, is small enough."""
    return bool(np.square(actual - value).sum() <= limit * np.square(value).sum())


def divergence(limit: float, actual: Array, value: Array) -> bool:
    """Of the distributions that rows are logits of; a single logit is one of two classes."""
    p, q = (_log_probabilities(logits) for logits in (value, actual))
    return bool((np.exp(p) * (p - q)).sum(-1).max() <= limit)


def _log_probabilities(logits: Array) -> Array:
    pairs = np.concatenate([logits, np.zeros_like(logits)], -1) if logits.shape[-1] == 1 else logits
    shifted = pairs - pairs.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


CRITERIA: dict[str, Passes] = {
    "allclose 1e-5": partial(allclose, 1e-5),
    "allclose 1e-4": partial(allclose, 1e-4),
    "allclose 1e-3": partial(allclose, 1e-3),
    "max-abs 1e-3": partial(largest_error, 1e-3),
    "cosine 0.999": partial(cosine, 0.999),
    "PCC 0.99": partial(correlation, 0.99),
    "NMSE 1e-2": partial(squared_error, 1e-2),
    "KL 1e-3": partial(divergence, 1e-3),
}
"""The usual criteria. ``allclose`` has the same number for rtol and atol."""

OF_LOGITS = ("KL 1e-3",)
"""Criteria that are of logits alone."""

Flags = dict[str, tuple[bool, bool | None]]
"""For each criterion, whether it flags the outputs of a run, and whether any of its tensors.

None: it is not of those.
"""


def passes(criterion: Passes, actual: Array | None, value: Array) -> bool:
    """Return whether a tensor passes.

    One that is missing, misshapen, or not finite where the oracle is, does not.
    """
    if actual is None or actual.shape != value.shape:
        return False
    wide, finite = np.asarray(actual, np.float64), np.isfinite(value)
    if not np.isfinite(wide[finite]).all():
        return False
    whole = finite.all()
    with np.errstate(all="ignore"):
        return criterion(wide if whole else wide[finite], value if whole else value[finite])


def flags_of(job: Job, run: Run) -> Flags:
    """Return what each criterion, and the judge, flag of a run."""
    truth = reference(job.config, job.weights, job.batch, True, job.part, job.dtype)
    output = output_name(job.config, job.part)
    wanted = {**truth.taps, **{f"gradients.{name}": array for name, array in truth.gradients.items()}}
    delivered = {**run.taps, **{f"gradients.{name}": array for name, array in run.gradients.items()}}
    found: Flags = {}
    for name, criterion in CRITERIA.items():
        outputs = (
            not passes(criterion, run.output, truth.output)
            if name not in OF_LOGITS or job.part == "model"
            else False
        )
        found[name] = (
            outputs,
            None
            if name in OF_LOGITS
            else any(not passes(criterion, delivered.get(tensor), wanted[tensor]) for tensor in wanted),
        )
    verdict = job.judge(run)
    row = verdict.row(output)
    from_inputs = bool(
        row and (row.end_to_end.status == "diverges" if row.end_to_end else row.status == "diverges")
    )
    found[OURS] = (from_inputs, verdict.status == "diverges")
    return found


# The runs.

FAULTS, RIGHT, SINGLE, HALF = "faults", "right variations", "correct float32", "correct bfloat16"
GROUPS = (FAULTS, RIGHT, SINGLE, HALF)
"""What the runs are of. A fault ought to be flagged, everything else not."""


@dataclass(frozen=True)
class Amounts:
    """How much is run.

    Attributes:
        cases: standard cases, and as many random ones, that each right variation is run on.
        single, half: random cases in float32 and bfloat16.
        seed: of what is drawn.
    """

    cases: int = 4
    single: int = 200
    half: int = 100
    seed: int = 2026


@dataclass
class Comparison:
    """What came of it.

    Attributes:
        flagged: for each group, the name of each run, and what was flagged of it.
        unsupported: runs that a backend had no kernels for, by group.
        versions: of the backends.
        failures: backends that gave no result.
        asked: backends that were asked for by name: one of them that is absent has failed.
    """

    amounts: Amounts
    flagged: dict[str, dict[str, Flags]] = field(default_factory=lambda: {group: {} for group in GROUPS})
    unsupported: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, WorkerFailure] = field(default_factory=dict)
    asked: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: the judge flags nothing that is right; 1: it does; 3: a backend gave no result.

        What is missed in one case may show in another.
        """
        if not self.versions or any(
            failure.status != "absent" or name in self.asked for name, failure in self.failures.items()
        ):
            return 3
        return 1 if self.exceptions["alarms"] else 0

    @property
    def exceptions(self) -> dict[str, list[str]]:
        """Return the runs that the judge was wrong about."""
        return {
            "missed": [run for run, flags in self.flagged[FAULTS].items() if not flags[OURS][True]],
            "alarms": [
                run for group in GROUPS[1:] for run, flags in self.flagged[group].items() if flags[OURS][True]
            ],
        }

    def share(self, group: str, criterion: str, everything: bool) -> tuple[int, int] | None:
        """Return how many runs of a group a criterion flags, and of how many; None where it is of none."""
        said = [flags[criterion][everything] for flags in self.flagged[group].values()]
        return (sum(bool(flag) for flag in said), len(said)) if said and said[0] is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = (*CRITERIA, OURS)
        shares = {
            name: {
                group: {"outputs": self.share(group, name, False), "all": self.share(group, name, True)}
                for group in GROUPS
            }
            for name in names
        }
        amounts = {
            "seed": self.amounts.seed,
            **{group: len(runs) for group, runs in self.flagged.items()},
            "unsupported": self.unsupported,
        }
        return {
            "exit_code": self.exit_code,
            "versions": self.versions,
            "runs": amounts,
            "flagged": shares,
            "exceptions": self.exceptions,
        }


def runs_of_each(mutants: Sequence[Bug], names: Sequence[str], amounts: Amounts) -> int:
    """Return how many runs each backend makes, about: they share faults and random cases."""
    return math.ceil((len(_visible(mutants)) + amounts.single + amounts.half) / max(len(names), 1))


def _visible(mutants: Sequence[Bug]) -> list[Bug]:
    return [mutant for mutant in mutants if "float32" in mutant.precisions]


def compare(
    mutants: Sequence[Bug],
    names: Sequence[str],
    settings: Settings,
    amounts: Amounts,
    progress: Progress = lambda backend, done: None,
) -> Comparison:
    """Run faults, right variations and random cases, and have every criterion look at each run."""
    result = Comparison(amounts, asked=settings.asked)
    visible = _visible(mutants)
    drawn = {
        dtype: random_jobs(dtype, count, amounts.seed)
        for dtype, count in (("float32", amounts.single), ("bfloat16", amounts.half))
    }

    def all_of(place: int) -> None:
        backend = names[place]
        supervisor = pool.supervise(
            partial(settings.open, plugin(backend)),
            started=lambda worker: started(backend, worker.description),
        )
        for mutant in visible[place :: len(names)]:
            fault(result, supervisor, mutant, f"{mutant.name} {backend}")
            progress(backend, mutant.name)
        for group, dtype in ((SINGLE, "float32"), (HALF, "bfloat16")):
            for job in drawn[dtype][place :: len(names)]:
                right(
                    result, group, f"{job.name} {backend}", job, partial(supervisor.do, partial(run_job, job))
                )
                progress(backend, job.name)
        supervisor.close()

    def all_or_nothing(place: int) -> None:
        try:
            all_of(place)
        except WorkerFailure as failure:
            result.failures[names[place]] = failure

    def started(backend: str, description: Mapping[str, Any]) -> None:
        result.versions[backend] = str(description.get("version", ""))
        progress(backend, "started")

    with Pool() as pool:
        pool.map(
            lambda place: vary(result, amounts) if place < 0 else all_or_nothing(place), range(-1, len(names))
        )
    return result


def random_jobs(dtype: str, count: int, seed: int) -> list[Job]:
    """Return random cases, judged end to end too: usual criteria look at outputs."""
    return [
        case.job(f"random {i}", end_to_end=True)
        for i, case in enumerate(sample(Plan(names=(), dtypes=(dtype,), seed=seed), range(count)))
    ]


def run_job(job: Job, worker: Worker, implementation: str = "explicit") -> Run:
    """Have a worker run a job."""
    return worker.run(job.config, job.weights, job.batch, job.part, job.dtype, implementation)


def right(result: Comparison, group: str, name: str, job: Job, run: Callable[[], Run]) -> None:
    """Note what is flagged of a run that is right."""
    try:
        result.flagged[group][name] = flags_of(job, run())
    except Unsupported:
        result.unsupported[group] += 1


def fault(result: Comparison, supervisor: Supervisor, mutant: Bug, name: str) -> None:
    """Note what is flagged of a run with a fault; one that the framework itself refuses is found by all."""
    asked = f"mutant:{mutant.name}"

    def job_in(scenario: str) -> Job:
        return job_of(build_case(mutant.variant, scenario, options=dict(mutant.options)), "float32")

    job = job_in(mutant.scenario)
    try:
        if mutant.after:  # what it shows in is not the first call
            supervisor.do(partial(run_job, job_in(mutant.after), implementation=asked))
        run = supervisor.do(partial(run_job, job, implementation=asked))
        result.flagged[FAULTS][name] = flags_of(job, run)
    except Unsupported:
        result.unsupported[FAULTS] += 1
    except WorkerFailure as failure:
        if failure.status != "error":
            raise
        result.flagged[FAULTS][name] = {
            criterion: (True, None if criterion in OF_LOGITS else True) for criterion in (*CRITERIA, OURS)
        }


def vary(result: Comparison, amounts: Amounts) -> None:
    """Note what is flagged of the right variations, each on cases of its own, in turn."""
    standard = [job_of(case, "float32") for case in standard_cases()]
    np.random.default_rng(amounts.seed).shuffle(standard)
    turns = (
        itertools.cycle(standard),
        itertools.cycle(random_jobs("float32", 2 * amounts.cases, amounts.seed + 1)),
    )
    for variation in VARIATIONS:
        for job in itertools.chain.from_iterable(itertools.islice(turn, amounts.cases) for turn in turns):
            request = Request(job.config, job.weights, job.batch, job.part, job.dtype)
            right(
                result, RIGHT, f"{variation.name} {job.name}", job, partial(run_variation, variation, request)
            )


# The table.


def rows(result: Comparison) -> list[list[str]]:
    """Return the table: a header, and a line for each criterion with what it flags of outputs, and of all
    tensors.
    """

    def cell(group: str, criterion: str) -> str:
        shares = (result.share(group, criterion, everything) for everything in (False, True))
        return " / ".join("–" if share is None else percent(*share) for share in shares)

    return [
        ["criterion", *GROUPS],
        *([criterion, *(cell(group, criterion) for group in GROUPS)] for criterion in (*CRITERIA, OURS)),
    ]


def summary(result: Comparison) -> str:
    """Say what the table was measured on."""
    counted = ", ".join(
        f"{len(result.flagged[group])} {words}"
        for group, words in zip(
            GROUPS,
            ("faults", "runs of right variations", "correct runs in float32", "in bfloat16"),
            strict=True,
        )
    )
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    return (
        f"Share of runs that are flagged, by their outputs alone / by any tensor. {counted}; "
        f"{versions}; seed {result.amounts.seed}."
    )


def markdown(result: Comparison) -> str:
    """Return the table as Markdown, for a README."""
    head, *body = rows(result)
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, *body]]
    return (
        "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:], "", summary(result)])
        + "\n"
    )


def percent(some: int, of: int) -> str:
    """Return a share in percent; a few of many are never 0 %, and all but a few never 100 %."""
    if some in (0, of):
        return "0 %" if some == 0 else "100 %"
    share = 100 * some / of
    if not 0.1 <= share <= 99.9:
        return "< 0.1 %" if share < 50 else "> 99.9 %"
    return f"{share:.1f} %" if share < 10 or share > 99 else f"{share:.0f} %"


def main(json: str, readme: str) -> None:
    """Compare everything, and write the record and the table of the README: ``make readme-criteria``."""
    bugs = [bug for bug in matrix.chosen(None) if isinstance(bug, Bug)]

    def tell(backend: str, done: str) -> None:
        print(f"{backend}: {done}", file=sys.stderr)

    result = compare(bugs, matrix.mutable(None), Settings(), Amounts(), tell)
    record.write(Path(json), record.made(result.as_dict(), "criteria", "Usual criteria beside the judge"))
    write_text(Path(readme), within(Path(readme), "criteria", markdown(result)))
    print(summary(result))
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
