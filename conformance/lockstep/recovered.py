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
from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.lockstep.made import Retraced
from concord.conformance.wording import distinct, few, instead, multiple
from concord.spec.errors import ConfigError
from concord.spec.training.schedules import learning_rate

NEVER = 1e-30
"""What is smaller says nothing of a factor."""

ALIKE = 1e-3
"""Share by which rows may differ from a multiple of what they should be: more than rounding makes."""

SAME_RATE = 1e-6
"""Share by which a rate may differ from one that is rounded to float32."""

POWERS = -13.0, 0.0, 12
"""Powers of ten between which an epsilon is looked for, and how many are tried at once."""

LOOKS = 2
"""How often so many are tried: then as many between the neighbours of the best."""

REFINED, NUDGE = 4, 1e-4
"""Steps of Gauss and Newton where numbers are not linear, and how far apart a slope is taken there."""

LONGEST = 2_000
"""By how many steps a schedule may be longer or shorter."""

LOOKED_UP = {"embeddings.token.weight": "input_ids", "embeddings.segment.weight": "segment_ids"}
"""The inputs that say which rows of a table are looked up."""


def recovered(made: Retraced) -> Iterator[Hypothesis]:
    """Yield what a step would have been computed with."""
    searches: dict[str, tuple[Callable[[Retraced], Iterator[Hypothesis]], ...]] = {
        "gradients": (_weights, _counted, _some_gradients),
        "clipped": (_limit,),
        "moments": (_schedule, _numbers, _averages, _rate, _some_movements, _epsilon),
    }
    for search in searches.get(made.stage, ()):
        try:
            yield from search(made)
        except INAPPLICABLE:  # no such training, or other tensors than it has
            continue


def _number(made: Retraced, name: str, clause: str, value: float) -> Hypothesis:
    """Return training by a recipe with another number."""
    what = f"{name} = {instead(value, getattr(made.case.training.recipe, name), digits=4)}"
    return Hypothesis(name, what, clause, step=recipe(**{name: value}))


def _named(made: Retraced, values: Mapping[str, Array], section: str) -> dict[str, Array]:
    """Return the tensors of a section of the step, by name of a parameter."""
    prefix = f"steps.{made.start.step}.{section}."
    return {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in values.items()
        if name.startswith(prefix)
    }


def _left(made: Retraced, section: str, change: Callable[..., Change]) -> Callable[[Array], Array]:
    """Return what is left between a section as it was reported, and as numbers of a change make it."""
    wanted = _named(made, made.delivered, section)

    def left(numbers: Array) -> Array:
        found = _named(made, made.exactly(change(*map(float, numbers))), section)
        shared = [(wanted[name] - found[name]).reshape(-1) for name in wanted if name in found]
        return np.concatenate(shared) if shared else np.zeros(0)

    return left


def _fitted(left: Callable[[Array], Array], *start: float, by: float = 1.0, rounds: int = 1) -> list[float]:
    """Return the numbers by which least is left, found by steps of Gauss and Newton.

    Args:
        start: the numbers to begin with.
        by: by how much each is changed to see what that does; any change will do where they are linear.

    Raises:
        ValueError: where what is left says nothing of one of them.
    """
    numbers = np.array(start)
    for _ in range(rounds):
        there = left(numbers)
        slopes = [(there - left(numbers + by * one)) / by for one in np.eye(len(numbers))]
        if not np.isfinite(there).all() or min(float(np.max(abs(s), initial=0.0)) for s in slopes) <= NEVER:
            raise ValueError("a number that nothing depends on")
        numbers = numbers + np.linalg.lstsq(np.stack(slopes, axis=1), there, rcond=None)[0]
    return [float(number) for number in numbers]


def _weights(made: Retraced) -> Iterator[Hypothesis]:
    """By how much each batch counted."""
    right = made.trajectory(Change(), exact(made.case.dtype)).batch_weights(made.start.batches)

    def weighed(*by: float) -> Change:
        return Change(weights=lambda m, right, counts: list(by) if len(by) == len(counts) else right)

    found = _fitted(_left(made, "gradients", weighed), *np.zeros(len(right)))
    factor = found[0] / right[0] if right[0] else math.nan
    if all(f"{one:g}" == f"{factor * weight:g}" for one, weight in zip(found, right, strict=True)):
        what = f"gradients times {multiple(factor, digits=4)}"
        change = Change(weights=lambda m, right, counts: [factor * weight for weight in right])
    else:
        said = distinct(*map(float, (*found, *right)), digits=4)
        counts, meant = (", ".join(some) for some in (said[: len(found)], said[len(found) :]))
        what, change = f"batches that count by {counts} instead of {meant}", weighed(*found)
    yield Hypothesis("batch_weights", what, "OPT-10", step=change)


def _counted(made: Retraced) -> Iterator[Hypothesis]:
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
    made: Retraced, section: str, before: Mapping[str, Array] | None = None
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


