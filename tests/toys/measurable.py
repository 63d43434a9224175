"""Measurable backends on the reference, right and wrong."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from concord.backends.interface import Unsupported
from concord.spec.arithmetic import Arithmetic
from concord.spec.reference import reference
from concord.spec.training.trajectory import Training, Trajectory
from tests.toys.numpy_backend import NumpyBackend


class Program:
    """Steps of the reference in low precision, each noted; `backend.sleep` is their time, `backend.fields` a
    changed recipe.
    """

    def __init__(self, backend, request):
        self.backend, self.request, self.computed, self.steps = backend, request, {}, 0
        self.feed(request.batch)
        if request.training:
            recipe = request.training.recipe.replace(**backend.fields)
            problem = (request.config, request.weights, Training(recipe, []), Arithmetic(request.dtype))
            self.trajectory = Trajectory(*problem, dtype=request.dtype)

    def feed(self, batch):
        self.batch = batch

    def compile(self):
        pass

    def step(self):
        self.steps += 1
        if folder := os.environ.get("TOY_NOTES"):
            with (Path(folder) / "turns").open("a") as file:
                file.write(f"{type(self.backend).__name__}\n")
        time.sleep(self.backend.sleep)
        request = self.request
        if request.training:
            results = {}
            self.trajectory.step([self.batch], results.__setitem__)
            self.computed["loss"] = np.squeeze(results["losses.0"])
        else:
            problem = (request.config, request.weights, self.batch)
            truth = reference(*problem, dtype=request.dtype, arithmetic=request.dtype)
            self.computed["logits"] = truth.output

    def synchronize(self):
        pass

    def results(self):
        return self.computed

    def state(self):
        return self.trajectory.state()


class Multiplication(Program):
    def __init__(self, left, right):
        self.left, self.right = left[:64], right[:, :64]

    def step(self):
        self.computed = {"product": self.left @ self.right}


class Measurable(NumpyBackend):
    sleep, fields, program = 0.0, {}, Program

    def session(self, request):
        if request.implementation != "explicit":
            raise Unsupported("toys are explicit")
        return self.program(self, request)

    def product(self, left, right, dtype, device, precision):
        return Multiplication(left, right)


class Slow(Measurable):
    sleep = 0.05


class OneLogitOff(Program):
    def results(self):
        arrays = {name: array.copy() for name, array in self.computed.items()}
        for array in arrays.values():
            array[(0,) * array.ndim] *= 1.001
        return arrays


class OneParameterAsItWas(Program):
    def state(self):
        name = "classifier.bias"
        return {**super().state(), f"parameters.{name}": self.request.weights[name]}


class EachStepTheFirst(Program):
    def step(self):
        self.trajectory.optimizer.load({}, 0)
        super().step()


class OneGradientTwice(Program):
    """The gradient of one parameter is doubled, which AdamW's division hides."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        right = self.trajectory.limited

        def limited(gradients, squares):
            result, norm = right(gradients, squares)
            twice = self.trajectory.a.scale(result["classifier.bias"], 2.0)
            return {**result, "classifier.bias": twice}, norm

        self.trajectory.limited = limited


class WithoutItsState(Program):
    state = property()  # it has none


class DiesWhenItIsTimed(Program):
    def step(self):
        if self.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def running(program, **fields):
    return type(program.__name__, (Measurable,), {"program": program, "fields": fields})


WrongLogits = running(OneLogitOff)
DiesInTheSecondStep = running(DiesWhenItIsTimed)


# A simulated GPU, with its own clock and memory.

# Between two events of the simulated clock.
SECONDS = 0.25


class OnADevice(Program):
    """Notes each step and each wait."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.said = []

    def step(self):
        self.said.append("step")
        super().step()

    def synchronize(self):
        self.said.append("synchronize")


class Event:
    def record(self):
        pass

    def elapsed_time(self, later):
        return 1e3 * SECONDS


class WithADevice(Measurable):
    held, program = 7 * 2**20, OnADevice

    def peak_memory(self, device, reset=False):
        return self.held

    def event(self):
        return Event()
