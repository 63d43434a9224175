"""Backends that can be measured: they compute through the reference, or go wrong where it is known where."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from concord.backends.interface import LEARNING_RATE, Request, Session, Steps, Unsupported
from concord.spec.parameters import Weights, trainable
from concord.spec.reference import reference
from tests.toys.numpy_backend import NumpyBackend


class Stepping:
    """Steps of the reference, in rounded arithmetic."""

    def __init__(self, request: Request, sleep: float = 0.0) -> None:
        self.request, self.sleep = request, sleep
        self.weights: Weights = dict(request.weights)

    def compile(self) -> None:
        pass

    def step(self) -> None:
        time.sleep(self.sleep)
        request = self.request
        self.truth = reference(request.config, self.weights, request.batch, gradients=self.request.gradients, dtype=request.dtype, arithmetic=request.dtype)
        if self.request.gradients:
            for name in trainable(request.config):
                self.weights[name] = (self.weights[name] - LEARNING_RATE * self.truth.gradients[name]).astype(np.float32)

    def synchronize(self) -> None:
        pass

    def timed(self, steps: int) -> list[float]:
        return [self.sleep] * steps

    def results(self) -> dict[str, np.ndarray]:
        return {"logits": self.truth.output} if not self.request.gradients else {"loss": np.asarray(self.truth.loss)}

    def parameters(self) -> Weights:
        return self.weights


class Multiplication:
    """A bare product."""

    def __init__(self, left: np.ndarray, right: np.ndarray) -> None:
        self.left, self.right = left[:64], right[:, :64]

    def compile(self) -> None:
        pass

    def step(self) -> None:
        self.product = self.left @ self.right

    def synchronize(self) -> None:
        pass

    def timed(self, steps: int) -> list[float]:
        return [1e-3] * steps

    def results(self) -> dict[str, np.ndarray]:
        return {"product": self.product}


class Measurable(NumpyBackend):
    """Right, and says when it had its turn."""

    sleep = 0.0

    def session(self, request: Request) -> Session:
        if request.implementation != "explicit":
            raise Unsupported("toys are explicit")
        return self.made(request)

    def made(self, request: Request) -> Session:
        return Told(type(self).__name__, request, self.sleep)

    def product(self, left: np.ndarray, right: np.ndarray, dtype: str, device: str, precision: str) -> Steps:
        return Multiplication(left, right)


class Told(Stepping):
    """Writes down whose step it was."""

    def __init__(self, name: str, *given: Any) -> None:
        super().__init__(*given)
        self.name = name

    def step(self) -> None:
        folder = os.environ.get("TOY_NOTES")
        if folder:
            with (Path(folder) / "turns").open("a") as file:
                file.write(f"{self.name}\n")
        super().step()


class Slow(Measurable):
    """Takes its time."""

    sleep = 0.05


class Threaded(Measurable):
    """Has one thread, whatever it is told."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "threads": 1}


class WrongLogits(Measurable):
    """One logit is a little off."""

    def made(self, request: Request) -> Session:
        program = Told("WrongLogits", request)
        right = program.results

        def results() -> dict[str, np.ndarray]:
            found = {name: array.copy() for name, array in right().items()}
            for array in found.values():
                array[(0,) * array.ndim] *= 1.001
            return found

        program.results = results  # type: ignore[method-assign]
        return program


class WrongUpdate(Measurable):
    """One gradient is not subtracted."""

    def made(self, request: Request) -> Session:
        program = Told("WrongUpdate", request)
        kept = request.weights["classifier.bias"]
        program.parameters = lambda: {**program.weights, "classifier.bias": kept}  # type: ignore[method-assign]
        return program


class DiesInTheSecondStep(Measurable):
    """Ends its process when it is timed."""

    def made(self, request: Request) -> Session:
        program = Told("DiesInTheSecondStep", request)
        right, steps = program.step, []

        def step() -> None:
            steps.append(1)
            if len(steps) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            right()

        program.step = step  # type: ignore[method-assign]
        return program
