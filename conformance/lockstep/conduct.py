"""Lockstep with backends in their workers: they say what they are going to do, and train."""

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
from concord.conformance.lockstep.running import Callback, Candidate, failure_of, free_running, resynchronised
from concord.conformance.verdict import NOT_JUDGED
from concord.spec.deviations import declared, in_precision
from concord.spec.errors import SpecError
from concord.spec.training.plan import StepPlan
from concord.spec.training.recipe import rounded_hyperparameters
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Training


@dataclass(frozen=True)
class Opened:
    """A backend before the first step.

    Attributes:
        candidate: it, if it can train.
        environment: what it says of itself.
        differences: what it is going to do otherwise than the recipe says.
        failed: its track, if it cannot train.
    """

    candidate: Candidate | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    failed: Track | None = None


def opened(name: str, case: JudgedTraining, right: StepPlan, settings: Settings, stack: ExitStack) -> Opened:
    """Open a backend and its session, and ask what it is going to do.

    Args:
        right: what it is to do.
        stack: by which workers are closed.
    """
    try:
        worker = stack.enter_context(settings.open(name))
        session = worker.train(request_of(case, settings))
        stated = session.info.get("deviations", [])
        deviations = in_precision(declared(stated), case.dtype)
        found = differences(case, right, name, session.plan(case.training.steps), deviations)
    except Exception as error:  # whatever keeps one backend from training keeps no other
        own = (NOT_JUDGED, own_fault("opening it", error), traceback.format_exc())
        status, detail, stderr = failure_of(error) or own
        missing = status == "absent" and name in settings.asked
        return Opened(failed=Track(name, "missing" if missing else status, detail=detail, stderr=stderr))
    return Opened(Candidate(name, session, deviations), environment_of(worker, stated), tuple(found))


def request_of(case: JudgedTraining, settings: Settings) -> Request:
    """Return what a session is asked for; batches come with the steps."""
    how = ("implementation", "execution", "device", "precision", "deterministic")
    return Request(
        case.config,
        case.weights,
        case.training.steps[0][0],
        case.part,
        case.dtype,
        **{name: getattr(settings, name) for name in how},
        taps=False,
        gradients=False,
        training=replace(case.training, steps=[]),
    )


def conduct(
    case: JudgedTraining,
    names: Sequence[str],
    settings: Settings,
    mode: str = MODES[0],
    stop_first: bool = False,
    callback: Callback = lambda name, steps: None,
) -> Lockstep:
    """Train in lockstep on backends.

    Args:
        settings: unless they say how many threads each worker has, backends and oracle share this
            machine's cores.
        mode: one of :data:`concord.conformance.lockstep.outcome.MODES`.
        stop_first: whether a backend is left out after its first divergence.
        callback: is told of progress.

    Raises:
        SpecError: where the frameworks' own dropout decides what is dropped.
    """
    training = case.training
    if training.dropout_by != "spec":
        raise SpecError(
            f"dropout by {training.dropout_by!r} cannot be judged: the oracle does not know what a "
            "framework drops, "
            "and it must be 'spec' [clause=DRP-3]"
        )
    heaps.share()
    started, cores = time.perf_counter(), os.cpu_count() or 1
    # More threads than cores wait for each other: small products take ten times as long.
    share = max(1, cores // (len(names) + 1))
    settings = settings if settings.threads else replace(settings, threads=share)
    with ExitStack() as stack, threadpool_limits(share, user_api="blas"):
        right = right_plan(case)
        with ThreadPoolExecutor(max_workers=cores) as pool:
            places = list(pool.map(lambda name: opened(name, case, right, settings, stack), names))
        candidates = [place.candidate for place in places if place.candidate]
        run = {"resynchronised": resynchronised, "free-running": free_running}[mode]
        tracks = run(case, candidates, stop_first=stop_first, callback=callback) if candidates else []
    tracks += [place.failed for place in places if place.failed]
    return Lockstep(
        mode,
        case.dtype,
        about(case, settings),
        tuple(sorted(tracks, key=lambda track: list(names).index(track.backend))),
        tuple(difference for place in places for difference in place.differences),
        rates(training),
        {place.candidate.name: place.environment for place in places if place.candidate},
        time.perf_counter() - started,
        [one.text for one in rounded_hyperparameters(training.recipe, case.dtype)],
    )


def rates(training: Training) -> list[float]:
    """Return the learning rate of each step."""
    return [learning_rate(training.recipe, step) for step in range(len(training.steps))]


def about(case: JudgedTraining, settings: Settings) -> dict[str, Any]:
    """Return what was trained and how."""
    training, how = case.training, ("implementation", "execution", "device", "precision")
    return {
        "steps": len(training.steps),
        "seed": training.seed,
        "part": case.part,
        "batches": sum(map(len, training.steps)),
        "config": _listed(case.config.as_dict()),
        "recipe": _listed(training.recipe.as_dict()),
        **{name: getattr(settings, name) for name in how},
    }


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
