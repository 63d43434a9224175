"""Runs of many jobs on many backends; a worker's crash is a result."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from threading import Event
from typing import Any

from concord import backends, installation
from concord.backends.cores import available_cores
from concord.backends.interface import Run, Settings, Unsupported, variety
from concord.backends.pool import Pool
from concord.backends.wire import WorkerFailure
from concord.backends.worker import TIME_LIMIT, Worker
from concord.conformance.explain.conclusions import Conclusion, conclude
from concord.conformance.explain.family_judge import Misfit, Published, delivered, judge
from concord.conformance.judging import verdict as verdicts
from concord.conformance.judging.padding import independent_batch
from concord.conformance.judging.verdict import ACCEPTED, FAILED_WORKER, NOT_JUDGED, Result, Verdict
from concord.conformance.progress import listening
from concord.conformance.record_fields import Count, Number
from concord.spec.arrays import Shape
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import UNCOMPUTED_PADDING, parse_deviations
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights
from concord.spec.tensors import output_name
from concord.spec.text import first_line
from concord.spec.training.trajectory import Training


@dataclass(frozen=True)
class Job:
    """A run to perform and judge on every backend.

    Attributes:
        group: heading of the results: a variant or a published source.
        expectation: replacement of the reference's tensors.
        end_to_end: judge end to end even if local judgement decides.
    """

    group: str
    case: str
    dtype: str
    part: str
    config: EncoderConfig
    weights: Weights
    batch: Batch
    expectation: Published | None = None
    end_to_end: bool = True
    training: Training | None = None
    gradients: bool = True
    times: int = 1

    @property
    def name(self) -> str:
        """Name in progress messages and files."""
        return f"{self.case}-{self.dtype}"

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        """Judge a run of this job.

        Args:
            rules: precision mode whose rounding applies, if different from ``dtype``.

        Raises:
            Misfit: for unknown tensors, or wrong shapes or types.
        """
        return judge(
            self.config, self.weights, self.batch, run, self.part, self.expectation, rules, self.end_to_end
        )

    def judgeable(self, run: Run) -> Job:
        """The job without padding that the run declares uncomputed.

        Raises:
            Unsupported: if no sample remains.
        """
        if self.expectation or not parse_deviations(run.info.get("deviations", [])).get(UNCOMPUTED_PADDING):
            return self
        reduced_job = self.independent()
        if reduced_job is None:
            raise Unsupported(
                "each sample depends on padding rows, which the backend declares it does not compute"
            )
        return reduced_job

    def independent(self) -> Job | None:
        """The job with a loss independent of padding, if samples remain."""
        batch = independent_batch(self.config, self.batch, self.part)
        if batch is None:
            return None
        return self if batch is self.batch else replace(self, batch=batch)


@dataclass(frozen=True)
class Setup:
    """Settings of runs (:class:`concord.backends.worker.Worker`).

    Attributes:
        device: cpu, cuda or cuda:N.
        implementation: explicit, library, or a backend's own.
        execution: eager, compiled, unpadded or unpadded-compiled.
        asked: backends that the user named; if not installed, these are *missing*, and others *absent*.
        python: interpreters of backends in other environments.
        time_limit: seconds per run.
        memory_limit: bytes per worker; by default four fifths of the memory.
        threads: threads per worker; by default one per core.
        precision: one of :data:`concord.backends.interface.PRECISION_MODES`.
        repeat: minimum runs per job; from 2 on, differing bits are *nondeterministic*.
    """

    device: str = "cpu"
    implementation: str = "explicit"
    execution: str = "eager"
    asked: tuple[str, ...] = ()
    python: dict[str, str] = field(default_factory=dict)
    time_limit: Number = TIME_LIMIT
    memory_limit: Count | None = None
    threads: Count | None = None
    precision: str = "strict"
    deterministic: bool = False
    repeat: Count = 1

    def rules(self, dtype: str) -> str | None:
        """The mode that judges a run, if different from its dtype."""
        # Set by an implementation ``emulate:MODE``, or by TF32 products in float32.
        kind, _, mode = self.implementation.partition(":")
        return (
            mode.partition("_")[0]
            if kind == "emulate"
            else "tf32"
            if (self.precision, dtype) == ("tf32", "float32")
            else None
        )

    def how(self, dtype: str) -> Settings:
        """Settings of a run."""
        return Settings(
            dtype,
            **{entry.name: getattr(self, entry.name) for entry in fields(Settings) if entry.name != "dtype"},
        )

    def status_of(self, name: str, status: str) -> str:
        """Status of a backend whose worker failed."""
        return "missing" if status == "absent" and name in self.asked else status

    def open(self, name: str, opened: Callable[[Worker], None] = lambda worker: None, **more: Any) -> Worker:
        """Start a backend's worker (:class:`concord.backends.worker.Worker`)."""
        try:
            return backends.open(
                name,
                self.device,
                python=self.python.get(name),
                time_limit=self.time_limit,
                memory_limit=self.memory_limit,
                threads=self.threads,
                opened=opened,
                deterministic=self.deterministic,
                **more,
            )
        except WorkerFailure as failure:
            if failure.status == "absent" and name in backends.BUILT_IN:
                failure.detail += f"; install it with: {installation(name)}"
            raise


