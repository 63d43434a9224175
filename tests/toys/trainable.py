"""A worker that trains by the reference, in this process: all of ordinary training in a second."""

import numpy as np

from concord.backends.interface import Run
from concord.conformance.expectation import JudgedTraining
from concord.spec.reference import reference
from tests.toys.numpy_backend import NumpyBackend
from tests.toys.stepping import Stepping


class Trainable:
    """Stands for a worker.

    Args:
        infinite: the step, from 0, whose loss is infinite.
    """

    name, size = "numpy", 3 << 20

    def __init__(self, infinite=-1):
        self.infinite = infinite

    def train(self, request):
        session = NumpySession(
            JudgedTraining(request.config, request.weights, request.training, dtype="float64")
        )
        session.infinite = self.infinite
        return session


class TrainsInItsRun(NumpyBackend):
    """A backend that holds no training open: its run makes every step."""

    def run(self, request):
        session = Trainable().train(request)
        steps = {
            f"steps.{step}.{name}": array
            for step, batches in enumerate(request.training.steps)
            for name, array in session.step(batches, step in request.training.reported).items()
        }
        return Run(np.zeros(()), None, steps=steps)


class NumpySession(Stepping):
    """A session of training."""

    def step(self, batches, report=False):
        wrong = self.steps == self.infinite
        return super().step(batches, report) | ({"losses.0": np.array(np.inf)} if wrong else {})

    def predict(self, batch):
        prefix = "parameters."
        weights = {
            name.removeprefix(prefix): array
            for name, array in self.state().items()
            if name.startswith(prefix)
        }
        return reference(self.case.config, {**self.case.weights, **weights}, batch).logits

    def close(self):
        pass
