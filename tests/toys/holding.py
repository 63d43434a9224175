"""Backends that hold training open without a framework.

Ones that are right, and ones whose session returns or raises what none may.
"""

import numpy as np

from concord.backends.interface import Unsupported
from concord.conformance.expectation import JudgedTraining
from tests.toys.stepping import Stepping


class Session(Stepping):
    """A right session, which says no more of itself than it must."""

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


class Right:
    """A backend that trains by the reference."""

    name, session = "holding", Session

    def describe(self):
        """Return JSON data."""
        return {"version": "1"}

    def run(self, request):
        """Refuse to run."""
        raise Unsupported("it trains alone")

    def train(self, request):
        """Hold training open."""
        assert request.training is not None
        return self.session(
            JudgedTraining(request.config, request.weights, request.training, request.part, request.dtype)
        )


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


Silent = of(info=lambda self: None)
DeclaringText = of(info=lambda self: {"deviations": "some"})
Returning = of(told=lambda self, found: None)
ReturningText = of(told=lambda self, found: {**found, "norm": "large"})
ReturningUnknown = of(
    told=lambda self, found: {**found, "velocity.pooler.bias": found["norm"], "loss": found["norm"]}
)
ReturningRows = of(told=lambda self, found: {name: array[None] for name, array in found.items()})
ReturningFew = of(told=lambda self, found: without(found, "gradients.", "norm", "rate", "parameters.pooler"))
Loading = of(load=failing)