@dataclass
class Report:
    """The results of a campaign.

    Attributes:
        results: one per backend and job.
        environments: backends' descriptions, with import and run seconds and peak memory.
        seconds: total time; 0 if the runs came from files.
        notes: reasons for omitted runs, by name.
        conclusions: conclusions from all wrong tensors of a backend, once explained.
        unfinished: results missing because the campaign was stopped.
        milliseconds: a reference module's forward pass; 0 if not timed.
    """

    results: list[Result]
    environments: dict[str, dict[str, Any]]
    settings: Setup
    seconds: Number = 0.0
    notes: dict[str, str] = field(default_factory=dict)
    conclusions: list[Conclusion] = field(default_factory=list)
    unfinished: Count = 0
    milliseconds: Number = 0.0

    def explained(self) -> Report:
        """Add an explanation of each divergence."""
        if not any(result.verdict and result.verdict.judge for result in self.results):
            return self
        results, conclusions = conclude(self.results)
        return replace(self, results=results, conclusions=conclusions)

    def with_verdicts(self, change: Callable[[Verdict], Verdict]) -> Report:
        """Change each verdict."""
        return replace(
            self,
            results=[
                replace(result, verdict=result.verdict and change(result.verdict)) for result in self.results
            ],
        )

    def contradictions(self) -> Iterator[str]:
        """Yield each status that contradicts its verdict."""
        of_verdicts = {"nondeterministic": ("agrees", "undetermined"), ACCEPTED: ("diverges",)}
        for i, result in enumerate(self.results):
            outcome = result.verdict.status if result.verdict else "no verdict"
            expected = of_verdicts.get(result.status, (result.status,))
            judged = result.status in ("agrees", "diverges", "undetermined", *of_verdicts)
            if outcome not in expected if judged else result.verdict is not None:
                yield f"results[{i}].status is {result.status!r} but its tensors imply {outcome!r}"

    @property
    def exit_code(self) -> int:
        """0: all agree. 1: a divergence, refusal or nondeterminism. 3: not everything was run or judged."""
        return (
            3 if self.unfinished else exit_code_of((result.backend, result.status) for result in self.results)
        )


def exit_code_of(statuses: Iterable[tuple[str, str]]) -> int:
    """The exit code for pairs of backend and status."""
    # A backend that the user did not name may be absent.
    runs = [(backend, status) for backend, status in statuses if status != "absent"]
    present = {status for _, status in runs}
    if present & {*FAILED_WORKER, NOT_JUDGED}:
        return 3
    if present & {"diverges", "nondeterministic", "refused"}:
        return 1
    # A backend without a judged run does not agree.
    _, unjudged = verdicts.conclude(runs)
    return 3 if unjudged or "undetermined" in present or not runs else 0


