"""Lockstep with backends in their workers: they are opened, say what they are going to do, train, and are closed."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from threadpoolctl import threadpool_limits

from concord.backends import heaps
from concord.backends.interface import Request
from concord.conformance.campaign import Settings, environment_of, own_fault
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import MODES, Difference, Lockstep, Track
from concord.conformance.lockstep.preflight import differences, right_plan
from concord.conformance.lockstep.running import Entrant, Tell, failure_of, free_running, resynchronised
from concord.conformance.verdict import NOT_JUDGED
from concord.spec.deviations import declared, in_precision
from concord.spec.errors import SpecError
from concord.spec.training.recipe import rounded_hyperparameters
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Training


@dataclass(frozen=True)
class Place:
    """A backend before the first step.

    Attributes:
        entrant: it, if it can train.
        environment: what it says of itself.
        differences: what it is going to do otherwise than the recipe says.
        failed: its track, if it cannot train.
    """

    entrant: Entrant | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    failed: Track | None = None


class Field:
    """The backends of a lockstep run.

    Args:
        case: what is trained.
        settings: how.
        stack: by which workers are closed.
    """

    def __init__(self, case: JudgedTraining, settings: Settings, stack: ExitStack) -> None:
        self.case, self.settings, self.stack = case, settings, stack
        self.right = right_plan(case)

    def enter(self, name: str) -> Place:
        """Open a backend and its session, and ask what it is going to do; what keeps it from training is its track."""
        try:
            worker = self.stack.enter_context(self.settings.open(name))
            session = worker.train(self.request())
            stated = session.info.get("deviations", [])
            deviations = in_precision(declared(stated), self.case.dtype)
            found = differences(
                self.case, self.right, name, session.plan(self.case.training.windows), deviations
            )
        except Exception as error:  # whatever keeps one backend from training keeps no other
            status, detail, stderr = failure_of(error) or (
                NOT_JUDGED,
                own_fault("opening it", error),
                traceback.format_exc(),
            )
            missing = status == "absent" and name in self.settings.asked
            return Place(failed=Track(name, "missing" if missing else status, detail=detail, stderr=stderr))
        return Place(Entrant(name, session, deviations), environment_of(worker, stated), tuple(found))

    def request(self) -> Request:
        """Return what a session is asked for; batches come with the steps."""
        case, settings = self.case, self.settings
        training = replace(case.training, windows=[])
        how = (
            case.dtype,
            settings.implementation,
            settings.execution,
            settings.device,
            settings.precision,
            settings.deterministic,
        )
        return Request(
            case.config,
            case.weights,
            case.training.windows[0][0],
            case.part,
            *how,
            taps=False,
            gradients=False,
            training=training,
        )


def conduct(
    case: JudgedTraining,
    names: Sequence[str],
    settings: Settings,
    mode: str = MODES[0],
    stop_first: bool = False,
    tell: Tell | None = None,
) -> Lockstep:
    """Train in lockstep on backends.

    Args:
        settings: unless they say how many threads each worker has, the backends and the oracle share the cores of this machine.
        mode: one of :data:`concord.conformance.lockstep.outcome.MODES`.
        stop_first: whether a backend is left out after its first divergence.
        tell: is told of progress.

    Raises:
        SpecError: where the frameworks' own dropout decides what is dropped.
    """
    if case.training.dropout_by != "spec":
        raise SpecError(
            f"dropout by {case.training.dropout_by!r} cannot be judged: the oracle does not know what a framework drops, and it must be 'spec' [clause=DRP-3]"
        )
    heaps.share()
    started, cores = time.perf_counter(), os.cpu_count() or 1
    # More threads than cores wait for each other: small products take ten times as long.
    share = max(1, cores // (len(names) + 1))
    settings = settings if settings.threads else replace(settings, threads=share)
    with ExitStack() as stack, threadpool_limits(share, user_api="blas"):
        before = Field(case, settings, stack)
        with ThreadPoolExecutor(max_workers=cores) as pool:
            places = list(pool.map(before.enter, names))
        entrants = [place.entrant for place in places if place.entrant]
        run = {"resynchronised": resynchronised, "free-running": free_running}[mode]
        tracks = run(case, entrants, None, stop_first, tell) if entrants else []
    order = list(names)
    every = sorted(
        [*tracks, *(place.failed for place in places if place.failed)],
        key=lambda track: order.index(track.backend),
    )
    environments = {place.entrant.name: place.environment for place in places if place.entrant}
    found = tuple(difference for place in places for difference in place.differences)
    lost = [one.text for one in rounded_hyperparameters(case.training.recipe, case.dtype)]
    return Lockstep(
        mode,
        case.dtype,
        about(case, settings),
        tuple(every),
        found,
        rates(case.training),
        environments,
        time.perf_counter() - started,
        lost,
    )


def rates(training: Training) -> list[float]:
    """Return the learning rate of each step."""
    return [learning_rate(training.recipe, step) for step in range(len(training.windows))]


def about(case: JudgedTraining, settings: Settings) -> dict[str, Any]:
    """Return what was trained and how."""
    training = case.training
    return {
        "steps": len(training.windows), "seed": training.seed, "part": case.part, "batches": sum(map(len, training.windows)),
        "config": _listed(case.config.as_dict()), "recipe": _listed(training.recipe.as_dict()),
        "implementation": settings.implementation, "execution": settings.execution, "device": settings.device, "precision": settings.precision,
    }  # fmt: skip


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
