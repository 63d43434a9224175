"""Lockstep with backends in their workers."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace

from pydantic_core import to_jsonable_python
from threadpoolctl import threadpool_limits

from concord.backends import heaps
from concord.backends.interface import Request
from concord.conformance.campaign import Setup, environment_of, failure_of, own_bug
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.candidate import Candidate
from concord.conformance.lockstep.outcome import MODES, Lockstep, LockstepCase, Track
from concord.conformance.lockstep.running import Callback, in_lockstep
from concord.conformance.verdict import NOT_JUDGED
from concord.spec.deviations import declared, in_precision
from concord.spec.errors import SpecError
from concord.spec.training.recipe import rounded_hyperparameters


def opened(name: str, case: JudgedTraining, settings: Setup, stack: ExitStack) -> Candidate | Track:
    """Open a backend and its session; return its track if it cannot train.

    Args:
        stack: by which workers are closed.
    """
    try:
        worker = stack.enter_context(settings.open(name))
        session = worker.train(request_of(case, settings))
        stated = session.info().get("deviations", [])
        deviations = in_precision(declared(stated), case.dtype)
        environment = environment_of(worker, stated)
    except Exception as error:  # whatever keeps one backend from training keeps no other
        own = (NOT_JUDGED, own_bug("opening it", error), traceback.format_exc())
        status, detail, stderr = failure_of(error) or own
        return Track(name, settings.status_of(name, status), detail=detail, stderr=stderr)
    return Candidate(name, session, deviations, environment)


def request_of(case: JudgedTraining, settings: Setup) -> Request:
    """Return what a session is asked for; batches come with the steps."""
    return Request(
        case.config,
        case.weights,
        case.training.steps[0][0],
        case.part,
        **asdict(settings.how(case.dtype)),
        taps=False,
        gradients=False,
        training=replace(case.training, steps=[]),
    )


def conduct(
    case: JudgedTraining,
    names: Sequence[str],
    settings: Setup,
    mode: str = MODES[0],
    callback: Callback = lambda name, steps: None,
) -> Lockstep:
    """Train in lockstep on backends.

    Args:
        settings: unless they say how many threads each worker has, backends and oracle share this
            machine's cores.
        mode: one of :data:`concord.conformance.lockstep.outcome.MODES`.
        callback: is told of progress.

    Raises:
        SpecError: where the frameworks' own dropout decides what is dropped.
    """
    training = case.training
    if training.dropout_by != "spec":
        raise SpecError(
            f"dropout by {training.dropout_by!r} cannot be judged: the oracle does not know what a "
            "framework drops, and it must be 'spec' [clause=DRP-3]"
        )
    heaps.share()
    started, cores = time.perf_counter(), os.cpu_count() or 1
    # More threads than cores wait for each other: small products take ten times as long.
    share = max(1, cores // (len(names) + 1))
    settings = settings if settings.threads else replace(settings, threads=share)
    with ExitStack() as stack, threadpool_limits(share, user_api="blas"):
        with ThreadPoolExecutor(max_workers=cores) as pool:
            places = list(pool.map(lambda name: opened(name, case, settings, stack), names))
        candidates = [place for place in places if isinstance(place, Candidate)]
        tracks = in_lockstep(mode == MODES[0], case, candidates, callback=callback)
    tracks += [place for place in places if isinstance(place, Track)]
    return Lockstep(
        mode,
        case.dtype,
        about(case, settings),
        tuple(sorted(tracks, key=lambda track: list(names).index(track.backend))),
        {one.name: one.environment for one in candidates},
        time.perf_counter() - started,
        [one.text for one in rounded_hyperparameters(training.recipe, case.dtype)],
    )


def about(case: JudgedTraining, settings: Setup) -> LockstepCase:
    """Return what was trained and how."""
    training = case.training
    return LockstepCase(
        len(training.steps),
        training.seed,
        case.part,
        sum(map(len, training.steps)),
        case.config,
        to_jsonable_python(training.recipe.as_dict()),
        settings.implementation,
        settings.execution,
        settings.device,
        settings.precision,
    )