# A function of a backend's name and its finished job, "started", or its current task
# (concord.conformance.progress.Underway).
Progress = Callable[[str, str], None]


def conduct(
    jobs: Sequence[Job],
    names: Iterable[str],
    settings: Setup,
    progress: Progress = lambda backend, done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Report:
    """Run every job on every backend, and judge the runs.

    Args:
        jobs: jobs in order; repeated jobs share a result.
        stopped: polled; if true, the campaign ends with the results so far.

    Raises:
        UnknownNameError: for an unknown backend, before anything runs.
    """
    backend_names = list(names)
    for name in backend_names:
        backends.resolve(name)
    started, environments = time.perf_counter(), dict[str, dict[str, Any]]()
    turns = repeated(jobs, settings.repeat)
    with Pool(min(len(backend_names), available_cores()) or 1, stopped) as pool:
        runners = [Runner(name, settings, pool, environments, progress) for name in backend_names]
        # Job by job, so that backends share a cached estimate. A backend's jobs stay in order on its single
        # worker: each waits for the previous turn.
        done = [[Event() for _ in turns] for _ in runners]
        results: list[dict[int, Result]] = [{} for _ in runners]
        pending = [Counter(map(id, turns)) for _ in runners]

        def turn(place: tuple[int, int]) -> None:
            number, which = place
            if number:
                done[which][number - 1].wait()
            try:
                if not pool.stopped:
                    runner, job = runners[which], turns[number]
                    result = runner.attempt(job)
                    if not pool.stopped:  # otherwise its worker was stopped during the job
                        results[which][id(job)] = result
                        pending[which][id(job)] -= 1
                        progress(runner.name, job.name)
            finally:
                done[which][number].set()

        pool.map(turn, itertools.product(range(len(turns)), range(len(runners))))
    all_results = [result for by_job in results for result in by_job.values()]
    unfinished = sum(count > 0 for counts in pending for count in counts.values())
    report = Report(all_results, environments, settings, time.perf_counter() - started, unfinished=unfinished)
    # A user who stopped it does not wait for explanations.
    return report.with_verdicts(Verdict.unexplained) if unfinished else report


def unseen(environment: Mapping[str, Any], device: str) -> str:
    """A message if a backend does not see a device."""
    devices = environment.get("devices", [])
    if not devices or (f"{device}:0" if device == "cuda" else device) in devices:
        return ""
    return f"does not see {device}: its devices are {', '.join(map(str, devices))}"


def deviations_of(
    description: Mapping[str, Any], device: str, implementation: str = "explicit"
) -> list[dict[str, Any]]:
    """A backend's deviations on a device."""
    further = description.get("implementation_deviations", {})
    deviations = []
    for entries in (description.get("deviations", []), further.get(implementation, [])):
        deviations += entries.get(device.partition(":")[0], []) if isinstance(entries, dict) else entries
    return deviations


def environment_of(worker: Worker, deviations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Part of a backend's description to store."""
    about = {key: value for key, value in worker.description.items() if key != "implementation_deviations"}
    return {**about, "deviations": list(deviations), "import_seconds": worker.import_seconds}


Bits = Mapping[str, tuple[str, Shape, bytes]]


@dataclass(frozen=True)
class _Earlier:
    result: Result  # combines all runs so far
    first: Bits | None  # None: the job failed and is not repeated
    turn: int  # its backend's last turn

    def words(self, job: Job, turn: int) -> str:
        between = ", after other cases had run" if turn > self.turn + 1 else ""
        first = self.result
        outcome = _verb(first.verdict.status if first.verdict else first.status)
        return (
            f"only when run again: in run {first.times + 1} of {job.times}{between}; the first run {outcome}"
        )


def _verb(status: str) -> str:
    return "is undetermined" if status == "undetermined" else status


def repeated(jobs: Sequence[Job], least: int = 1) -> list[Job]:
    """Repeat each job in place at least ``least`` times, and count it."""
    occurrences, jobs_by_id, turns = Counter(map(id, jobs)), dict[int, Job](), list[Job]()
    for job in jobs:
        extra = 0
        if id(job) not in jobs_by_id:
            extra = max(least - occurrences[id(job)], 0)
            jobs_by_id[id(job)] = replace(job, times=occurrences[id(job)] + extra)
        turns += [jobs_by_id[id(job)]] * (1 + extra)
    return turns


class Runner:
    """Jobs of one backend on one worker."""

    def __init__(
        self,
        name: str,
        settings: Setup,
        pool: Pool,
        environments: dict[str, dict[str, Any]],
        progress: Progress = lambda backend, done: None,
    ) -> None:
        self.name, self.settings = name, settings
        self.environments, self.progress = environments, progress
        self.earlier: dict[int, _Earlier] = {}
        # A single worker reveals state that a backend keeps between runs.
        self.turn = 0
        self.supervisor = pool.supervise(partial(settings.open, name), started=self.started)

    def attempt(self, job: Job) -> Result:
        """Run and judge a job; return the result of all runs so far."""
        self.turn += 1
        started, before = time.perf_counter(), self.earlier.pop(id(job), None)
        if before is None:
            self.supervisor.renew()
        now = before if before and before.first is None else self._made(job, before)
        if before and before.result.status == "diverges" and now.result.verdict is None:
            now = replace(before, first=None)  # a failure does not hide a divergence
        if now.result.times < job.times:
            self.earlier[id(job)] = now
        if self.name in self.environments:
            spent = self.environments[self.name].get("run_seconds", 0.0)
            self.note("run_seconds", spent + time.perf_counter() - started)
        return now.result

    def _made(self, job: Job, before: _Earlier | None) -> _Earlier:
        started = time.perf_counter()
        again = before.words(job, self.turn) if before else ""

        def made(status: str, detail: str = "", first: Bits | None = None, **more: Any) -> _Earlier:
            seconds = time.perf_counter() - started + (before.result.seconds if before else 0)
            detail = f"{detail} ({again})" if again and detail else detail
            times = before.result.times + 1 if before else 1
            about: dict[str, Any] = {"part": job.part, "detail": detail, "seconds": seconds, "times": times}
            result = Result(self.name, job.group, job.case, job.dtype, status, **about, **more)
            return _Earlier(result, first, self.turn)

        try:
            run = self.run(job, self.settings.precision)
            if (judgeable := job.judgeable(run)) is not job:
                job, run = judgeable, self.run(judgeable, self.settings.precision)
        except Exception as error:
            status, detail, stderr = failure_of(error) or own_failure("running the job", error)
            return made(self.settings.status_of(self.name, status), detail, stderr=stderr)
        tensors = delivered(run, output_name(job.config, job.part)) if job.times > 1 else {}
        bits = {name: (str(tensor.dtype), tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}
        first = bits if before is None else before.first or {}
        others = {name for name in {*first, *bits} if first.get(name) != bits.get(name)}
        try:
            verdict, attribution = self._judged(job, run, before, others, again)
        except Misfit as error:
            return made("broken", f"its answer cannot be judged: {'; '.join(error.problems)}")
        except Exception as error:  # the returned tensors are valid, so the fault is Concord's
            status, detail, stderr = own_failure("judging", error)
            return made(status, detail, stderr=stderr)
        others |= {*before.result.differing} if before else set()
        order = {row.tensor: place for place, row in enumerate(verdict.table)}
        differing = tuple(sorted(others, key=lambda name: (order.get(name, len(order)), name)))
        changes = self.settings.repeat > 1 and differing and verdict.status != "diverges"
        status = "nondeterministic" if changes else verdict.status
        return made(status, first=first, verdict=verdict, attribution=attribution, differing=differing)

    def _judged(
        self, job: Job, run: Run, before: _Earlier | None, others: set[str], again: str
    ) -> tuple[Verdict, str]:
        earlier = before and before.result
        # Equal bits have equal verdicts.
        if earlier and earlier.verdict and (not others or earlier.status == "diverges"):
            return earlier.verdict, earlier.attribution
        with listening(lambda text: self.progress(self.name, text)):
            verdict = job.judge(run, self.settings.rules(job.dtype))
        if not (earlier and earlier.verdict):
            return verdict, self.attribute(job, run, verdict)
        order = ("agrees", "undetermined", "diverges")
        if order.index(verdict.status) > order.index(earlier.verdict.status):
            return verdict, f"{_verb(verdict.status)} {again}"
        return earlier.verdict, earlier.attribution

    def attribute(self, job: Job, run: Run, verdict: Verdict) -> str:
        """Record agreement in the strict precision."""
        if verdict.status != "diverges" or self.settings.precision == "strict":
            return ""
        try:
            strict = self.run(job, "strict")
            if job.judge(strict).status != "agrees":
                return ""
        except (Unsupported, WorkerFailure, SpecError):
            return ""
        before, after = (outcome.info.get("precision_switches", {}) for outcome in (run, strict))
        others = ", ".join(f"{name}={value}" for name, value in before.items() if after.get(name) != value)
        mode = f"{self.settings.precision} precision{f' ({others})' if others else ''}"
        return f"diverges only in {mode}, and agrees in strict: the precision is the cause, not the port"

    def run(self, job: Job, precision: str) -> Run:
        """Run a job in a precision mode."""
        settings = self.settings
        problem = (job.config, job.weights, job.batch, job.part, job.dtype)

        def ask(worker: Worker) -> Run:
            return worker.run(
                *problem,
                settings.implementation,
                execution=settings.execution,
                taps=job.training is None,
                gradients=job.gradients,
                precision=precision,
                # Published gradients do not include taps.
                tap_gradients=job.gradients and job.expectation is None,
                training=job.training,
            )

        outcome = self.supervisor.do(ask)
        if self.supervisor.worker:
            self.note(
                "peak_memory_bytes",
                max(
                    self.supervisor.worker.peak_memory,
                    self.environments[self.name].get("peak_memory_bytes", 0),
                ),
            )
        if precision == settings.precision and "precision_switches" in outcome.info:
            self.note("precision_switches", outcome.info["precision_switches"])
        stated = self.environments[self.name].get("deviations", [])
        outcome.info.setdefault("deviations", stated)
        self.note(
            "deviations",
            [*stated, *(entry for entry in outcome.info["deviations"] if entry not in stated)],
        )  # such as an optimizer's
        return outcome

    def started(self, worker: Worker) -> None:
        """Store a backend's description."""
        self.environments[self.name] = {
            **self.environments.get(self.name, {}),
            **environment_of(
                worker,
                deviations_of(
                    worker.description,
                    self.settings.device,
                    variety(self.settings.implementation, self.settings.execution),
                ),
            ),
        }
        self.progress(self.name, "started")

    def note(self, key: str, value: Any) -> None:
        """Store a fact about the environment."""
        self.environments.setdefault(self.name, {})[key] = value


def failure_of(error: Exception) -> tuple[str, str, str] | None:
    """Status, detail and output of a worker failure, else None."""
    if isinstance(error, WorkerFailure):
        return error.status, error.detail, error.stderr
    if isinstance(error, SpecError):
        return "refused", "; ".join(error.problems), ""
    return ("unsupported", str(error), "") if isinstance(error, Unsupported) else None


def own_failure(doing: str, error: Exception) -> tuple[str, str, str]:
    """Like :func:`failure_of`, for an error in Concord."""
    return NOT_JUDGED, own_bug(doing, error), traceback.format_exc()


def own_bug(doing: str, error: Exception) -> str:
    """Describe an error in Concord."""
    return f"a bug in Concord while {doing}: {type(error).__name__}: {first_line(error)}"
