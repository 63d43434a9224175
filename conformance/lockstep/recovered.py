"""Numbers that nobody would guess, recovered from what a step reported: batch weights, limits, rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer, Tensor
from concord.conformance.bugs.bug import Bug, Change, StepEdit
from concord.conformance.bugs.training.step import Tensors, TrainingStep, rule
from concord.conformance.bugs.training.step import recipe as by_recipe
from concord.conformance.estimate import exact
from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import INAPPLICABLE
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.wording import distinct, few, instead, multiple
from concord.spec.errors import ConfigError
from concord.spec.parameters import parameters
from concord.spec.training.schedules import learning_rate

NEVER = 1e-30
"""What is smaller says nothing of a factor."""

ALIKE = 1e-3
"""Share by which rows may differ from a multiple of what they should be: more than rounding makes."""

KINDS = {
    "embedding": "embeddings",
    "positions": "learnt positions",
    "kernel": "all weights",
    "bias": "all biases",
    "gamma": "all gammas",
    "beta": "all betas",
}

SAME_RATE = 1e-6
"""Share by which a rate may differ from one that is rounded to float32."""

SAME_NORM = 1e-4
"""Share by which a norm may differ from the right one, and be called right."""

BETAS = {"first_moment": "beta1", "second_moment": "beta2"}
"""By what an average weighs what was there."""

POWERS = -13.0, 0.0
"""Powers of ten between which an epsilon is looked for."""

SEARCHED, LOOKS = 12, 2
"""Values that are tried at once, and how often: then as many between the neighbours of the best."""

REFINED, NUDGE = 4, 1e-4
"""Steps of Gauss and Newton where numbers are not linear, and how far apart a slope is taken there."""

LONGEST = 2_000
"""By how many steps a schedule may be longer or shorter."""

LOOKED_UP = {"embeddings.token.weight": "input_ids", "embeddings.segment.weight": "segment_ids"}
"""The inputs that say which rows of a table are looked up."""


def recovered(made: MadeStep) -> Iterator[Bug]:
    """Yield what a step would have been computed with."""
    searches: dict[str, tuple[Callable[[MadeStep], Iterator[Bug]], ...]] = {
        "gradients": (_weights, _counted, _some_gradients),
        "clipped": (_limit,),
        "moments": (_schedule, _averages, _movement, _some_movements, _epsilon),
    }
    for search in searches.get(made.stage, ()):
        try:
            yield from search(made)
        except INAPPLICABLE:  # no such training, or other tensors than it has
            continue


def _bug(name: str, what: str, clause: str, change: Change) -> Bug:
    return Bug(name=name, group="", what=what, clause=clause, change=change)


def _number(made: MadeStep, name: str, clause: str, value: float) -> Bug:
    """Return training by a recipe with another number."""
    what = f"{name} = {instead(value, getattr(made.case.training.recipe, name), digits=4)}"
    return _bug(name, what, clause, Change(recipe=by_recipe(**{name: value})))


def _named(made: MadeStep, values: Mapping[str, Array], section: str) -> dict[str, Array]:
    """Return the tensors of a section of the step, by name of a parameter."""
    prefix = f"steps.{made.start.step}.{section}."
    return {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in values.items()
        if name.startswith(prefix)
    }


def _left(made: MadeStep, section: str, change: Callable[..., Change]) -> Callable[[Array], Array]:
    """Return what is left between a section as it was reported, and as numbers of a change make it."""
    wanted = _named(made, made.delivered, section)

    def left(numbers: Array) -> Array:
        found = _named(made, made.right(change(*map(float, numbers))), section)
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


def _weights(made: MadeStep) -> Iterator[Bug]:
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
    yield _bug("batch_weights", what, "OPT-10", change)


def _counted(made: MadeStep) -> Iterator[Bug]:
    """Whether rows of tables that are looked up several times count as often once more."""
    actual, right = (_named(made, values, "gradients") for values in (made.delivered, made.expected.values))

    def times(step: int, table: str) -> Array:
        given = [getattr(batch, LOOKED_UP[table]) for batch in made.case.training.steps[step]]
        ids = np.concatenate([ids.reshape(-1) for ids in given])
        return np.maximum(np.bincount(ids, minlength=len(right[table])), 1)[:, None].astype(float)

    def again(table: str) -> bool:
        often = times(made.start.step, table)
        off = np.max(abs(actual[table] - often * right[table]), initial=0.0)
        return bool(often.max() > 1 and off <= ALIKE * np.max(abs(actual[table]), initial=0.0))

    tables = [table for table in LOOKED_UP if table in actual.keys() & right.keys() and again(table)]

    def repeated(m: TrainingStep, total: Tensors) -> Tensors:
        often = {name: total[name].of(total[name].a.leaf(times(m.number, name))) for name in tables}
        return {name: gradient * often.get(name, 1.0) for name, gradient in total.items()}

    if tables:
        what = "gradients of rows that are looked up several times, and count as often once more"
        yield _bug("rows_counted_again", what, "GRD-1", Change(gradients=repeated))


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
    kinds = {name: parameters(made.case.config, made.case.part)[name].kind for name in factors}
    factor = float(np.median(others))
    how = f"multiplied by {multiple(factor, digits=4)}" if factor else "zero"
    return factor, names, f"of {_described(names, kinds)} that are {how}"


def _described(names: set[str], kinds: Mapping[str, str]) -> str:
    """Say in the fewest words which parameters of all these are."""
    ways = {KINDS[kind]: {name for name in kinds if kinds[name] == kind} for kind in kinds.values()}
    for name in kinds:
        words = name.split(".")
        ways[f"`*.{words[-1]}`"] = {other for other in kinds if other.endswith(f".{words[-1]}")}
        for count in range(1, len(words) + 1):
            start = ".".join(words[:count])
            ways[f"`{start}`"] = {other for other in kinds if f"{other}.".startswith(f"{start}.")}
    listed = few((f"`{name}`" for name in sorted(names)), most=3)
    exact = [way for way, those in ways.items() if those == names]
    missing = [f"all but {way}" for way, those in ways.items() if those == kinds.keys() - names]
    return min(exact or missing, key=len, default=listed)


def _some_gradients(made: MadeStep) -> Iterator[Bug]:
    """By which factor the gradients of some parameters alone are multiplied."""
    factor, names, which = _some(made, "gradients")

    def multiplied(m: TrainingStep, total: Tensors) -> Tensors:
        return {name: gradient * factor if name in names else gradient for name, gradient in total.items()}

    yield _bug("gradients_of_some", f"gradients {which}", "GRD-1", Change(gradients=multiplied))


def _some_movements(made: MadeStep) -> Iterator[Bug]:
    """By which factor the movement of some parameters alone is multiplied."""
    state = {name.removeprefix("parameters."): array for name, array in made.start.state.items()}
    factor, names, which = _some(made, "parameters", state)

    def updated(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *given: Any) -> Tensor:
        usual = right(name, parameter, *given)
        return parameter + (usual - parameter) * factor if name in names else usual

    yield _bug("rate_of_some", f"steps {which}", "OPT-1", Change(optimizer=rule(updated=updated)))


def _schedule(made: MadeStep) -> Iterator[Bug]:
    """With which number of steps a schedule has the rate that was reported."""
    recipe, step = made.case.training.recipe, made.start.step
    reported = float(made.delivered.get(f"steps.{step}.rate", math.nan))

    def reached(name: str, value: int) -> bool:
        try:
            rate = learning_rate(recipe.replace(**{name: value}), step)
        except ConfigError:
            return False
        return abs(rate - reported) <= SAME_RATE * abs(rate)

    for name in ("warmup_steps", "total_steps"):
        meant = getattr(recipe, name)
        if math.isnan(reported) or not meant or reached(name, meant):
            continue
        nearest = (meant + sign * by for by in range(1, LONGEST) for sign in (1, -1))
        value = next((value for value in nearest if reached(name, value)), None)
        if value is not None:
            yield _number(made, name, "OPT-9", value)


def _limit(made: MadeStep) -> Iterator[Bug]:
    """By how much gradients were clipped."""
    norms = [values.get(f"steps.{made.start.step}.norm") for values in (made.right(), made.delivered)]
    right, reported = (None if norm is None else float(norm) for norm in norms)
    off = reported / right if right and reported is not None else 1.0

    def clipped(factor: float) -> Change:
        return Change(
            clip=lambda m, right, gradients, squares: (
                {name: gradient * factor for name, gradient in gradients.items()},
                right[1] * off,
            )
        )

    (factor,) = _fitted(_left(made, "clipped", clipped), 0.0)
    if right is not None and abs(off - 1) < SAME_NORM and 0 < factor < 1:
        # The limit itself, so that it can be tried in steps of other norms.
        yield _number(made, "clip_at", "OPT-7", factor * right)
    said = f"a norm that is {multiple(off, digits=4)} times what it should be, and "
    what = f"{said if abs(off - 1) >= SAME_NORM else ''}gradients times {multiple(factor, digits=4)}"
    yield _bug("clip_at", what, "OPT-7", clipped(factor))


def _averages(made: MadeStep) -> Iterator[Bug]:
    """By how much an average weighed what was there, and what is new."""
    for section, clause in (("first_moment", "OPT-3"), ("second_moment", "OPT-3"), ("momentum", "OPT-2")):
        if not _named(made, made.delivered, section):
            continue
        kept = [array for name, array in made.start.state.items() if name.startswith(f"{section}.")]
        started = max((float(np.max(abs(array), initial=0.0)) for array in kept), default=0.0) > NEVER

        weighed = partial(_weighing, section)
        try:
            fresh, *old = _fitted(_left(made, section, weighed), *([0.0, 0.0] if started else [0.0]))
        except INAPPLICABLE:
            continue
        before = "".join(f"{share:.4g} of what was there + " for share in old)
        what = f"{section} = {before}{fresh:.4g} of what is new"
        yield _bug(f"weights_of_{section}", what, clause, weighed(fresh, *old))
        if section in BETAS and 0 <= fresh <= 1:  # the correction for its bias knows of it too
            yield _number(made, BETAS[section], clause, 1 - fresh)


def _weighing(section: str, fresh: float, old: float = 0.0) -> Change:
    """Return training whose average weighs otherwise."""

    def weighed(o: Optimizer, name: str, value: Tensor) -> Tensor:
        o.state[f"{section}.{name}"] = old * o.state[f"{section}.{name}"] + fresh * value
        return o.state[f"{section}.{name}"]

    def average(o: Optimizer, right: StepEdit, key: str, name: str, value: Tensor, beta: float) -> Tensor:
        return weighed(o, name, value) if key == section else right(key, name, value, beta)

    def with_momentum(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, numbers: Tensors) -> Tensor:
        if section != "momentum":
            return right(name, gradient, numbers)
        velocity = weighed(o, name, gradient)
        ahead = gradient + o.recipe.momentum * velocity if o.recipe.nesterov else velocity
        return numbers["rate"] * ahead

    return Change(optimizer=rule(average=average, with_momentum=with_momentum))


def _movement(made: MadeStep) -> Iterator[Bug]:
    """By which rate parameters moved, and by how much they decayed."""
    recipe, step = made.case.training.recipe, made.start.step
    rate, decay = learning_rate(recipe, step), recipe.weight_decay
    apart = recipe.decay_form in ("times_rate", "alone") and decay > 0

    def moved(factor: float, share: float = 1.0) -> Change:
        """Return training by a multiple of the rate, and by one of what each parameter decays."""
        both = share / factor if recipe.decay_form == "times_rate" and factor else share
        other = by_recipe(weight_decay=decay * both) if apart else Change().recipe
        return Change(rate=lambda m, right: factor * right, recipe=other)

    factor, *share = _fitted(_left(made, "parameters", moved), *([1.0, 1.0] if apart else [1.0]))
    reported = float(made.delivered.get(f"steps.{step}.rate", rate))
    # What it says is nearer than what parameters, rounded, show.
    moved_by = reported if reported != rate else factor * rate
    what = f"a learning rate of {instead(moved_by, rate, digits=4)}"
    if rate:
        times = moved_by / rate
        yield _bug("learning_rate", what, "OPT-9", Change(rate=lambda m, right: times * right))
    yield _bug("learning_rate", f"{what} in every step", "OPT-9", Change(rate=lambda m, right: moved_by))
    if share and share[0] >= 0:
        yield _number(made, "weight_decay", "OPT-6", share[0] * decay)


def _epsilon(made: MadeStep) -> Iterator[Bug]:
    """With which epsilon parameters moved."""
    if made.case.training.recipe.algorithm == "sgd":
        return

    def powered(power: float) -> Change:
        return Change(recipe=by_recipe(epsilon=10.0**power))

    left, (low, high), best = _left(made, "parameters", powered), POWERS, POWERS[0]
    for _ in range(LOOKS):
        tried = np.linspace(low, high, SEARCHED)
        squares = [np.nan_to_num(np.square(left(tried[[i]])).sum(), nan=np.inf) for i in range(SEARCHED)]
        place = int(np.argmin(squares))
        best = float(tried[place])
        low, high = float(tried[max(place - 1, 0)]), float(tried[min(place + 1, SEARCHED - 1)])
    (power,) = _fitted(left, best, by=NUDGE, rounds=REFINED)
    yield _number(made, "epsilon", "OPT-3", 10.0 ** min(max(power, low), high))
