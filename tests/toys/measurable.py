"""Backends that can be measured: they compute through the reference, or go wrong where it is known where."""

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


class Stepping:
    """Steps of the reference, in rounded arithmetic, perhaps by another recipe than was asked for."""

    def __init__(
        self,
        request,
        sleep=0.0,
        changed=lambda recipe: recipe,
    ):
        self.request, self.sleep = request, sleep
        self.computed = {}
        self.feed(request.batch)
        if request.training:
            training = Training(changed(request.training.recipe), [])
            self.trajectory = Trajectory(
                request.config, request.weights, training, Arithmetic(request.dtype), dtype=request.dtype
            )

    def feed(self, batch):
        self.batch = batch

    def compile(self):
        pass

    def step(self):
        time.sleep(self.sleep)
        request = self.request
        if request.training:
            self.trajectory.step(
                [self.batch],
                lambda name, values: (
                    self.computed.update(loss=np.squeeze(values)) if name == "losses.0" else None
                ),
            )
        else:
            self.computed = {
                "logits": reference(
                    request.config, request.weights, self.batch, dtype=request.dtype, arithmetic=request.dtype
                ).output
            }

    def synchronize(self):
        pass

    def timed(self, steps):
        return [self.sleep] * steps

    def results(self):
        return self.computed

    def state(self):
        return self.trajectory.state()


class Multiplication:
    """A bare product."""

    def __init__(self, left, right):
        self.left, self.right = left[:64], right[:, :64]

    def compile(self):
        pass

    def step(self):
        self.product = self.left @ self.right

    def synchronize(self):
        pass

    def timed(self, steps):
        return [1e-3] * steps

    def results(self):
        return {"product": self.product}


class Measurable(NumpyBackend):
    """Right, and says when it had its turn."""

    sleep = 0.0

    def session(self, request):
        if request.implementation != "explicit":
            raise Unsupported("toys are explicit")
        return self.made(request)

    def made(self, request):
        return Told(type(self).__name__, request, self.sleep)

    def product(self, left, right, dtype, device, precision):
        return Multiplication(left, right)


class Told(Stepping):
    """Writes down whose step it was."""

    def __init__(self, name, *given):
        super().__init__(*given)
        self.name = name

    def step(self):
        folder = os.environ.get("TOY_NOTES")
        if folder:
            with (Path(folder) / "turns").open("a") as file:
                file.write(f"{self.name}\n")
        super().step()


class _WithoutState(Told):
    state = property()  # which there is none


class Slow(Measurable):
    """Takes its time."""

    sleep = 0.05


class Threaded(Measurable):
    """Has one thread, whatever it is told."""

    def describe(self):
        return {**super().describe(), "threads": 1}


class WrongLogits(Measurable):
    """One logit is a little off."""

    def made(self, request):
        program = Told("WrongLogits", request)
        right = program.results

        def results():
            found = {name: array.copy() for name, array in right().items()}
            for array in found.values():
                array[(0,) * array.ndim] *= 1.001
            return found

        program.results = results
        return program


class WrongUpdate(Measurable):
    """One parameter stays as it was."""

    def made(self, request):
        program = Told("WrongUpdate", request)
        right, kept = program.state, request.weights["classifier.bias"]
        program.state = lambda: {**right(), "parameters.classifier.bias": kept}
        return program


class Otherwise(Measurable):
    """Trains by another recipe than it is given.

    Args:
        fields: of the recipe.
    """

    def __init__(self, **fields):
        super().__init__()
        self.fields, self.name = fields, ", ".join(f"{name} = {value}" for name, value in fields.items())

    def made(self, request):
        return Told(self.name, request, 0.0, lambda recipe: recipe.replace(**self.fields))


class Forgetting(Measurable):
    """Makes each step its optimizer's first."""

    name = "forgetting"

    def made(self, request):
        program = Told("Forgetting", request)
        right = program.step

        def step():
            program.trajectory.optimizer.load({}, 0)
            right()

        program.step = step
        return program


class TwiceTheGradient(Measurable):
    """Has twice the gradient of one parameter, which AdamW divides away."""

    name = "twice the gradient"

    def made(self, request):
        program = Told("TwiceTheGradient", request)
        right = program.trajectory.limited

        def limited(gradients, squares):
            found, norm = right(gradients, squares)
            return {
                **found,
                "classifier.bias": program.trajectory.a.scale(found["classifier.bias"], 2.0),
            }, norm

        program.trajectory.limited = limited
        return program


class WithoutState(Measurable):
    """Does not say what its optimizer keeps."""

    def made(self, request):
        return _WithoutState("WithoutState", request)


class DiesInTheSecondStep(Measurable):
    """Ends its process when it is timed."""

    def made(self, request):
        program = Told("DiesInTheSecondStep", request)
        right, steps = program.step, []

        def step():
            steps.append(1)
            if len(steps) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            right()

        program.step = step
        return program