def _some_gradients(made: Retraced) -> Iterator[Hypothesis]:
    """By which factor the gradients of some parameters alone are multiplied."""
    factor, names, which = _some(made, "gradients")

    def multiplied(m: TrainingStep, total: Tensors) -> Tensors:
        return {name: gradient * factor if name in names else gradient for name, gradient in total.items()}

    yield Hypothesis("gradients_of_some", f"gradients {which}", "GRD-1", step=Change(gradients=multiplied))


def _some_movements(made: Retraced) -> Iterator[Hypothesis]:
    """By which factor the movement of some parameters alone is multiplied."""
    state = {name.removeprefix("parameters."): array for name, array in made.start.state.items()}
    factor, names, which = _some(made, "parameters", state)

    def updated(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *given: Any) -> Tensor:
        usual = right(name, parameter, *given)
        return parameter + (usual - parameter) * factor if name in names else usual

    yield Hypothesis("rate_of_some", f"steps {which}", "OPT-1", step=rule(updated=updated))


def _schedule(made: Retraced) -> Iterator[Hypothesis]:
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


def _recipe(made: Retraced, name: str, section: str, clause: str, start: float) -> Iterator[Hypothesis]:
    """Yield the number of a recipe with which a section of the step would be as it was reported."""
    by = NUDGE if start < 0.5 else -NUDGE  # a share stays below 1
    left = _left(made, section, lambda value: recipe(**{name: value}))
    with contextlib.suppress(*INAPPLICABLE):
        yield _number(made, name, clause, *_fitted(left, start, by=by * (start or 1.0), rounds=REFINED))


def _limit(made: Retraced) -> Iterator[Hypothesis]:
    """By which limit gradients were clipped: below the norm they are proportional to it."""
    norm = float(made.exactly(Change())[f"steps.{made.start.step}.norm"])
    yield from _recipe(made, "clip_at", "clipped", "OPT-7", norm / 4)


def _numbers(made: Retraced) -> Iterator[Hypothesis]:
    """With which numbers averages and decay were computed."""
    recipe = made.case.training.recipe
    for name, section, clause in (
        ("beta1", "first_moment", "OPT-3"),
        ("beta2", "second_moment", "OPT-3"),
        ("momentum", "momentum", "OPT-2"),
        ("weight_decay", "parameters", "OPT-6"),
    ):
        yield from _recipe(made, name, section, clause, getattr(recipe, name))


def _averages(made: Retraced) -> Iterator[Hypothesis]:
    """By how much an average weighed what was there, and what is new."""
    for section in ("first_moment", "second_moment"):
        kept = [array for name, array in made.start.state.items() if name.startswith(f"{section}.")]
        started = max((float(np.max(abs(array), initial=0.0)) for array in kept), default=0.0) > NEVER
        weighed = partial(_weighing, section)
        with contextlib.suppress(*INAPPLICABLE):
            fresh, *old = _fitted(_left(made, section, weighed), *([0.0, 0.0] if started else [0.0]))
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


def _rate(made: Retraced) -> Iterator[Hypothesis]:
    """By which rate parameters moved."""
    step = made.start.step
    rate = learning_rate(made.case.training.recipe, step)

    def moved(factor: float) -> Change:
        return Change(rate=lambda m, right: factor * right)

    (factor,) = _fitted(_left(made, "parameters", moved), 1.0)
    reported = float(made.delivered.get(f"steps.{step}.rate", rate))
    # What it says is nearer than what parameters, rounded, show.
    moved_by = reported if reported != rate else factor * rate
    what = f"a learning rate of {instead(moved_by, rate, digits=4)}"
    if rate:
        yield Hypothesis("learning_rate", what, "OPT-9", step=moved(moved_by / rate))
    yield Hypothesis(
        "learning_rate", f"{what} in every step", "OPT-9", step=Change(rate=lambda m, right: moved_by)
    )


def _epsilon(made: Retraced) -> Iterator[Hypothesis]:
    """With which epsilon parameters moved."""
    if made.case.training.recipe.algorithm == "sgd":
        return

    def powered(power: float) -> Change:
        return recipe(epsilon=10.0**power)

    left, powers = _left(made, "parameters", powered), np.linspace(*POWERS)
    for _ in range(LOOKS):
        squares = [np.nan_to_num(np.square(left(powers[[i]])).sum(), nan=np.inf) for i in range(len(powers))]
        place = int(np.argmin(squares))
        low, best, high = powers[[max(place - 1, 0), place, min(place + 1, len(powers) - 1)]].tolist()
        powers = np.linspace(low, high, len(powers))
    (power,) = _fitted(left, best, by=NUDGE, rounds=REFINED)
    yield _number(made, "epsilon", "OPT-3", 10.0 ** min(max(power, low), high))
