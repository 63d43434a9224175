"""Training without a framework: the reference in low precision, right or wrong."""

from dataclasses import replace

import numpy as np

from concord.backends.interface import Unsupported
from concord.conformance.bugs.training.edited_trajectory import BuggedTrajectory
from concord.conformance.judging.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.files import section
from concord.spec.reference import reference


class Stepping:
    """A session of the reference; until step `late` it trains by `usual` instead of `case`."""

    def __init__(self, case, late=0, usual=None):
        self.case, self.late, self.usual, self.steps = case, late, usual, 0
        self.held = case.start

    def load(self, state, step):
        self.held, self.steps = state, step

    def state(self):
        return self.held

    def step(self, batches, report=False):
        case = self.case if self.usual is None or self.steps >= self.late else self.usual
        trajectory, results = self.trajectory(case), {}
        trajectory.load(self.held, self.steps)
        trajectory.step(batches, lambda name, values: results.__setitem__(name, np.array(values)))
        self.held, self.steps = trajectory.state(), trajectory.steps
        is_reported = (
            (lambda name: True) if report else lambda name: name == "norm" or name.startswith("losses.")
        )
        return {name: array for name, array in results.items() if is_reported(name)}

    def trajectory(self, case):
        # In low precision.
        return case.trajectory(Arithmetic(case.dtype))


class Bugged(Stepping):
    """The same with a training bug, rounded after each operation, and summed in another order."""

    def __init__(self, case, change):
        super().__init__(case)
        self.made = BuggedTrajectory(case, Arithmetic(case.dtype, shuffle=5), change)

    def load(self, state, step):
        super().load(state, step)
        self.made.resume = step

    def trajectory(self, case):
        return self.made


class Session(Stepping):
    """A right session with as little information as possible."""

    def info(self):
        return {}

    def step(self, batches, report=False):
        stored = np.dtype(self.case.dtype)
        return self.told(
            {name: array.astype(stored) for name, array in super().step(batches, report).items()}
        )

    def told(self, results):
        return results

    def predict(self, batch):
        weights = {**self.case.weights, **section(self.held, "parameters.")}
        return reference(self.case.config, weights, batch).logits

    def close(self):
        """Hold nothing open."""


class Right:
    name, size, session = "numpy", 3 << 20, Session

    def describe(self):
        return {"version": "1"}

    def run(self, request):
        raise Unsupported("it trains alone")

    def train(self, request):
        return self.session(
            JudgedTraining(request.config, request.weights, request.training, request.part, request.dtype)
        )


def otherwise(late=0, **fields):
    """Trains by another recipe, until step ``late`` by the right one."""

    def session(self, case):
        recipe = case.training.recipe.replace(**fields)
        return Session(replace(case, training=replace(case.training, recipe=recipe)), late, case)

    return type("Otherwise", (Right,), {"session": session})


def of(**methods):
    return type("Wrong", (Right,), {"session": type("Wrong", (Session,), methods)})


def without(results, *prefixes):
    return {name: array for name, array in results.items() if not name.startswith(prefixes)}


def failing(self, state, step):
    if step > 1:
        raise ArithmeticError("no state fits\nat all")
    Stepping.load(self, state, step)


def forgetting(*names):
    # A step that reports everything, and does not keep these attributes.
    def step(self, batches, report=False):
        before = {name: getattr(self, name) for name in names}
        results = Session.step(self, batches, report)
        vars(self).update(before)
        return results

    return of(step=step)


KeepsNoState = forgetting("held")
CountsNoSteps = forgetting("steps")
LoadsNoSteps = of(load=lambda self, state, step: Stepping.load(self, state, self.steps))
Late = otherwise(late=2, epsilon=1e-6)
Returning = of(told=lambda self, results: None)
ReturningUnknown = of(
    told=lambda self, results: {**results, "velocity.pooler.bias": results["norm"], "loss": results["norm"]}
)
ReturningRows = of(told=lambda self, results: {name: array[None] for name, array in results.items()})
ReturningFew = of(
    told=lambda self, results: without(results, "gradients.", "norm", "rate", "parameters.pooler")
)
Loading = of(load=failing)
