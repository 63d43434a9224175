"""Runs of backends in lockstep with the reference.

Steps from the reference's state are judged. From a backend's own state only curves are kept, since even a
correct backend drifts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from concord.backends import heaps, machine
from concord.backends.cores import available_cores
from concord.backends.interface import Request, TrainingSession
from concord.backends.wire import arrays_of
from concord.conformance.judging.expectation import JudgedTraining
from concord.conformance.judging.verdict import Row, conclude, section_of
from concord.conformance.lockstep.cause import cause_of
from concord.conformance.lockstep.envelope import (
    Envelope,
    Start,
    carried,
    expectation,
    in_range,
    of_training,
    rounded,
)
from concord.conformance.lockstep.outcome import (
    MODES,
    Curve,
    Divergence,
    Lockstep,
    LockstepCase,
    Track,
    judged,
)
from concord.conformance.lockstep.training_step import DeliveredStep
from concord.conformance.progress import listening
from concord.conformance.run.campaign import Setup, environment_of, failure_of, own_failure
from concord.conformance.run.record import plain
from concord.conformance.wording import gather
from concord.spec.arrays import Array
from concord.spec.batch import Batch
from concord.spec.deviations import NONE, Deviations, in_precision, parse_deviations
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import first_line, first_of, shown
from concord.spec.training.recipe import rounded_hyperparameters

# Number of divergent steps for distinguishing causes.
WITNESSES = 3

# For a larger number of weights, only the first divergent step is kept, since each contains the whole model.
# For the same reason, backends do not run the next step while the last is judged.
WITNESSED = 1_300_000

# The step that continues from a backend's own state. If every step were loaded, nothing would show what a
# backend reports but does not keep, such as an update or the number of steps. The next one runs twice from a
# given state: otherwise, a backend whose `load` ignores the number of steps would already be at it.
CONTINUED = 1

# Peak memory of Concord itself and of a worker, in copies of the model. Measured with 31 million parameters.
OWN, WORKER = 56, 20

# A function of a backend's name, its number of finished steps, and its current task.
Callback = Callable[[str, int, str], None]


@dataclass
class Candidate:
    """A backend in lockstep."""

    name: str
    session: TrainingSession
    deviations: Deviations = field(default_factory=lambda: NONE)
    environment: dict[str, Any] = field(default_factory=dict)  # its description
    judged: bool = True  # False: only curves are kept

    def __post_init__(self) -> None:
        self.failure: tuple[str, str, str] | None = None  # status, detail, last output
        self.steps, self.diverged, self.seconds = 0, 0, 0.0
        self.rows: dict[str, list[Row]] = {}  # worst row of each step, by section
        self.kept: dict[str, Array] = {}  # the report before the step that continues from it
        # Steps for distinguishing causes: the first and last agreeing steps, and the first divergent ones.
        self.agreed: list[DeliveredStep] = []
        self.diverging: list[DeliveredStep] = []

    def step(
        self, state: Mapping[str, Array] | None, step: int, batches: Sequence[Batch]
    ) -> dict[str, Array]:
        """Run a step, and return its report."""
        started = time.perf_counter()
        try:
            times = 2 if state and step == CONTINUED + 1 else 1
            for _ in range(times):
                if state is not None:
                    self.session.load(state, step)
                reported = arrays_of("step()", self.session.step(batches, report=True))
        finally:
            self.seconds += time.perf_counter() - started
        return {f"steps.{step}.{name}": array for name, array in reported.items()}

    def receive(self, future: Future[dict[str, Array]], envelope: Envelope, start: Start) -> None:
        """Judge a finished step, or keep its failure."""
        try:
            delivered = future.result()
        except Exception as error:  # a backend's failure does not stop the others
            self.failure = failure_of(error) or (
                "error",
                f"{type(error).__name__}: {first_line(error)}",
                traceback.format_exc(),
            )
            return
        if wrong := misfits(delivered, envelope.values):
            self.failure = ("broken", f"step() returned {wrong}", "")
            return
        try:
            self.judge(delivered, envelope, start)
        except Exception as error:  # the returned tensors are valid, so the fault is Concord's
            self.fail(f"judging step {start.step + 1}", error)

    def judge(self, delivered: dict[str, Array], envelope: Envelope, start: Start) -> None:
        """Judge a step."""
        if self.judged and start.step == CONTINUED:
            kept, prefix = self.kept, f"steps.{start.step - 1}."
            state = {
                name: kept.get(prefix + name, array)
                for name, array in start.state.items()
                if prefix + name in kept or name.startswith("parameters.")
            }
            start = replace(start, state=state)
            envelope.advance(start)
        else:
            start = replace(start, resumed=start.step)
        # After a divergence, a first look suffices, since the verdict is final.
        looks = (False, True) if self.judged and not self.diverging else (False,)
        values = envelope.exact_values(delivered)  # once for both looks
        expected = (partial(envelope.of_run, values, full) for full in looks)
        self.add(DeliveredStep(envelope.case, start, delivered, *expected))
        self.kept = delivered if start.step < CONTINUED else {}

    def add(self, step: DeliveredStep) -> None:
        """Keep a step's outcome."""
        large = step.case.elements > WITNESSED
        if self.judged and step.tensor:
            self.diverged += 1
            if not self.diverging or (not large and len(self.diverging) < WITNESSES):
                self.diverging.append(step)
        elif not self.diverging and not large:
            self.agreed = [*self.agreed[:1], step]
        self.steps += 1
        for section, rows in gather(step.verdict.table, lambda row: section_of(row.tensor)).items():
            worst = max(rows, key=lambda row: (judged(row), row.ratio))
            self.rows.setdefault(section, []).append(worst)

    def fail(self, doing: str, error: Exception) -> None:
        """Keep an error in Concord."""
        self.failure = own_failure(doing, error)

    def track(self) -> Track:
        """Backend's track, with the first divergence explained."""
        first = None
        if self.diverging:
            first_step, *more = self.diverging
            first = Divergence.of(first_step.verdict)
            try:
                first = replace(first, cause=cause_of(first_step, [*self.agreed, *more]))
            except Exception as error:  # the divergence is still valid
                self.fail(f"explaining step {first.step + 1}", error)
        status, _ = conclude((section, row.status) for section, rows in self.rows.items() for row in rows)
        status, detail, stderr = self.failure or (status if self.judged else "undetermined", "", "")
        return Track(
            self.name,
            "diverges" if self.diverged else status,
            self.steps,
            self.diverged,
            tuple(Curve.of(section, rows) for section, rows in self.rows.items()),
            first,
            detail,
            stderr,
            self.seconds,
        )


