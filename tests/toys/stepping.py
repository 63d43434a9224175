"""Training without a framework: backends that hold open the reference in low precision.

Right ones, ones that train by another recipe, and ones whose session returns or raises what none may.
"""

from dataclasses import replace

import numpy as np

from concord.backends.interface import Unsupported
from concord.conformance.bugs.training.edited_trajectory import BuggedTrajectory
from concord.conformance.judging.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.files import section
from concord.spec.reference import reference


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


class Bugged(Stepping):
    """The same with a bug of training, rounded after each operation in another order.

    Args:
        change: that makes the bug.
    """

    def __init__(self, case, change):
        super().__init__(case)
        self.made = BuggedTrajectory(case, Arithmetic(case.dtype, shuffle=5), change)

    def load(self, state, step):
        """Go on from elsewhere, as from a checkpoint."""
        super().load(state, step)
        self.made.resume = step

    def trajectory(self, case):
        """Return the training, which keeps what a bug remembers."""
        return self.made


class Session(Stepping):
    """A right session of a backend, which says no more of itself than it must."""

    def info(self):
        """Return what it says of itself."""
        return {}

    def step(self, batches, report=False):
        """Make a step."""
        stored = np.dtype(self.case.dtype)
        return self.told(
            {name: array.astype(stored) for name, array in super().step(batches, report).items()}
        )

    def told(self, found):
        """Return what a step returns of what it found."""
        return found

    def predict(self, batch):
        """Return the logits of a batch."""
        weights = {**self.case.weights, **section(self.held, "parameters.")}
        return reference(self.case.config, weights, batch).logits

    def close(self):
        """Hold nothing open."""


class Right:
    """A backend that trains by the reference; it stands for a worker too."""

    name, size, session = "numpy", 3 << 20, Session

    def describe(self):
        """Return JSON data."""
        return {"version": "1"}

    def run(self, request):
        """Refuse to run."""
        raise Unsupported("it trains alone")

    def train(self, request):
        """Hold training open."""
        return self.session(
            JudgedTraining(request.config, request.weights, request.training, request.part, request.dtype)
        )


def otherwise(late=0, **fields):
    """Return a backend that trains by another recipe, from a step on."""

    def session(self, case):
        recipe = case.training.recipe.replace(**fields)
        return Session(replace(case, training=replace(case.training, recipe=recipe)), late, case)

    return type("Otherwise", (Right,), {"session": session})


def of(**methods):
    """Return a backend whose session has other methods."""
    return type("Wrong", (Right,), {"session": type("Wrong", (Session,), methods)})


def without(found, *prefixes):
    """Return tensors but for those whose names begin so."""
    return {name: array for name, array in found.items() if not name.startswith(prefixes)}


def failing(self, state, step):
    """Fail to load what comes after the first step."""
    if step:
        raise ArithmeticError("no state fits\nat all")
    Stepping.load(self, state, step)


Late = otherwise(late=2, epsilon=1e-6)
Returning = of(told=lambda self, found: None)
ReturningUnknown = of(
    told=lambda self, found: {**found, "velocity.pooler.bias": found["norm"], "loss": found["norm"]}
)
ReturningRows = of(told=lambda self, found: {name: array[None] for name, array in found.items()})
ReturningFew = of(told=lambda self, found: without(found, "gradients.", "norm", "rate", "parameters.pooler"))
Loading = of(load=failing)
