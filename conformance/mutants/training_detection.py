"""Whether a bug of training is found in a backend: at the first step at which the reference shows it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
from concord.spec.arrays import Array
from concord.spec.deviations import declared, in_precision
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


@functools.cache
def shown(name: str, dtype: str) -> Shown:
    """Return where a bug shows first on the reference, by the tolerances of right training.

    Raises:
        SpecError: if it shows nowhere, and a section was judged at no step.
    """
    bug, before = TRAINING[name], 0.0
    training, resume = shown_by(bug)
    right = JudgedTraining(*model(), training, dtype=dtype)
    bugged = BuggedTrajectory(right, exact(dtype), bug.change, resume)
    wrong: list[dict[str, Array]] = []
    for batches in training.steps:
        found = dict[str, Array]()
        bugged.step(batches, found.__setitem__)
        wrong.append({name: precision(dtype).round(array) for name, array in found.items()})
    for one in judged_steps(right, wrong):
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
    session, made = worker.train(request), list[Mapping[str, Array]]()
    try:
        for step, batches in enumerate(training.steps):
            if resume and step == resume:  # it is closed, and goes on from what it wrote down
                state = session.state()
                session.close()
                session = worker.train(request)
                session.load(state, step)
            made.append(session.step(batches, report=True))
        deviations = in_precision(declared(session.info().get("deviations", [])), dtype)
    finally:
        session.close()
    case = JudgedTraining(config, weights, training, dtype=dtype, deviations=deviations)
    return first_divergence(case, made, resume, explaining)
