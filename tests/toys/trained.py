"""Training with a bug, without a framework: the reference with it, rounded after each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.training.tape import BuggedTrajectory
from concord.conformance.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch

Array = NDArray[Any]


class Bugged:
    """A :class:`concord.backends.interface.Stepping` of the reference with a bug."""

    def __init__(self, case: JudgedTraining, change: Change, resume: int = 0) -> None:
        self.trajectory = BuggedTrajectory(case, Arithmetic(case.dtype, shuffle=5), change, resume)

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Go on from elsewhere."""
        self.trajectory.resume = step
        self.trajectory.load(state, step)

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, Array]:
        """Make a step."""
        found: dict[str, Array] = {}
        self.trajectory.step(batches, lambda name, values: found.__setitem__(name, np.array(values)))
        return found
