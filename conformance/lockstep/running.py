"""Backends beside the oracle, step by step: each step from the oracle's state, or each from its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from concord.backends.interface import TrainingSession, Unsupported
from concord.backends.wire import WorkerFailure, arrays_of
from concord.conformance.expectation import Expectation, JudgedTraining
from concord.conformance.judging import NEAR
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
from concord.conformance.verdict import conclude
from concord.conformance.wording import few
from concord.spec.arrays import Array
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
        environment: what it says of itself.
    """

    name: str
    session: TrainingSession
    deviations: Deviations = field(default_factory=lambda: NONE)
    environment: dict[str, Any] = field(default_factory=dict)


def in_lockstep(
    again: bool,
    case: JudgedTraining,
    candidates: Sequence[Candidate],
    steps: int | None = None,
    stop_first: bool = False,
    callback: Callback = lambda name, steps: None,
) -> list[Track]:
    """Let backends train beside the oracle.

    Args:
        again: whether each step starts from the oracle's weights and state, so that a bug shows at its own
            step. Else backends train by themselves, and rounding is carried through the steps.
        case: the training; its deviations are of no account.
        steps: how many to make, by default all.
        stop_first: whether a backend is left out after its first divergence.
        callback: is told of progress.
    """
    case = replace(case, deviations=NONE)
    lockstep = _Lockstep(again, case, candidates, case.training.steps[:steps], stop_first, callback)
    lockstep.run()
    return [recorder.track() for recorder in lockstep.recorders.values()]


resynchronised, free_running = partial(in_lockstep, True), partial(in_lockstep, False)
"""Training from the oracle's state in each step, and by themselves."""


def judged_steps(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0
) -> Iterator[MadeStep]:
    """Yield the steps of training that was made by itself, until one diverges.

    Args:
        case: all of whose steps are reported, with the deviations of the backend.
        made: what was reported of each step, without the number of the step.
        resumed: the step before which it went on from a checkpoint of its own; 0: it did not.

    Raises:
        SpecError: at the end, if a section was judged at no step, so that nobody can say.
    """
    whole, start, statuses = of_training(case), None, set[tuple[str, str]]()
    sigmas, state = dict[str, Array](), rounded(case, case.start)
    for step, (batches, found) in enumerate(zip(case.training.steps, made, strict=True)):
        prefix = f"steps.{step}."
        values, tolerated = (
            {name: array for name, array in table.items() if name.startswith(prefix)}
            for table in (whole.values, whole.sigmas)
        )
        expected = expectation(case, values, tolerated)
        start = Start(state, step, batches, sigmas, start and replace(start, earlier=None), resumed)
        delivered = {f"{prefix}{name}": np.asarray(array) for name, array in found.items()}
        one = MadeStep(case, start, delivered, in_range(expected, state))
        yield one
        if one.tensor:
            return
        statuses |= one.statuses
        sigmas = carried(case, step, expected)
        state = rounded(case, {name: values[f"{prefix}{name}"] for name in sigmas})
    status, unjudged = conclude(statuses)
    if status == "undetermined":
        sections = ", ".join(unjudged) or "tensors"
        raise SpecError(
            f"no step of this training was judged in its {sections}: it neither agrees nor diverges"
        )


def first_divergence(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0, explaining: bool = True
) -> Divergence | None:
    """Return where training left its tolerance first (:func:`judged_steps`), and why.

    Args:
        explaining: whether a cause is looked for.
    """
    *agreed, last = judged_steps(case, made, resumed)
    if not last.tensor:
        return None
    return replace(Divergence.of(last), cause=cause_of(last, agreed) if explaining else None)


def carried(case: JudgedTraining, step: int, expected: Expectation) -> dict[str, Array]:
    """Return how far correct training may be from the oracle after a step: sigma of the next one's state."""
    prefix, kept = f"steps.{step}.", ("parameters", *slots(case.training.recipe))
    return {
        name.removeprefix(prefix): sigma
        for name, sigma in expected.sigmas.items()
        if name.split(".")[2] in kept
    }


def rounded(case: JudgedTraining, state: Mapping[str, Array]) -> dict[str, Array]:
    """Return a state as the precision holds it."""
    return {name: precision(case.dtype).round(values) for name, values in state.items()}


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
    problems = [f"{few(unknown, most=3)}, but this training has only {sections}"] if unknown else []
    return problems + [
        first + (f" (and {len(more)} like it)" if more else "")
        for first, *more in filter(None, (misshapen, mistyped))
    ]


