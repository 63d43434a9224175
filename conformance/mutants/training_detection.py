"""Detection of training bugs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from concord.backends.interface import Request
from concord.backends.worker import Worker
from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.catalogue import TRAINING
from concord.conformance.bugs.training.edited_trajectory import BuggedTrajectory
from concord.conformance.bugs.training.runs import model, shown_by
from concord.conformance.judging.estimate import exact
from concord.conformance.judging.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import Divergence
from concord.conformance.lockstep.running import first_divergence, judged_steps
from concord.spec.arrays import Arrays
from concord.spec.deviations import in_precision, parse_deviations
from concord.spec.precision import precision


@dataclass(frozen=True)
class Shown:
    """The first place where a bug appears.

    Attributes:
        step: index, or -1 for none.
        section: section of the first divergent tensor, such as ``gradients`` or ``first_moment``.
        margin: that tensor's error in tolerances; infinite if missing.
        before: the largest error of earlier steps, in tolerances.
    """

    step: int
    section: str = ""
    margin: float = 0.0
    before: float = 0.0


@functools.cache
def shown(name: str, dtype: str) -> Shown:
    """Place where a bug first exceeds the tolerances of correct training."""
    bug, margin = TRAINING[name], 0.0
    training, resume = shown_by(bug)
    case = JudgedTraining(*model(), training, dtype=dtype)
    bugged = BuggedTrajectory(case, exact(dtype), bug.change, resume)
    reports: list[Arrays] = []
    for batches in training.steps:
        tensors = Arrays()
        bugged.step(batches, tensors.__setitem__)
        reports.append({name: precision(dtype).round(array) for name, array in tensors.items()})
    for judged in judged_steps(case, reports):
        if row := judged.verdict.first_divergence:
            return Shown(judged.start.step, row.tensor.split(".")[2], row.ratio, margin)
        margin = max(margin, judged.verdict.worst)
    return Shown(-1, before=margin)


def divergence_of(
    worker: Worker, bug: Bug, dtype: str, right: bool = False, explaining: bool = True
) -> Divergence | None:
    """Run a bug's training, or the ``right`` one, and return its first divergence."""
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
    session, steps = worker.train(request), list[Arrays]()
    try:
        for step, batches in enumerate(training.steps):
            if resume and step == resume:  # a new session resumes from the state
                state = session.state()
                session.close()
                session = worker.train(request)
                session.load(state, step)
            steps.append(session.step(batches, report=True))
        deviations = in_precision(parse_deviations(session.info().get("deviations", [])), dtype)
    finally:
        session.close()
    case = JudgedTraining(config, weights, training, dtype=dtype, deviations=deviations)
    return first_divergence(case, steps, resume, explaining)
