"""Whether a bug of training is found in a backend: at the first step at which the reference shows it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concord.backends.interface import Request
from concord.backends.worker import Worker
from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.catalogue import TRAINING
from concord.conformance.bugs.training.runs import model, shown_by
from concord.conformance.bugs.training.step import Batches
from concord.conformance.bugs.training.tape import BuggedTrajectory
from concord.conformance.estimate import exact
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import Divergence
from concord.conformance.lockstep.running import first_divergence, judged_steps
from concord.spec.arrays import Array
from concord.spec.deviations import NONE, Deviations, declared, in_precision
from concord.spec.precision import precision


@dataclass(frozen=True)
class Shown:
    """Where a bug shows first.

    Attributes:
        step: counted from 0; -1: nowhere.
        section: of the first tensor beyond its tolerance, such as ``gradients`` or ``first_moment``.
        margin: by how many tolerances it lies off; infinite where it is missing.
        before: the largest error in tolerances of the steps before it.
    """

    step: int
    section: str = ""
    margin: float = 0.0
    before: float = 0.0


def judged_training(bug: Bug, dtype: str, deviations: Deviations = NONE) -> JudgedTraining:
    """Return the right training that a bug's run is judged by."""
    training, _ = shown_by(bug)
    return JudgedTraining(*model(), training, dtype=dtype, deviations=deviations)


@functools.cache
def shown(name: str, dtype: str) -> Shown:
    """Return where a bug shows first on the reference, by the tolerances of right training.

    Raises:
        SpecError: if it shows nowhere, and a section was judged at no step.
    """
    bug, before = TRAINING[name], 0.0
    training, resume = shown_by(bug)
    bugged = BuggedTrajectory(judged_training(bug, dtype), exact(dtype), bug.change, resume)
    wrong: list[dict[str, Array]] = []
    for batches in training.steps:
        found = dict[str, Array]()
        bugged.step(batches, found.__setitem__)
        wrong.append({name: precision(dtype).round(array) for name, array in found.items()})
    for one in judged_steps(judged_training(bug, dtype), wrong):
        if row := one.verdict.first_divergence:
            return Shown(one.start.step, row.tensor.split(".")[2], row.ratio, before)
        before = max(before, one.verdict.worst)
    return Shown(-1, before=before)


def divergence_of(
    worker: Worker, bug: Bug, dtype: str, right: bool = False, explaining: bool = True
) -> Divergence | None:
    """Let a backend make the run of a bug, and return where it first left its tolerance.

    Args:
        worker: of a backend that has bugs on request.
        bug: the bug.
        right: whether it trains rightly.
        explaining: whether a cause is looked for.
    """
    training, resume = shown_by(bug)
    config, weights = model()
    request = Request(
        config,
        weights,
        training.steps[0][0],
        dtype=dtype,
        implementation="explicit" if right else f"mutant:{bug.name}",
        taps=False,
        training=training,
    )
    steps, info = trained(worker, request, training.steps, resume)
    deviations = in_precision(declared(info.get("deviations", [])), dtype)
    return first_divergence(judged_training(bug, dtype, deviations), steps, resume, explaining)


def trained(
    worker: Worker, request: Request, steps: Sequence[Batches], resume: int
) -> tuple[list[Mapping[str, Array]], dict[str, Any]]:
    """Return what a backend reports of each step, and of itself; before one it is closed, and resumed."""
    session = worker.train(request)
    found: list[Mapping[str, Array]] = []
    try:
        for step, batches in enumerate(steps):
            if resume and step == resume:
                state = session.state()
                session.close()
                session = worker.train(request)
                session.load(state, step)
            found.append(session.step(batches, report=True))
        return found, session.info()
    finally:
        session.close()
