"""Training with a bug, without a framework: the reference with it, rounded after each operation."""

import numpy as np

from concord.conformance.bugs.training.tape import BuggedTrajectory
from concord.spec.arithmetic import Arithmetic


class Bugged:
    """A :class:`concord.backends.interface.Stepping` of the reference with a bug."""

    def __init__(self, case, change, resume=0):
        self.trajectory = BuggedTrajectory(case, Arithmetic(case.dtype, shuffle=5), change, resume)

    def load(self, state, step):
        """Go on from elsewhere."""
        self.trajectory.resume = step
        self.trajectory.load(state, step)

    def step(self, batches, report=False):
        """Make a step."""
        found = {}
        self.trajectory.step(batches, lambda name, values: found.__setitem__(name, np.array(values)))
        return found
