"""Backends beside the oracle, step by step: each step from the oracle's state, or each from its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from concord.backends.interface import Run, Stepping, Unsupported
from concord.backends.wire import arrays_of
from concord.backends.worker import WorkerFailure
from concord.conformance.expectation import Array, Expectation, JudgedTraining
from concord.conformance.judging import NEAR, judge
from concord.conformance.lockstep.cause import cause_of
from concord.conformance.lockstep.envelope import (
    Envelopes,
    Start,
    expectation,
    given_norm,
    in_range,
    of_training,
)
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.lockstep.outcome import Divergence, Recorder, Track
from concord.conformance.lockstep.preflight import FEW
from concord.conformance.verdict import Verdict, conclude, section_of
from concord.spec.batch import Batch
from concord.spec.deviations import NONE, Deviations
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import shown
from concord.spec.training.optimizers import slots

Callback = Callable[[str, int], None]
"""Takes the name of a backend and how many steps it has made."""


@dataclass
class Candidate:
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
    delivered: dict[str, Array] | None
    failure: tuple[str, str, str]


def resynchronised(case: JudgedTraining, candidates: Sequence[Candidate], **how: Any) -> list[Track]:
    """Let backends train, each step from the oracle's weights and state, so that a bug shows at its own step.

    Args:
        case: the training; its deviations are of no account.
        how: ``steps``, how many to make, by default all; ``stop_first``, whether a backend is left out
            after its first divergence; ``callback``, told of progress (:data:`Callback`).
    """
    return _Lockstep(True, case, candidates, **how).run()


def free_running(case: JudgedTraining, candidates: Sequence[Candidate], **how: Any) -> list[Track]:
    """Let backends train by themselves; rounding is carried through the steps.

    The arguments are those of :func:`resynchronised`.
    """
    return _Lockstep(False, case, candidates, **how).run()


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
    for step, (batches, found) in enumerate(zip(case.training.steps, made, strict=True)):
        prefix = f"steps.{step}."
        names = [name for name in whole.values if name.startswith(prefix)]
        values, tolerated = ({name: table[name] for name in names} for table in (whole.values, whole.sigmas))
        expected = expectation(case, values, tolerated)
        delivered = {f"{prefix}{name}": np.asarray(array) for name, array in found.items()}
        verdict = judged(case, batches, delivered, in_range(expected, state))
        earlier = replace(start, earlier=None) if start else None
        start = Start(state, step, batches, sigmas, earlier, resumed)
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
        sections = ", ".join(unjudged) or "tensors"
        raise SpecError(
            f"no step of this training was judged in its {sections}: it neither agrees nor diverges"
        )


def carried(case: JudgedTraining, step: int, expected: Expectation) -> dict[str, Array]:
    """Return how far correct training may be from the oracle after a step: sigma of the next one's state."""
    prefix, kept = f"steps.{step}.", ("parameters", *slots(case.training.recipe))
    return {
        name.removeprefix(prefix): sigma
        for name, sigma in expected.sigmas.items()
        if name.split(".")[2] in kept
    }


def judged(
    case: JudgedTraining, batches: Sequence[Batch], delivered: dict[str, Array], expected: Expectation
) -> Verdict:
    """Judge what was reported of a step."""
    nothing = np.zeros(0)
    run = Run(nothing, nothing, dtype=case.dtype, requested=("steps",), steps=delivered)
    return judge(
        case.config, case.weights, batches[0], run, case.part, lambda deviations: expected, dtype=case.dtype
    )


def failure_of(error: Exception) -> tuple[str, str, str] | None:
    """Return status, line and last output of a worker that an error stopped; None for another error."""
    if isinstance(error, WorkerFailure):
        return error.status, error.detail, error.stderr
    if isinstance(error, SpecError):
        return "refused", "; ".join(error.problems), ""
    return ("unsupported", str(error), "") if isinstance(error, Unsupported) else None


