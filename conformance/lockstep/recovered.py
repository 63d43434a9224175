"""Numbers that nobody would guess, recovered from what a step reported: batch weights, limits, rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer, Tensor
from concord.conformance.bugs.bug import Change, StepEdit, recipe, rule
from concord.conformance.bugs.training.step import Tensors, TrainingStep
from concord.conformance.estimate import exact
from concord.conformance.explain.fitting import NEVER, Left, fitted, power
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.wording import distinct, few, instead, multiple
from concord.spec.arrays import Array
from concord.spec.errors import ConfigError
from concord.spec.training.schedules import learning_rate

ALIKE = 1e-3
"""Share by which rows may differ from a multiple of what they should be: more than rounding makes."""

SAME_RATE = 1e-6
"""Share by which a rate may differ from one that is rounded to float32."""

LONGEST = 2_000
"""By how many steps a schedule may be longer or shorter."""

LOOKED_UP = {"embeddings.token.weight": "input_ids", "embeddings.segment.weight": "segment_ids"}
"""The inputs that say which rows of a table are looked up."""

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


def _weights(made: MadeStep) -> Iterator[Hypothesis]:
    """By how much each batch counted."""
    right = made.trajectory(Change(), exact(made.case.dtype)).batch_weights(made.start.batches)

    def weighed(*by: float) -> Change:
        return Change(weights=lambda m, right, counts: list(by) if len(by) == len(counts) else right)

    found = fitted(_left(made, "gradients", weighed), *np.zeros(len(right)))
    factor = found[0] / right[0] if right[0] else math.nan
    if all(f"{one:g}" == f"{factor * weight:g}" for one, weight in zip(found, right, strict=True)):
        what = f"gradients times {multiple(factor, digits=4)}"
        change = Change(weights=lambda m, right, counts: [factor * weight for weight in right])
    else:
        said = distinct(*map(float, (*found, *right)), digits=4)
        counts, meant = (", ".join(some) for some in (said[: len(found)], said[len(found) :]))
        what, change = f"batches that count by {counts} instead of {meant}", weighed(*found)
    yield Hypothesis("batch_weights", what, "OPT-10", step=change)


def _counted(made: MadeStep) -> Iterator[Hypothesis]:
    """Whether rows of tables that are looked up several times count as often once more."""

    def often(tables: tuple[str, ...], m: TrainingStep, total: Tensors) -> Tensors:
        found, batches = dict(total), made.case.training.steps[m.number]
        for name in tables:
            ids = np.concatenate([getattr(batch, LOOKED_UP[name]).reshape(-1) for batch in batches])
            times = np.maximum(np.bincount(ids, minlength=total[name].shape[0]), 1)[:, None]
            found[name] = total[name] * total[name].of(total[name].a.leaf(times.astype(float)))
        return found

    what = "gradients of rows that are looked up several times, and count as often once more"
    known = [name for name in LOOKED_UP if name in made.case.weights]
    for tables in dict.fromkeys((tuple(known), *((name,) for name in known))):
        yield Hypothesis("rows_counted_again", what, "GRD-1", step=Change(gradients=partial(often, tables)))


def _some(
    made: MadeStep, section: str, before: Mapping[str, Array] | None = None
) -> tuple[float, set[str], str]:
    """Return the factor that some tensors alone are multiplied by, which these are, and that in words.

    Args:
        before: what each was, where it is how far it moved from there that is multiplied.

    Raises:
        ValueError: if there is no such factor.
    """
    factors, before = {}, before or {}
    actual, right = (_named(made, values, section) for values in (made.delivered, made.expected.values))
    for name in actual.keys() & right.keys():
        ours, theirs = ((each[name] - before.get(name, 0.0)).reshape(-1) for each in (right, actual))
        sigma = np.max(made.expected.sigmas[f"steps.{made.start.step}.{section}.{name}"])
        if np.max(abs(ours)) <= sigma / ALIKE:
            continue  # rounding alone: it has no factor
        factor = float(ours @ theirs / (ours @ ours))
        if not np.max(abs(theirs - factor * ours)) <= ALIKE * np.max(abs(ours)):
            raise ValueError(f"{name} is no multiple of what it should be")
        factors[name] = 1.0 if abs(factor - 1) <= ALIKE else factor
    names = {name for name, factor in factors.items() if factor != 1}
    others = [factors[name] for name in names]
    if not 0 < len(names) < len(factors) or max(others) - min(others) > ALIKE * max(map(abs, others)):
        raise ValueError("no factor of some alone")
    factor = float(np.median(others))
    how = f"multiplied by {multiple(factor, digits=4)}" if factor else "zero"
    return factor, names, f"of {_described(names, {*factors})} that are {how}"


def _described(names: set[str], known: set[str]) -> str:
    """Say in the fewest words which parameters of all these are."""
    ways: dict[str, set[str]] = {}
    for words in (name.split(".") for name in known):
        starts = [".".join(words[:count]) for count in range(1, len(words) + 1)]
        ways |= {
            f"`{start}`": {one for one in known if f"{one}.".startswith(f"{start}.")} for start in starts
        }
        ways[f"`*.{words[-1]}`"] = {one for one in known if one.endswith(f".{words[-1]}")}
    exact = [way for way, those in ways.items() if those == names]
    return min(sorted(exact), key=len, default=few((f"`{name}`" for name in sorted(names)), most=3))


def _some_gradients(made: MadeStep) -> Iterator[Hypothesis]:
    """By which factor the gradients of some parameters alone are multiplied."""
    factor, names, which = _some(made, "gradients")

    def multiplied(m: TrainingStep, total: Tensors) -> Tensors:
        return {name: gradient * factor if name in names else gradient for name, gradient in total.items()}

    yield Hypothesis("gradients_of_some", f"gradients {which}", "GRD-1", step=Change(gradients=multiplied))


def _some_movements(made: MadeStep) -> Iterator[Hypothesis]:
    """By which factor the movement of some parameters alone is multiplied."""
    state = {name.removeprefix("parameters."): array for name, array in made.start.state.items()}
    factor, names, which = _some(made, "parameters", state)

    def updated(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *given: Any) -> Tensor:
        usual = right(name, parameter, *given)
        return parameter + (usual - parameter) * factor if name in names else usual

    yield Hypothesis("rate_of_some", f"steps {which}", "OPT-1", step=rule(updated=updated))


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


def _average(section: str, made: MadeStep) -> Iterator[Hypothesis]:
    """By how much an average weighed what was there, and what is new."""
    kept = [array for name, array in made.start.state.items() if name.startswith(f"{section}.")]
    started = max((float(np.max(abs(array), initial=0.0)) for array in kept), default=0.0) > NEVER
    weighed = partial(_weighing, section)
    fresh, *old = fitted(_left(made, section, weighed), *([0.0, 0.0] if started else [0.0]))
    before = "".join(f"{share:.4g} of what was there + " for share in old)
    what = f"{section} = {before}{fresh:.4g} of what is new"
    yield Hypothesis(f"weights_of_{section}", what, "OPT-3", step=weighed(fresh, *old))


def _weighing(section: str, fresh: float, old: float = 0.0) -> Change:
    """Return training whose average weighs otherwise."""

    def average(o: Optimizer, right: StepEdit, key: str, name: str, value: Tensor, beta: float) -> Tensor:
        if key != section:
            return right(key, name, value, beta)
        o.state[f"{key}.{name}"] = old * o.state[f"{key}.{name}"] + fresh * value
        return o.state[f"{key}.{name}"]

    return rule(average=average)


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
    "gradients": (_weights, _counted, _some_gradients),
    "clipped": (_limit,),
    "moments": (
        _schedule,
        partial(_share, "beta1", "first_moment", "OPT-3"),
        partial(_share, "beta2", "second_moment", "OPT-3"),
        partial(_share, "momentum", "momentum", "OPT-2"),
        partial(_share, "weight_decay", "parameters", "OPT-6"),
        partial(_average, "first_moment"),
        partial(_average, "second_moment"),
        _rate,
        _some_movements,
        _epsilon,
    ),
}
"""What a step may tell that is first wrong at a stage of it."""