def misfits(delivered: Mapping[str, Array], expected: Mapping[str, Array]) -> str:
    """Describe unknown or misshapen tensors."""
    problems = list[str]()
    for name, array in delivered.items():
        quoted, right = repr(shown(name.split(".", 2)[2])), expected.get(name)
        if right is None:
            problems.append(f"{quoted}, which this training does not have")
        elif array.shape != right.shape:
            problems.append(f"{quoted} of shape {array.shape}, which must be {right.shape}")
        elif array.dtype.kind != "f":
            problems.append(f"{quoted} of dtype {array.dtype}, which must be a floating-point type")
    return first_of(problems, 3)


def in_lockstep(
    resynchronise: bool,
    case: JudgedTraining,
    candidates: Sequence[Candidate],
    callback: Callback = lambda name, steps, now: None,
) -> list[Track]:
    """Train backends in lockstep with the reference.

    Args:
        resynchronise: whether each step but :data:`CONTINUED` starts from the reference's state, and is
            judged.
    """
    # One envelope per set of deviations; the one without deviations gives the reference's state. When steps
    # start from it, a bug appears at its own step, unaffected by the rounding of earlier steps.
    envelopes = {
        frozenset(member.items()): Envelope(replace(case, deviations=member), resynchronised=True)
        for member in (NONE, *(candidate.deviations for candidate in candidates))
    }
    batches = case.training.steps
    for candidate in candidates:
        candidate.judged = resynchronise
    with ExitStack() as stack:
        # Each backend processes its requests in order, and runs the next step while the last is judged.
        lines = [ThreadPoolExecutor(max_workers=1) for _ in candidates]
        for line in lines:  # after Ctrl-C, a step may still run for a minute: its worker is closed instead
            stack.callback(line.shutdown, wait=False, cancel_futures=True)

        def ask(state: Mapping[str, Array], step: int) -> list[Any]:
            loaded = step == 0 or (resynchronise and step != CONTINUED)
            return [
                (candidate, line.submit(candidate.step, state if loaded else None, step, batches[step]))
                for candidate, line in zip(candidates, lines, strict=True)
                if step < len(batches) and not candidate.failure
            ]

        state, earlier = rounded(case, case.start), None
        requests = ask(state, 0)
        for step in range(len(batches)):
            if not requests:
                break
            start = Start(state, step, batches[step], earlier=earlier)
            for envelope in envelopes.values():
                envelope.advance(start)
            state = envelopes[frozenset()].truth.state()
            state = rounded(case, state) if resynchronise else state
            following = [] if case.elements > WITNESSED else ask(state, step + 1)
            while requests:
                member, answer = requests.pop(0)
                with listening(partial(callback, member.name, step)):
                    member.receive(answer, envelopes[frozenset(member.deviations.items())], start)
                del answer  # which keeps the whole report
                callback(member.name, step + 1, "")
            requests = [entry for entry in following or ask(state, step + 1) if not entry[0].failure]
            earlier = replace(start, earlier=None)
    return [candidate.track() for candidate in candidates]