def misfits(delivered: Mapping[str, Array], expected: Expectation) -> list[str]:
    """Return what of a step is unknown, or of a wrong shape or type; the first of each kind is shown."""
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
        resynchronise: bool,
        case: JudgedTraining,
        candidates: Sequence[Candidate],
        steps: int | None = None,
        stop_first: bool = False,
        callback: Callback = lambda name, steps: None,
    ) -> None:
        self.case, self.candidates, self.stop_first = replace(case, deviations=NONE), candidates, stop_first
        self.again, self.callback, self.steps = resynchronise, callback, case.training.steps[:steps]
        self.recorders = {one.name: Recorder(one.name) for one in candidates}
        self.envelopes = Envelopes(self.case, [one.deviations for one in candidates], resynchronise)
        self.state: dict[str, Array] = self.rounded(self.case.start)
        self.earlier: Start | None = None
        self.carried: dict[str, dict[str, Array]] = {}

    def rounded(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return a state as the precision holds it."""
        return {name: precision(self.case.dtype).round(values) for name, values in state.items()}

    def run(self) -> list[Track]:
        """Make the steps: while one is judged, the backends make the next."""
        with ExitStack() as stack:
            # Each backend answers in its own time, and one request after the other.
            lines = {
                one.name: stack.enter_context(ThreadPoolExecutor(max_workers=1)) for one in self.candidates
            }
            asked = self.asked(lines, 0)
            for step, batches in enumerate(self.steps):
                if not asked:
                    break
                start = Start(self.state, step, batches, earlier=self.earlier)
                self.envelopes.advance(self.given(step), step, batches)
                self.state = self.rounded(self.envelopes.state())
                following = self.asked(lines, step + 1)
                for one in self.candidates:
                    if one.name in asked:
                        expected = self.envelopes.around(one.deviations)
                        self.receive(one, start, asked[one.name].result(), expected)
                asked = {name: each for name, each in following.items() if self.goes_on(name)}
                self.earlier = replace(start, earlier=None)
        return [recorder.track() for recorder in self.recorders.values()]

    def given(self, step: int) -> Mapping[str, Array] | None:
        """Return the state that a step is made from; None: where the step before ended."""
        return self.state if self.again or step == 0 else None

    def goes_on(self, name: str) -> bool:
        recorder = self.recorders[name]
        return recorder.failure is None and not (self.stop_first and recorder.first)

    def asked(self, lines: Mapping[str, ThreadPoolExecutor], step: int) -> dict[str, Future[Made]]:
        """Ask every backend that goes on for a step from where the oracle stands."""
        if step >= len(self.steps):
            return {}
        return {
            one.name: lines[one.name].submit(made, one, self.given(step), step, self.steps[step])
            for one in self.candidates
            if self.goes_on(one.name)
        }

    def receive(self, one: Candidate, start: Start, made: Made, expected: Expectation) -> None:
        """Take up what came of a step."""
        recorder = self.recorders[one.name]
        recorder.seconds += made.seconds
        if made.delivered is None:
            recorder.failure = made.failure
            return
        wrong = misfits(made.delivered, expected)
        if wrong:
            recorder.failure = ("broken", f"step() returned {'; '.join(wrong)}", "")
            return
        try:
            self.take_up(one, start, made.delivered, expected)
        except Exception as error:  # what was delivered is in order
            recorder.fail(f"judging step {start.step + 1}", error)
        self.callback(one.name, start.step + 1)

    def take_up(
        self, one: Candidate, start: Start, delivered: dict[str, Array], expected: Expectation
    ) -> None:
        """Judge a step; what comes near a tolerance by a first look is judged by the whole."""
        recorder, case = self.recorders[one.name], replace(self.case, deviations=one.deviations)
        start = replace(
            start, carried=self.carried.get(one.name, {}), resumed=start.step if self.again else one.resumed
        )
        expected = self.seen(case, start, delivered, expected)
        verdict = judged(case, start.batches, delivered, expected)
        if self.again and (verdict.status == "diverges" or verdict.worst > NEAR) and recorder.first is None:
            expected = self.seen(case, start, delivered, self.envelopes.whole(start, one.deviations))
            verdict = judged(case, start.batches, delivered, expected)
        first = verdict.first_divergence
        made = MadeStep(case, start, delivered, expected, first.tensor if first else "")
        recorder.witness(made, self.again)
        recorder.add(start.step, verdict, delivered, expected)
        if not self.again:
            self.carried[one.name] = carried(self.case, start.step, expected)

    def seen(
        self, case: JudgedTraining, start: Start, delivered: Mapping[str, Array], expected: Expectation
    ) -> Expectation:
        """Return what is expected of a step of a run: in range, and by its own norm if from a given state."""
        name = f"steps.{start.step}.norm"
        norm = delivered.get(name, np.zeros(0))
        known = norm.shape == () and norm.dtype.kind == "f" and np.isfinite(norm)
        if self.again and known and name in expected.values:
            expected = given_norm(case, start, expected, norm)
        return in_range(expected, start.state)


def made(one: Candidate, state: Mapping[str, Array] | None, step: int, batches: Sequence[Batch]) -> Made:
    """Return what a backend reports of a step, or what kept it from making it."""
    started, failure, delivered = time.perf_counter(), ("", "", ""), None
    try:
        if state is not None:
            one.session.load(state, step)
        found = arrays_of("step", one.session.step(batches, report=True))
        delivered = {f"steps.{step}.{name}": array for name, array in found.items()}
    except Exception as error:  # whatever keeps one backend from going on keeps no other
        line = next(iter(str(error).splitlines()), "")
        failure = failure_of(error) or (
            "error",
            f"{type(error).__name__}: {line}",
            traceback.format_exc(),
        )
    return Made(time.perf_counter() - started, delivered, failure)
