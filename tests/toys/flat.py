"""A session that clips by the norm of one flat buffer, summed term by term, or by one that is off."""

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.training.trajectory import Trajectory
from tests.toys.stepping import Stepping


class FlatTrajectory(Trajectory):
    """Training by such a norm.

    Attributes:
        off: by which share the norm is off.
    """

    off = 0.0

    def limited(self, gradients, squares):
        stored = np.dtype(self.dtype).type
        sums = np.float32 if stored == np.float16 else stored
        flat = np.concatenate([np.asarray(one.value, sums).reshape(-1) for one in gradients.values()])
        norm = np.sqrt(np.cumsum(np.square(flat), dtype=sums)[-1]) * sums(1 + self.off)
        share = stored(min(sums(1), sums(self.training.recipe.clip_at) / norm))
        found = {
            name: self.made(share * np.asarray(gradient.value, stored))
            for name, gradient in gradients.items()
        }
        return found, self.made(stored(norm))

    def made(self, values):
        """Return values as the arithmetic holds them."""
        return self.node(np.asarray(values, self.a.precision.storage))


class Flat(Stepping):
    """A session of it."""

    def __init__(self, case, off=0.0):
        super().__init__(case)
        self.kind = type("Off", (FlatTrajectory,), {"off": off})

    def trajectory(self, case):
        """Return the training by such a norm, before its first step."""
        arithmetic = Arithmetic(case.dtype)
        return self.kind(case.config, case.weights, case.training, arithmetic, case.part, case.dtype)