resynchronised, free_running = partial(in_lockstep, True), partial(in_lockstep, False)


# With workers.


def require_memory(case: JudgedTraining, names: Sequence[str]) -> None:
    """Refuse a training that does not fit in the available memory.

    Raises:
        SpecError: with the memory that it needs.
    """
    machine.require(
        (OWN + WORKER * len(names)) * case.elements * precision(case.dtype).storage.itemsize,
        "name fewer backends, or train a model with a smaller vocabulary or fewer layers",
    )


def conduct(
    case: JudgedTraining,
    names: Sequence[str],
    settings: Setup,
    mode: str = MODES[0],
    callback: Callback = lambda name, steps, now: None,
) -> Lockstep:
    """Train backends in workers, which by default share the cores."""
    heaps.share()
    started, cores = time.perf_counter(), available_cores()
    # With more threads than cores, small products take ten times as long.
    share = max(1, cores // (len(names) + 1))
    settings = settings if settings.threads else replace(settings, threads=share)
    with ExitStack() as stack, threadpool_limits(share, user_api="blas"):
        with ThreadPoolExecutor(max_workers=cores) as pool:
            places = list(pool.map(lambda name: opened(name, case, settings, stack), names))
        candidates = [place for place in places if isinstance(place, Candidate)]
        tracks = in_lockstep(mode == MODES[0], case, candidates, callback)
    tracks += [place for place in places if isinstance(place, Track)]
    return Lockstep(
        mode,
        case.dtype,
        about(case, settings),
        tuple(sorted(tracks, key=lambda track: list(names).index(track.backend))),
        {candidate.name: candidate.environment for candidate in candidates},
        time.perf_counter() - started,
        rounded_hyperparameters(case.training.recipe, case.dtype),
    )


def opened(name: str, case: JudgedTraining, settings: Setup, stack: ExitStack) -> Candidate | Track:
    """Open a training session, or return a failed track."""
    try:
        worker = stack.enter_context(settings.open(name))
        session = worker.train(
            Request(
                case.config,
                case.weights,
                case.training.steps[0][0],
                case.part,
                **asdict(settings.how(case.dtype)),
                taps=False,
                gradients=False,
                training=replace(case.training, steps=[]),  # batches are sent with steps
            )
        )
        stated = session.info().get("deviations", [])
        return Candidate(
            name,
            session,
            in_precision(parse_deviations(stated), case.dtype),
            environment_of(worker, stated),
        )
    except Exception as error:  # a backend's failure does not stop the others
        status, detail, stderr = failure_of(error) or own_failure("opening the backend", error)
        return Track(name, settings.status_of(name, status), detail=detail, stderr=stderr)


def about(case: JudgedTraining, settings: Setup) -> LockstepCase:
    """Describe the training."""
    training = case.training
    return LockstepCase(
        len(training.steps), training.seed, case.part, case.config, plain(training.recipe.as_dict()), settings
    )


# Separate training runs.


def judged_steps(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0
) -> Iterator[DeliveredStep]:
    """Yield the steps of a separate run, up to the first divergence.

    Args:
        case: the training, with the backend's deviations; it reports every step.
        resumed: the step at which it resumed from a checkpoint, or 0.

    Raises:
        SpecError: at the end, if a section was never judged.
    """
    training, start, statuses = of_training(case), None, set[tuple[str, str]]()
    sigmas, state = dict[str, Array](), rounded(case, case.start)
    for step, (batches, reported) in enumerate(zip(case.training.steps, made, strict=True)):
        prefix = f"steps.{step}."
        values, tolerated = (
            {name: array for name, array in table.items() if name.startswith(prefix)}
            for table in (training.values, training.sigmas)
        )
        expected = expectation(case, values, tolerated)
        start = Start(state, step, batches, sigmas, start and replace(start, earlier=None), resumed)
        delivered = {f"{prefix}{name}": np.asarray(array) for name, array in reported.items()}
        delivered_step = DeliveredStep(case, start, delivered, partial(in_range, expected, state))
        yield delivered_step
        if delivered_step.tensor:
            return
        statuses |= {(section_of(row.tensor), row.status) for row in delivered_step.verdict.table}
        sigmas = carried(case, step, expected)
        state = rounded(case, {name: values[f"{prefix}{name}"] for name in sigmas})
    status, unjudged = conclude(statuses)
    if status == "undetermined":
        sections = ", ".join(unjudged) or "tensors"
        raise SpecError(f"no step judged the {sections} of this training: it neither agrees nor diverges")


def first_divergence(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0, explaining: bool = True
) -> Divergence | None:
    """First divergence of training, and perhaps its cause."""
    *agreed, last = judged_steps(case, made, resumed)
    if not last.tensor:
        return None
    return replace(Divergence.of(last.verdict), cause=cause_of(last, agreed) if explaining else None)
