"""Whether a bug of training is found in a backend: at the first step at which the reference shows it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request
from concord.backends.worker import Worker
from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.training.catalogue import TRAINING
from concord.conformance.bugs.training.runs import model, shown_by
from concord.conformance.bugs.training.step import Batches
from concord.conformance.bugs.training.tape import BuggedTraining
from concord.conformance.estimate import exact
from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.lockstep.outcome import Divergence
from concord.conformance.lockstep.running import first_divergence, refuse_unjudged
from concord.conformance.scoring import judge_tensor
from concord.conformance.verdict import section_of
from concord.spec.deviations import NONE, Deviations, declared, in_precision

Array = NDArray[np.floating]


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
    bug = TRAINING[name]
    training, resume = shown_by(bug)
    right, wrong, ratios, statuses = (
        of_training(judged_training(bug, dtype)),
        dict[str, Array](),
        [0.0] * len(training.steps),
        set[tuple[str, str]](),
    )
    with np.errstate(all="ignore"):
        BuggedTraining(*model(), training, dtype=dtype, change=bug.change, resume=resume).trajectory(
            exact(dtype)
        ).run(wrong.__setitem__)
        for tensor, value in right.values.items():
            _, step, section = tensor.split(".")[:3]
            if tensor not in wrong or wrong[tensor].shape != value.shape:
                return Shown(int(step), section, np.inf, max(ratios[: int(step)], default=0.0))
            found = judge_tensor(wrong[tensor], value, right.sigmas[tensor], dtype)
            if found.status == "diverges":
                return Shown(int(step), section, found.ratio, max(ratios[: int(step)], default=0.0))
            ratios[int(step)] = max(ratios[int(step)], found.ratio)
            statuses.add((section_of(tensor), found.status))
    refuse_unjudged(statuses)
    return Shown(-1, before=max(ratios))


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
        return found, session.info
    finally:
        session.close()
