"""A session of training without a framework: the reference in low precision, perhaps by another recipe."""

import numpy as np

from concord.spec.arithmetic import Arithmetic


class Stepping:
    """A :class:`concord.backends.interface.Stepping` of the reference.

    Args:
        case: the training that it makes.
        late: the number of the first step that the recipe of ``case`` is followed in; ``usual`` is before.
    """

    def __init__(self, case, late=0, usual=None):
        self.case, self.late, self.usual, self.steps = case, late, usual, 0
        self.held = case.start

    def load(self, state, step):
        """Go on from elsewhere."""
        self.held, self.steps = state, step

    def state(self):
        """Return weights and optimizer state by name."""
        return self.held

    def step(self, batches, report=False):
        """Make a step."""
        case = self.case if self.usual is None or self.steps >= self.late else self.usual
        trajectory, found = self.trajectory(case), {}
        trajectory.load(self.held, self.steps)
        trajectory.step(batches, lambda name, values: found.__setitem__(name, np.array(values)))
        self.held, self.steps = trajectory.state(), trajectory.steps
        said = (lambda name: True) if report else lambda name: name == "norm" or name.startswith("losses.")
        return {name: array for name, array in found.items() if said(name)}

    def trajectory(self, case):
        """Return the training in low precision, before its first step."""
        return case.trajectory(Arithmetic(case.dtype))
