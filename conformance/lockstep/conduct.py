"""Lockstep with backends in their workers: they are opened, say what they are going to do, train, and are closed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from concord.backends.interface import Request, Unsupported
from concord.backends.pool import share_heaps
from concord.backends.worker import WorkerFailure
from concord.conformance import codec
from concord.conformance.campaign import Settings
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import MODES, Difference, Lockstep, Track
from concord.conformance.lockstep.preflight import differences, right_plan
from concord.conformance.lockstep.running import Entrant, Tell, free_running, resynchronised
from concord.spec.deviations import declared, in_precision
from concord.spec.errors import SpecError
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Training

FAILURES = (Unsupported, SpecError, WorkerFailure)
"""What keeps a backend from training."""


class Field:
    """The backends of a lockstep run.

    Args:
        case: what is trained.
        settings: how.

    Attributes:
        entrants: those that can train.
        tracks: of those that cannot.
        environments: what each says of itself.
    """

    def __init__(self, case: JudgedTraining, settings: Settings, stack: ExitStack) -> None:
        self.case, self.settings, self.stack = case, settings, stack
        self.entrants: list[Entrant] = []
        self.tracks: list[Track] = []
        self.environments: dict[str, dict[str, Any]] = {}

    def enter(self, name: str) -> None:
        """Open a backend and its session; what keeps it from training is its track."""
        settings = self.settings
        try:
            worker = self.stack.enter_context(settings.open(name))
            session = worker.train(self.request())
        except FAILURES as failure:
            self.fail(name, failure)
        else:
            stated = session.info["deviations"]
            self.entrants.append(Entrant(name, session, in_precision(declared(stated), self.case.dtype)))
            about = {key: value for key, value in worker.description.items() if key != "implementation_deviations"}
            self.environments[name] = {**about, "deviations": stated, "import_seconds": worker.import_seconds, "start_seconds": worker.start_seconds}

    def request(self) -> Request:
        """Return what a session is asked for; batches come with the steps."""
        case, settings = self.case, self.settings
        training = replace(case.training, windows=[])
        how = (case.dtype, settings.implementation, settings.execution, settings.device, settings.precision, settings.deterministic)
        return Request(case.config, case.weights, case.training.windows[0][0], case.part, *how, taps=False, gradients=False, training=training)

    def fail(self, name: str, failure: Exception) -> None:
        """Keep what keeps a backend from training."""
        if isinstance(failure, WorkerFailure):
            status = failure.status if failure.status != "absent" else "missing" if name in self.settings.asked else "absent"
            self.tracks.append(Track(name, status, detail=failure.detail, stderr=failure.stderr))
        else:
            self.tracks.append(Track(name, "refused" if isinstance(failure, SpecError) else "unsupported", detail=str(failure)))

    def preflight(self) -> list[Difference]:
        """Return what backends are going to do otherwise than the recipe says; one that cannot say it does not train."""
        right, found = right_plan(self.case), list[Difference]()
        for entrant in list(self.entrants):
            try:
                found += differences(self.case, right, entrant.name, entrant.session.plan(self.case.training.windows), entrant.deviations)
            except FAILURES as failure:
                self.entrants.remove(entrant)
                self.fail(entrant.name, failure)
        return found


def conduct(
    case: JudgedTraining, names: Sequence[str], settings: Settings, mode: str = MODES[0], stop_first: bool = False, tell: Tell | None = None
) -> Lockstep:
    """Train in lockstep on backends.

    Args:
        mode: one of :data:`concord.conformance.lockstep.outcome.MODES`.
        stop_first: whether a backend is left out after its first divergence.
        tell: is told of progress.
    """
    share_heaps()
    started = time.perf_counter()
    with ExitStack() as stack:
        field = Field(case, settings, stack)
        for name in names:
            field.enter(name)
        found = field.preflight()
        run = {"resynchronised": resynchronised, "free-running": free_running}[mode]
        tracks = run(case, field.entrants, None, stop_first, tell) if field.entrants else []
    order = list(names)
    every = sorted([*tracks, *field.tracks], key=lambda track: order.index(track.backend))
    return Lockstep(mode, case.dtype, about(case, settings), tuple(every), tuple(found), rates(case.training), field.environments, time.perf_counter() - started)


def rates(training: Training) -> list[float]:
    """Return the learning rate of each step."""
    return [learning_rate(training.recipe, step) for step in range(len(training.windows))]


def about(case: JudgedTraining, settings: Settings) -> dict[str, Any]:
    """Return what was trained and how."""
    training = case.training
    return {
        "steps": len(training.windows), "seed": training.seed, "part": case.part, "batches": sum(map(len, training.windows)),
        "config": codec.plain(case.config.as_dict()), "recipe": codec.plain(training.recipe.as_dict()),
        "implementation": settings.implementation, "execution": settings.execution, "device": settings.device, "precision": settings.precision,
    }  # fmt: skip
