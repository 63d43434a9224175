"""A worker that trains by the reference, in this process: all of ordinary training in a second."""

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.reference import reference
from concord.spec.training.trajectory import Trajectory


class Trainable:
    """Stands for a worker.

    Args:
        infinite: the step, from 0, whose loss is infinite.
    """

    name, size = "numpy", 3 << 20

    def __init__(self, infinite=-1):
        self.infinite = infinite

    def train(self, request):
        return NumpySession(request, self.infinite)


class NumpySession:
    """A session of training."""

    def __init__(self, request, infinite):
        assert request.training is not None
        self.request, self.infinite = request, infinite
        self.trajectory = Trajectory(request.config, request.weights, request.training, Arithmetic("float64"))

    def load(self, state, step):
        self.trajectory.load(state, step)
        optimizer, recipe = self.trajectory.optimizer, self.trajectory.training.recipe
        optimizer.powers = [optimizer.scalar(1.0)] * 2  # multiplied up, as without an interruption
        for _ in range(step):
            optimizer.powers = [
                optimizer.power(power, beta)
                for power, beta in zip(optimizer.powers, (recipe.beta1, recipe.beta2), strict=True)
            ]

    def state(self):
        return {name: np.asarray(values) for name, values in self.trajectory.state().items()}

    def step(self, batches, report=False):
        found = {}
        wrong, names = self.trajectory.steps == self.infinite, ("losses.", "norm")
        self.trajectory.step(
            batches,
            lambda name, values: (
                found.update({name: np.array(values)}) if report or name.startswith(names) else None
            ),
        )
        return {**found, "losses.0": np.array(np.inf)} if wrong else found

    def predict(self, batch):
        weights = {name: node.value for name, node in self.trajectory.parameters.items()}
        return reference(self.request.config, weights, batch).logits

    def close(self):
        pass
