"""A session of training without a framework: the reference in low precision, perhaps by another recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.training.plan import StepPlan, plan
from concord.spec.training.trajectory import Trajectory

Array = NDArray[Any]


class Stepping:
    """A :class:`concord.backends.interface.Stepping` of the reference.

    Args:
        case: the training that it makes.
        late: the number of the first step that the recipe of ``case`` is followed in; ``usual`` is before.
    """

    def __init__(self, case: JudgedTraining, late: int = 0, usual: JudgedTraining | None = None) -> None:
        self.case, self.late, self.usual, self.steps = case, late, usual, 0
        self.state: Mapping[str, Array] = case.start

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Go on from elsewhere."""
        self.state, self.steps = state, step

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, Array]:
        """Make a step."""
        case = self.case if self.usual is None or self.steps >= self.late else self.usual
        trajectory, found = self.trajectory(case), dict[str, Array]()
        trajectory.load(self.state, self.steps)
        trajectory.step(batches, lambda name, values: found.__setitem__(name, np.array(values)))
        self.state, self.steps = trajectory.state(), trajectory.steps
        said = (lambda name: True) if report else lambda name: name == "norm" or name.startswith("losses.")
        return {name: array for name, array in found.items() if said(name)}

    def trajectory(self, case: JudgedTraining) -> Trajectory:
        """Return the training in low precision, before its first step."""
        return case.trajectory(Arithmetic(case.dtype))

    def plan(self, steps: Sequence[Sequence[Batch]]) -> StepPlan:
        """Say what is going to be done."""
        return plan(self.case.config, replace(self.case.training, steps=steps), self.case.part)
