"""Numbers of a recipe that nobody would guess, recovered from what a step reported."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from concord.conformance.bugs.bug import Change, recipe
from concord.conformance.explain.fitting import Left, fitted, power
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.wording import instead
from concord.spec.arrays import Array
from concord.spec.errors import ConfigError
from concord.spec.training.schedules import learning_rate

SAME_RATE = 1e-6
"""Share by which a rate may differ from one that is rounded to float32."""

LONGEST = 2_000
"""By how many steps a schedule may be longer or shorter."""

Look = Callable[[MadeStep], Iterator[Hypothesis]]


def recovered(made: MadeStep) -> Iterator[Hypothesis]:
    """Yield what a step would have been computed with."""
    for look in LOOKS.get(made.stage, ()):
        with contextlib.suppress(*INAPPLICABLE):  # no such training, or other tensors than it has
            yield from look(made)


def _number(made: MadeStep, name: str, clause: str, value: float) -> Hypothesis:
    """Return training by a recipe with another number."""
    what = f"{name} = {instead(value, getattr(made.case.training.recipe, name), digits=4)}"
    return Hypothesis(name, what, clause, step=recipe(**{name: value}))


def _named(made: MadeStep, values: Mapping[str, Array], section: str) -> dict[str, Array]:
    """Return the tensors of a section of the step, by name of a parameter."""
    prefix = f"steps.{made.start.step}.{section}."
    return {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in values.items()
        if name.startswith(prefix)
    }


def _left(made: MadeStep, section: str, change: Callable[..., Change]) -> Left:
    """Return what is left between a section as it was reported, and as numbers of a change make it."""
    wanted = _named(made, made.delivered, section)

    def left(numbers: Array) -> Array:
        found = _named(made, made.exactly(change(*map(float, numbers))), section)
        shared = [(wanted[name] - found[name]).reshape(-1) for name in wanted if name in found]
        return np.concatenate(shared) if shared else np.zeros(0)

    return left


def _schedule(made: MadeStep) -> Iterator[Hypothesis]:
    """With which number of steps a schedule has the rate that was reported."""
    recipe, step = made.case.training.recipe, made.start.step
    reported = float(made.delivered.get(f"steps.{step}.rate", math.nan))
    for name in ("warmup_steps", "total_steps"):
        meant = getattr(recipe, name) or 0
        nearest = sorted(range(max(1, meant - LONGEST), meant + LONGEST), key=lambda n: abs(n - meant))
        for value in nearest if meant else ():
            try:
                rate = learning_rate(recipe.replace(**{name: value}), step)
            except ConfigError:
                continue
            if abs(rate - reported) <= SAME_RATE * abs(rate):
                if value != meant:
                    yield _number(made, name, "OPT-9", value)
                break


def _limit(made: MadeStep) -> Iterator[Hypothesis]:
    """By which limit gradients were clipped: below the norm they are proportional to it."""
    norm = float(made.exactly(Change())[f"steps.{made.start.step}.norm"])
    left = _left(made, "clipped", lambda limit: recipe(clip_at=limit))
    yield _number(made, "clip_at", "OPT-7", *fitted(left, norm / 4))


def _share(name: str, section: str, clause: str, made: MadeStep) -> Iterator[Hypothesis]:
    """With which number of the recipe a section was computed."""
    left = _left(made, section, lambda share: recipe(**{name: share}))
    yield _number(made, name, clause, *fitted(left, getattr(made.case.training.recipe, name)))


def _rate(made: MadeStep) -> Iterator[Hypothesis]:
    """By which rate parameters moved."""
    step = made.start.step
    rate = learning_rate(made.case.training.recipe, step)

    def moved(factor: float) -> Change:
        return Change(rate=lambda m, right: factor * right)

    (factor,) = fitted(_left(made, "parameters", moved), 1.0)
    reported = float(made.delivered.get(f"steps.{step}.rate", rate))
    # What it says is nearer than what parameters, rounded, show.
    moved_by = reported if reported != rate else factor * rate
    what = f"a learning rate of {instead(moved_by, rate, digits=4)}"
    if rate:
        yield Hypothesis("learning_rate", what, "OPT-9", step=moved(moved_by / rate))
    yield Hypothesis(
        "learning_rate", f"{what} in every step", "OPT-9", step=Change(rate=lambda m, right: moved_by)
    )


def _epsilon(made: MadeStep) -> Iterator[Hypothesis]:
    """With which epsilon parameters moved."""
    if made.case.training.recipe.algorithm != "sgd":
        found = power(_left(made, "parameters", lambda exponent: recipe(epsilon=10.0**exponent)))
        yield _number(made, "epsilon", "OPT-3", 10.0**found)


LOOKS: Mapping[str, tuple[Look, ...]] = {
    "clipped": (_limit,),
    "moments": (
        _schedule,
        partial(_share, "beta1", "first_moment", "OPT-3"),
        partial(_share, "beta2", "second_moment", "OPT-3"),
        partial(_share, "momentum", "momentum", "OPT-2"),
        partial(_share, "weight_decay", "parameters", "OPT-6"),
        _rate,
        _epsilon,
    ),
}
"""What a step may tell that is first wrong at a stage of it."""
