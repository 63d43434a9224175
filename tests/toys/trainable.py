"""A worker that trains by the reference, in this process: all of ordinary training in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.reference import reference
from concord.spec.training.trajectory import Trajectory


class Trainable:
    """Stands for a worker.

    Args:
        infinite: the step, from 0, whose loss is infinite.
    """

    name, size = "numpy", 3 << 20

    def __init__(self, infinite: int = -1) -> None:
        self.infinite = infinite

    def train(self, request: Request) -> NumpySession:
        return NumpySession(request, self.infinite)


class NumpySession:
    """A session of training."""

    def __init__(self, request: Request, infinite: int) -> None:
        assert request.training is not None
        self.request, self.infinite = request, infinite
        self.trajectory = Trajectory(request.config, request.weights, request.training, Arithmetic("float64"))

    def load(self, state: Mapping[str, NDArray[Any]], step: int) -> None:
        self.trajectory.load(state, step)
        optimizer, recipe = self.trajectory.optimizer, self.trajectory.training.recipe
        optimizer.powers = [optimizer.scalar(1.0)] * 2  # multiplied up, as without an interruption
        for _ in range(step):
            optimizer.powers = [
                optimizer.power(power, beta)
                for power, beta in zip(optimizer.powers, (recipe.beta1, recipe.beta2), strict=True)
            ]

    def state(self) -> dict[str, NDArray[Any]]:
        return {name: np.asarray(values) for name, values in self.trajectory.state().items()}

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        wrong, names = self.trajectory.steps == self.infinite, ("losses.", "norm")
        self.trajectory.step(
            batches,
            lambda name, values: (
                found.update({name: np.array(values)}) if report or name.startswith(names) else None
            ),
        )
        return {**found, "losses.0": np.array(np.inf)} if wrong else found

    def predict(self, batch: Batch) -> NDArray[np.floating]:
        weights = {name: node.value for name, node in self.trajectory.parameters.items()}
        return reference(self.request.config, weights, batch).logits

    def close(self) -> None:
        pass
