"""Backends beside the oracle, step by step: each step from the oracle's state, or each from its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from concord.backends.interface import Run, Stepping, Unsupported
from concord.backends.training_sessions import arrays_of
from concord.backends.worker import WorkerFailure
from concord.conformance.campaign import own_fault
from concord.conformance.expectation import Array, Expectation, JudgedTraining
from concord.conformance.judging import NEAR, judge
from concord.conformance.lockstep.cause import cause_of
from concord.conformance.lockstep.envelope import Envelopes, expectation, given_norm, in_range, of_training
from concord.conformance.lockstep.made import MadeStep, Start
from concord.conformance.lockstep.outcome import Divergence, Recorder, Track
from concord.conformance.lockstep.preflight import FEW
from concord.conformance.verdict import NOT_JUDGED, Verdict, conclude, section_of
from concord.spec.batch import Batch
from concord.spec.deviations import NONE, Deviations
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import shown
from concord.spec.training.optimizers import slots

Tell = Callable[[str, int], None]
"""Takes the name of a backend and how many steps it has made."""


@dataclass
class Entrant:
    """A backend in lockstep.

    Attributes:
        deviations: that it declares.
        session: its training.
        resumed: the step before which it goes on from a checkpoint of its own; 0: it does not.
    """

    name: str
    session: Stepping
    deviations: Deviations = field(default_factory=lambda: NONE)
    resumed: int = 0


@dataclass(frozen=True)
class Made:
    """What came of a step that a backend was asked for.

    Attributes:
        seconds: that it took.
        delivered: what was reported of it; None: it could not be made.
        failure: why: a status, a line, and the last lines of the worker.
    """

    seconds: float
    delivered: dict[str, Array] | None = None
    failure: tuple[str, str, str] = ("", "", "")


def resynchronised(
    case: JudgedTraining,
    entrants: Sequence[Entrant],
    steps: int | None = None,
    stop_first: bool = False,
    tell: Tell | None = None,
) -> list[Track]:
    """Let backends train, each step from the oracle's weights and state, so that a fault shows at its own step.

    Args:
        case: the training; its deviations are of no account.
        steps: how many to make; by default all windows.
        stop_first: whether a backend is left out after its first divergence.
        tell: is told of progress.
    """
    return _Lockstep(case, entrants, True, stop_first, tell).run(steps)


def free_running(
    case: JudgedTraining,
    entrants: Sequence[Entrant],
    steps: int | None = None,
    stop_first: bool = False,
    tell: Tell | None = None,
) -> list[Track]:
    """Let backends train by themselves, and judge each step by what rounding alone, carried through the steps, makes of correct training.

    The arguments are those of :func:`resynchronised`.
    """
    return _Lockstep(case, entrants, False, stop_first, tell).run(steps)


def first_divergence(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0, explaining: bool = True
) -> Divergence | None:
    """Return where training that a backend made by itself first left its tolerance, and why.

    Args:
        case: all of whose steps are reported, with the deviations of the backend.
        made: what was reported of each step, without the number of the step.
        resumed: the step before which it went on from a checkpoint of its own; 0: it did not.
        explaining: whether a cause is looked for.

    Raises:
        SpecError: if a section was judged at no step, so that nobody can say.
    """
    whole, start, statuses = of_training(case), None, set[tuple[str, str]]()
    target, sigmas, agreed = precision(case.dtype), dict[str, Array](), list[MadeStep]()
    state = {name: target.round(values) for name, values in case.start.items()}
    for step, (window, found) in enumerate(zip(case.training.windows, made, strict=True)):
        prefix = f"steps.{step}."
        names = [name for name in whole.values if name.startswith(prefix)]
        values, tolerated = ({name: table[name] for name in names} for table in (whole.values, whole.sigmas))
        expected = expectation(case, values, tolerated)
        delivered = {f"{prefix}{name}": np.asarray(array) for name, array in found.items()}
        verdict = judged(case, window, delivered, in_range(expected, state))
        earlier = replace(start, earlier=None) if start else None
        start = Start(state, step, window, sigmas, earlier, resumed)
        first = verdict.first_divergence
        one = MadeStep(case, start, delivered, expected, first.tensor if first else "")
        if first is not None:
            also = sum(row.status == "diverges" for row in verdict.table) - 1
            return Divergence(step, first, cause_of(one, agreed) if explaining else None, also)
        statuses |= {(section_of(row.tensor), row.status) for row in verdict.table}
        agreed.append(one)
        sigmas = carried(case, step, expected)
        state = {name: target.round(whole.values[f"{prefix}{name}"]) for name in sigmas}
    refuse_unjudged(statuses)
    return None


def refuse_unjudged(statuses: Iterable[tuple[str, str]]) -> None:
    """Refuse to say that training is right of which a section was judged at no step.

    Args:
        statuses: as :func:`concord.conformance.verdict.conclude` takes them.

    Raises:
        SpecError: naming the sections.
    """
    status, unjudged = conclude(statuses)
    if status == "undetermined":
        raise SpecError(
            f"no step of this training was judged in its {', '.join(unjudged) or 'tensors'}: it neither agrees nor diverges"
        )


def carried(case: JudgedTraining, step: int, expected: Expectation) -> dict[str, Array]:
    """Return how far correct training may be from the oracle after a step: sigma of the state that the next one starts from."""
    prefix, kept = f"steps.{step}.", ("parameters", *slots(case.training.recipe))
    return {
        name.removeprefix(prefix): sigma
        for name, sigma in expected.sigmas.items()
        if name.split(".")[2] in kept
    }


def judged(
    case: JudgedTraining, window: Sequence[Batch], delivered: dict[str, Array], expected: Expectation
) -> Verdict:
    """Judge what was reported of a step."""
    nothing = np.zeros(0)
    run = Run(nothing, nothing, dtype=case.dtype, requested=("steps",), steps=delivered)
    return judge(
        case.config, case.weights, window[0], run, case.part, lambda deviations: expected, dtype=case.dtype
    )


def failure_of(error: Exception) -> tuple[str, str, str] | None:
    """Return what is said of a backend that an error kept from going on: a status, a line, and the last lines of its worker; None for an error that no worker told."""
    if isinstance(error, WorkerFailure):
        return error.status, error.detail, error.stderr
    if isinstance(error, SpecError):
        return "refused", "; ".join(error.problems), ""
    return ("unsupported", str(error), "") if isinstance(error, Unsupported) else None


def misfits(delivered: Mapping[str, Array], expected: Expectation) -> list[str]:
    """Return what of a reported step nobody knows, and what has a shape or type that it must not have; the first of each kind is shown."""
    unknown, misshapen, mistyped = (list[str]() for _ in range(3))
    for name, array in delivered.items():
        said, right = repr(shown(name.split(".", 2)[2])), expected.values.get(name)
        if right is None:
            unknown.append(said)
        elif array.shape != right.shape:
            misshapen.append(f"{said} of shape {array.shape} but must be {right.shape}")
        elif array.dtype.kind != "f":
            mistyped.append(f"{said} of dtype {array.dtype} but must be a floating-point type")
    sections = ", ".join(dict.fromkeys(name.split(".")[2] for name in expected.values))
    problems = [f"{', '.join(unknown[:FEW])}, but this training has only {sections}"] if unknown else []
    return problems + [
        first + (f" (and {len(more)} like it)" if more else "")
        for first, *more in filter(None, (misshapen, mistyped))
    ]


class _Lockstep:
    """Backends and the oracle in one training."""

    def __init__(
        self,
        case: JudgedTraining,
        entrants: Sequence[Entrant],
        again: bool,
        stop_first: bool,
        tell: Tell | None,
    ) -> None:
        self.case, self.entrants, self.again, self.stop_first = (
            replace(case, deviations=NONE),
            list(entrants),
            again,
            stop_first,
        )
        self.tell = tell or (lambda name, steps: None)
        self.recorders = {entrant.name: Recorder(entrant.name) for entrant in entrants}
        self.envelopes = Envelopes(self.case, [entrant.deviations for entrant in entrants], again)
        self.state: dict[str, Array] = self.rounded(self.case.start)
        self.earlier: Start | None = None
        self.carried: dict[str, dict[str, Array]] = {}

    def rounded(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return a state as the precision holds it."""
        return {name: precision(self.case.dtype).round(values) for name, values in state.items()}

    def run(self, steps: int | None) -> list[Track]:
        """Make the steps: while one is judged, the backends make the next."""
        windows = self.case.training.windows[:steps]
        with ExitStack() as stack:
            # Each backend answers in its own time, and one request after the other.
            lines = {
                entrant.name: stack.enter_context(ThreadPoolExecutor(max_workers=1))
                for entrant in self.entrants
            }
            asked = self.asked(lines, 0) if windows else {}
            for step, window in enumerate(windows):
                going = [entrant for entrant in self.entrants if self.goes_on(entrant.name)]
                if not going:
                    break
                start = Start(self.state, step, window)
                self.envelopes.advance(
                    self.given(step), step, window, [entrant.deviations for entrant in going]
                )
                self.state = self.rounded(self.envelopes.state())
                following = self.asked(lines, step + 1) if step + 1 < len(windows) else {}
                for entrant, expectation in zip(going, self.envelopes.around(), strict=True):
                    self.receive(entrant, start, asked[entrant.name].result(), expectation)
                self.earlier, asked = start, following
        for recorder in self.recorders.values():
            self.explain(recorder)
        return [recorder.track() for recorder in self.recorders.values()]

    def explain(self, recorder: Recorder) -> None:
        """Look for the cause of a first divergence."""
        if recorder.first is None:
            return
        try:
            cause = recorder.cause()
            recorder.first = replace(recorder.first, cause=cause)
        except Exception as error:  # the divergence stands
            recorder.failure = (
                NOT_JUDGED,
                own_fault(f"explaining step {recorder.first.step + 1}", error),
                traceback.format_exc(),
            )

    def given(self, step: int) -> Mapping[str, Array] | None:
        """Return the state that a step is made from; None: where the step before ended."""
        return self.state if self.again or step == 0 else None

    def goes_on(self, name: str) -> bool:
        recorder = self.recorders[name]
        return recorder.failure is None and not (self.stop_first and recorder.first)

    def asked(self, lines: Mapping[str, ThreadPoolExecutor], step: int) -> dict[str, Future[Made]]:
        """Ask every backend that goes on for a step from where the oracle stands."""
        state, window = self.given(step), self.case.training.windows[step]
        return {
            entrant.name: lines[entrant.name].submit(self.made, entrant, state, step, window)
            for entrant in self.entrants
            if self.goes_on(entrant.name)
        }

    def made(
        self, entrant: Entrant, state: Mapping[str, Array] | None, step: int, window: Sequence[Batch]
    ) -> Made:
        """Return what a backend reports of a step, or what kept it from making it."""
        started = time.perf_counter()
        try:
            if state is not None:
                entrant.session.load(state, step)
            found = arrays_of("step", entrant.session.step(window, report=True))
        except Exception as error:  # whatever keeps one backend from going on keeps no other
            failure = failure_of(error) or (
                "error",
                f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
                traceback.format_exc(),
            )
            return Made(time.perf_counter() - started, failure=failure)
        return Made(
            time.perf_counter() - started, {f"steps.{step}.{name}": array for name, array in found.items()}
        )

    def receive(self, entrant: Entrant, start: Start, made: Made, expected: Expectation) -> None:
        """Take up what came of a step."""
        recorder = self.recorders[entrant.name]
        recorder.seconds += made.seconds
        if made.delivered is None:
            recorder.failure = made.failure
            return
        wrong = misfits(made.delivered, expected)
        if wrong:
            recorder.failure = ("broken", f"step() returned {'; '.join(wrong)}", "")
            return
        try:
            self.take_up(entrant, start, made.delivered, expected)
        except Exception as error:  # what was delivered is in order
            recorder.failure = (
                NOT_JUDGED,
                own_fault(f"judging step {start.step + 1}", error),
                traceback.format_exc(),
            )
        self.tell(entrant.name, start.step + 1)

    def take_up(
        self, entrant: Entrant, start: Start, delivered: dict[str, Array], expected: Expectation
    ) -> None:
        """Judge a step; what comes near a tolerance by a first look is judged by the whole."""
        recorder, step, window, case = (
            self.recorders[entrant.name],
            start.step,
            start.batches,
            replace(self.case, deviations=entrant.deviations),
        )
        expected = self.seen(case, start, delivered, expected)
        verdict = judged(case, window, delivered, expected)
        if self.again and (verdict.status == "diverges" or verdict.worst > NEAR) and recorder.first is None:
            expected = self.seen(
                case, start, delivered, self.envelopes.whole(start.state, step, window, entrant.deviations)
            )
            verdict = judged(case, window, delivered, expected)
        first = verdict.first_divergence
        resumed = step if self.again else entrant.resumed
        start = replace(
            start,
            carried=self.carried.get(entrant.name, {}),
            earlier=self.earlier and replace(self.earlier, earlier=None),
            resumed=resumed,
        )
        recorder.witness(
            MadeStep(case, start, delivered, expected, first.tensor if first else ""), self.again
        )
        recorder.add(step, verdict, delivered, expected)
        if not self.again:
            self.carried[entrant.name] = carried(self.case, step, expected)

    def seen(
        self, case: JudgedTraining, start: Start, delivered: Mapping[str, Array], expected: Expectation
    ) -> Expectation:
        """Return what is expected of a step of a run: by its own norm, where each step is judged by itself, and of what is in range."""
        norm = delivered.get(f"steps.{start.step}.norm", np.zeros(0))
        if (
            self.again
            and norm.shape == ()
            and norm.dtype.kind == "f"
            and np.isfinite(norm)
            and f"steps.{start.step}.norm" in expected.values
        ):
            expected = given_norm(case, start.state, start.step, start.batches, expected, norm)
        return in_range(expected, start.state)