@dataclass
class _Lockstep:
    """Backends and the oracle in one training; see :func:`in_lockstep`."""

    again: bool
    case: JudgedTraining
    candidates: Sequence[Candidate]
    steps: Sequence[Sequence[Batch]]
    stop_first: bool
    callback: Callback

    def __post_init__(self) -> None:
        self.recorders = {one.name: Recorder(one.name) for one in self.candidates}
        self.envelopes = Envelopes(self.case, [one.deviations for one in self.candidates], self.again)
        self.carried: dict[str, dict[str, Array]] = {}

    def run(self) -> None:
        """Make the steps: while one is judged, the backends make the next."""
        with ExitStack() as stack:
            # Each backend answers in its own time, and one request after the other.
            lines = {
                one.name: stack.enter_context(ThreadPoolExecutor(max_workers=1)) for one in self.candidates
            }
            state, earlier = rounded(self.case, self.case.start), None
            asked = self.asked(lines, state, 0)
            for step, batches in enumerate(self.steps):
                if not asked:
                    break
                start = Start(state, step, batches, earlier=earlier)
                state = rounded(self.case, self.envelopes.advance(start))
                following = self.asked(lines, state, step + 1)
                for one in self.candidates:
                    if one.name in asked:
                        self.receive(one, start, asked[one.name])
                asked = {name: each for name, each in following.items() if self.goes_on(name)}
                earlier = replace(start, earlier=None)

    def goes_on(self, name: str) -> bool:
        recorder = self.recorders[name]
        return recorder.failure is None and not (self.stop_first and recorder.first)

    def asked(
        self, lines: Mapping[str, ThreadPoolExecutor], state: Mapping[str, Array], step: int
    ) -> dict[str, Future[dict[str, Array]]]:
        """Ask every backend that goes on for a step from where the oracle stands."""
        given = state if self.again or step == 0 else None
        return {
            one.name: lines[one.name].submit(
                made, one, given, step, self.steps[step], self.recorders[one.name]
            )
            for one in self.candidates
            if step < len(self.steps) and self.goes_on(one.name)
        }

    def receive(self, one: Candidate, start: Start, asked: Future[dict[str, Array]]) -> None:
        """Take up what came of a step."""
        recorder = self.recorders[one.name]
        expected = self.envelopes.around(start, one.deviations)
        try:
            delivered = asked.result()
        except Exception as error:  # whatever keeps one backend from going on keeps no other
            line = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            recorder.failure = failure_of(error) or ("error", line, traceback.format_exc())
            return
        if wrong := misfits(delivered, expected):
            recorder.failure = ("broken", f"step() returned {'; '.join(wrong)}", "")
            return
        try:
            self.take_up(one, start, delivered, expected)
        except Exception as error:  # what was delivered is in order
            recorder.fail(f"judging step {start.step + 1}", error)
        self.callback(one.name, start.step + 1)

    def take_up(
        self, one: Candidate, start: Start, delivered: dict[str, Array], expected: Expectation
    ) -> None:
        """Judge a step; what comes near a tolerance by a first look is judged by the whole."""
        recorder, case = self.recorders[one.name], replace(self.case, deviations=one.deviations)
        resumed = start.step if self.again else 0
        start = replace(start, carried=self.carried.get(one.name, {}), resumed=resumed)
        made = MadeStep(case, start, delivered, self.seen(case, start, delivered, expected))
        if self.again and recorder.first is None and (made.tensor or made.verdict.worst > NEAR):
            expected = self.envelopes.around(start, one.deviations, whole=True)
            made = MadeStep(case, start, delivered, self.seen(case, start, delivered, expected))
        recorder.add(made, self.again)
        if not self.again:
            self.carried[one.name] = carried(self.case, start.step, made.expected)

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


def made(
    one: Candidate,
    state: Mapping[str, Array] | None,
    step: int,
    batches: Sequence[Batch],
    recorder: Recorder,
) -> dict[str, Array]:
    """Return what a backend reports of a step."""
    started = time.perf_counter()
    try:
        if state is not None:
            one.session.load(state, step)
        found = arrays_of("step", one.session.step(batches, report=True))
    finally:
        recorder.seconds += time.perf_counter() - started
    return {f"steps.{step}.{name}": array for name, array in found.items()}
