"""A session that clips by the norm of one flat buffer, summed term by term, or by another that is wrong."""

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.training.trajectory import Trajectory
from tests.toys.stepping import Stepping


class FlatTrajectory(Trajectory):
    """Training by such a norm.

    Attributes:
        off: by which share the norm is off.
        limit, epsilon: other numbers than the recipe's, by which is clipped.
        left_out: how the names of gradients begin that the norm does not see.
        silent: whether the norm that is reported is the right one all the same.
    """

    off, limit, epsilon, left_out, silent = 0.0, 1.0, 0.0, "nothing", False

    def limited(self, gradients, squares):
        stored = np.dtype(self.dtype).type
        sums = np.float32 if stored == np.float16 else stored

        def norm_of(names):
            flat = np.concatenate([np.asarray(gradients[name].value, sums).reshape(-1) for name in names])
            return np.sqrt(np.cumsum(np.square(flat), dtype=sums)[-1])

        right = norm_of(list(gradients))
        used = norm_of([name for name in gradients if not name.startswith(self.left_out)]) * sums(
            1 + self.off
        )
        share = min(
            sums(1), sums((self.training.recipe.clip_at or 0.0) * self.limit) / (used + sums(self.epsilon))
        )
        found = {
            name: self.made(stored(share) * np.asarray(gradient.value, stored))
            for name, gradient in gradients.items()
        }
        return found, self.made(stored(right if self.silent else used))

    def made(self, values):
        """Return values as the arithmetic holds them."""
        return self.node(np.asarray(values, self.a.precision.storage))


class Flat(Stepping):
    """A session of it; keywords are attributes of :class:`FlatTrajectory`."""

    def __init__(self, case, **otherwise):
        super().__init__(case)
        self.kind = type("Otherwise", (FlatTrajectory,), otherwise)

    def trajectory(self, case):
        """Return the training by such a norm, before its first step."""
        arithmetic = Arithmetic(case.dtype)
        return self.kind(case.config, case.weights, case.training, arithmetic, case.part, case.dtype)
