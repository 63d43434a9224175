"""Numbers that nobody would guess, recovered from what a step reported: batch weights, limits, rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer, Tensor
from concord.conformance.bugs.bug import Bug, Change, StepEdit
from concord.conformance.bugs.training.step import Tensors, TrainingStep, rule
from concord.conformance.bugs.training.step import recipe as by_recipe
from concord.conformance.expectation import Array
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.wording import distinct, few, instead, multiple
from concord.spec.batch import Batch
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

BETAS = {"first_moment": "beta1", "second_moment": "beta2"}
"""By what an average weighs what was there."""

POWERS = -13.0, 0.0
"""Powers of ten between which an epsilon is looked for."""

SEARCHED, LOOKS = 12, 2
"""Values that are tried at once, and how often: then as many between the neighbours of the best."""

REFINED, NUDGE = 4, 1e-4
"""Steps of Gauss and Newton after that, and how far apart two values are that a slope is taken from."""


def recovered(made: MadeStep) -> Iterator[Bug]:
    """Yield what a step would have been computed with."""
    searches: dict[str, tuple[Callable[[MadeStep], Iterator[Bug]], ...]] = {
        "gradients": (_weights, _counted, _some_gradients),
        "clipped": (_limit,),
        "moments": (_schedule, _averages, _movement, _some_movements, _epsilon),
    }
    for search in searches.get(made.stage, ()):
        yield from search(made)


def _bug(name: str, what: str, clause: str, **places: Any) -> Bug:
    return Bug(name=name, group="", what=what, clause=clause, change=Change(**places))


def _number(made: MadeStep, name: str, clause: str, value: float) -> Bug:
    """Return training by a recipe with another number."""
    what = f"{name} = {instead(value, getattr(made.case.training.recipe, name), digits=4)}"
    return _bug(name, what, clause, recipe=by_recipe(**{name: value}))


def _named(made: MadeStep, values: Mapping[str, Array], section: str) -> dict[str, Array]:
    """Return the tensors of a section of the step, by name of a parameter."""
    prefix = f"steps.{made.start.step}.{section}."
    return {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in values.items()
        if name.startswith(prefix)
    }


def _before(made: MadeStep, section: str, like: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of a section before the step; what is not there is zero."""
    state = made.start.state
    return {
        name: np.asarray(state.get(f"{section}.{name}", np.zeros_like(array)), np.float64)
        for name, array in like.items()
    }


def _flat(tensors: Mapping[str, Array], names: Sequence[str]) -> Array:
    return np.concatenate([tensors[name].reshape(-1) for name in names]) if names else np.zeros(0)


def _solved(columns: Sequence[Array], wanted: Array) -> list[float] | None:
    """Return by which factors columns add up to something; None where they say nothing of it."""
    usable = [column for column in columns if float(np.max(abs(column), initial=0.0)) > NEVER]
    if len(usable) < len(columns) or not np.isfinite(wanted).all():
        return None
    return [float(factor) for factor in np.linalg.lstsq(np.stack(columns, axis=1), wanted, rcond=None)[0]]


def _weights(made: MadeStep) -> Iterator[Bug]:
    """By how much each batch counted."""
    pieces: list[dict[str, Array]] = []
    right: list[float] = []

    def collect(m: TrainingStep, added: Tensors, total: Tensors, piece: Tensors, weight: float) -> Tensors:
        if m.number == made.start.step:
            pieces.append({name: np.asarray(value.tensor.value, np.float64) for name, value in piece.items()})
        return added

    def alone(m: TrainingStep, weights: list[float], counts: Sequence[Any]) -> list[float]:
        right[:] = weights
        return [1.0] * len(counts)

    made.right(Change(weights=alone, added=collect))
    actual = _named(made, made.delivered, "gradients")
    names = [name for name in actual if all(name in piece for piece in pieces)]
    found = _solved([_flat(piece, names) for piece in pieces], _flat(actual, names))
    if found is None:
        return
    factor = found[0] / right[0] if right[0] else math.nan
    if all(f"{one:g}" == f"{factor * weight:g}" for one, weight in zip(found, right, strict=True)):
        what = f"gradients times {multiple(factor, digits=4)}"
        yield _bug(
            "batch_weights",
            what,
            "OPT-10",
            weights=lambda m, right, counts: [factor * weight for weight in right],
        )
        return
    said = distinct(*map(float, (*found, *right)), digits=4)
    counts, meant = (", ".join(some) for some in (said[: len(found)], said[len(found) :]))
    what = f"batches that count by {counts} instead of {meant}"
    yield _bug(
        "batch_weights",
        what,
        "OPT-10",
        weights=lambda m, right, counts: found if len(found) == len(counts) else right,
    )


LOOKED_UP = {"embeddings.token.weight": "input_ids", "embeddings.segment.weight": "segment_ids"}
"""The inputs that say which rows of a table are looked up."""


def _counted(made: MadeStep) -> Iterator[Bug]:
    """Whether rows of tables that are looked up several times count as often once more."""
    actual, right = (_named(made, values, "gradients") for values in (made.delivered, made.expected.values))

    def times(batches: Sequence[Batch], table: str) -> Array:
        ids = [getattr(batch, LOOKED_UP[table]).reshape(-1) for batch in batches]
        rows = len(right[table])
        return np.maximum(np.bincount(np.concatenate(ids), minlength=rows)[:rows], 1)[:, None].astype(float)

    def again(table: str) -> bool:
        often = times(made.start.batches, table)
        off = np.max(abs(actual[table] - often * right[table]), initial=0.0)
        return bool(often.max() > 1 and off <= ALIKE * np.max(abs(actual[table]), initial=0.0))

    tables = [table for table in LOOKED_UP if table in actual.keys() & right.keys() and again(table)]

    def repeated(m: TrainingStep, total: Tensors) -> Tensors:
        batches = made.case.training.steps[m.number]
        return {
            name: gradient * gradient.of(gradient.a.leaf(times(batches, name)))
            if name in tables
            else gradient
            for name, gradient in total.items()
        }

    if tables:
        what = "gradients of rows that are looked up several times, and count as often once more"
        yield _bug("rows_counted_again", what, "GRD-1", gradients=repeated)


def _some(
    made: MadeStep, section: str, actual: Mapping[str, Array], right: Mapping[str, Array]
) -> tuple[float, set[str], str] | None:
    """Return the factor that some tensors alone are multiplied by, which these are, and that in words."""
    factors = {}
    for name in actual.keys() & right.keys():
        ours, theirs = right[name].reshape(-1), actual[name].reshape(-1)
        sigma = np.max(made.expected.sigmas[f"steps.{made.start.step}.{section}.{name}"])
        if np.max(abs(ours)) <= sigma / ALIKE:
            continue  # rounding alone: it has no factor
        found = _solved([ours], theirs)
        if found is None or np.max(abs(theirs - found[0] * ours)) > ALIKE * np.max(abs(ours)):
            return None
        factors[name] = 1.0 if abs(found[0] - 1) <= ALIKE else found[0]
    names = {name for name, factor in factors.items() if factor != 1}
    others = [factors[name] for name in names]
    if not 0 < len(names) < len(factors) or max(others) - min(others) > ALIKE * max(map(abs, others)):
        return None
    kinds = {name: parameters(made.case.config, made.case.part)[name].kind for name in factors}
    return float(np.median(others)), names, _described(names, kinds)


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


def _times(factor: float) -> str:
    return f"multiplied by {multiple(factor, digits=4)}" if factor else "zero"


def _some_gradients(made: MadeStep) -> Iterator[Bug]:
    """By which factor the gradients of some parameters alone are multiplied."""
    actual, right = (_named(made, values, "gradients") for values in (made.delivered, made.expected.values))
    found = _some(made, "gradients", actual, right)
    if found:
        factor, names, which = found
        yield _bug(
            "gradients_of_some",
            f"gradients of {which} that are {_times(factor)}",
            "GRD-1",
            gradients=lambda m, total: {
                name: gradient * factor if name in names else gradient for name, gradient in total.items()
            },
        )


def _some_movements(made: MadeStep) -> Iterator[Bug]:
    """By which factor the movement of some parameters alone is multiplied."""
    actual, right = (_named(made, values, "parameters") for values in (made.delivered, made.expected.values))
    before = _before(made, "parameters", right)
    moved = [{name: side[name] - before[name] for name in side if name in before} for side in (actual, right)]
    found = _some(made, "parameters", *moved)
    if found:
        factor, names, which = found

        def updated(o: Optimizer, right: Any, name: str, parameter: Tensor, *given: Any) -> Tensor:
            usual = right(name, parameter, *given)
            return parameter + (usual - parameter) * factor if name in names else usual

        yield _bug(
            "rate_of_some",
            f"steps of {which} that are {_times(factor)}",
            "OPT-1",
            optimizer=rule(updated=updated),
        )


LONGEST = 2_000
"""By how many steps a schedule may be longer or shorter."""


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
    right, step = made.right(), made.start.step
    gradients = _named(made, made.delivered, "gradients") or _named(made, right, "gradients")
    actual = _named(made, made.delivered, "clipped")
    names = [name for name in actual if name in gradients]
    found = _solved([_flat(gradients, names)], _flat(actual, names))
    norm, reported = right.get(f"steps.{step}.norm"), made.delivered.get(f"steps.{step}.norm")
    off = float(reported) / float(norm) if norm is not None and reported is not None and float(norm) else 1.0
    if found is None:
        return
    (factor,) = found
    if norm is not None and abs(off - 1) < 1e-4 and 0 < factor < 1:
        # The limit itself, so that it can be tried in steps of other norms.
        yield _number(made, "clip_at", "OPT-7", factor * float(norm))

    def clip(m: TrainingStep, right: Any, gradients: Tensors, squares: Any) -> tuple[Tensors, Tensor]:
        return {name: gradient * factor for name, gradient in gradients.items()}, right[1] * off

    said = f"a norm that is {multiple(off, digits=4)} times what it should be, and gradients times"
    what = f"{said} {multiple(factor, digits=4)}" if abs(off - 1) >= 1e-4 else ""
    yield _bug("clip_at", what or f"gradients times {multiple(factor, digits=4)}", "OPT-7", clip=clip)


def _averages(made: MadeStep) -> Iterator[Bug]:
    """By how much an average weighed what was there, and what is new."""
    right, recipe = made.right(), made.case.training.recipe
    gradients = _named(made, right, "clipped") or _named(made, right, "gradients")
    for section, clause in (("first_moment", "OPT-3"), ("second_moment", "OPT-3"), ("momentum", "OPT-2")):
        actual, wanted = _named(made, made.delivered, section), _named(made, right, section)
        names = [name for name in actual if name in wanted and name in gradients]
        by_average = recipe.algorithm == "rmsprop" and section == "momentum"
        if not names or recipe.decay_form == "coupled" or by_average:
            continue
        new = {name: gradients[name] ** (2 if section == "second_moment" else 1) for name in names}
        columns = [_flat(_before(made, section, new), names), _flat(new, names)]
        started = float(np.max(abs(columns[0]), initial=0.0)) > NEVER
        found = _solved(columns if started else columns[1:], _flat(actual, names))
        if found is None:
            continue
        old, fresh = found if started else (0.0, found[0])
        before = f"{old:.4g} of what was there + " if started else ""
        what = f"{section} = {before}{fresh:.4g} of what is new"
        yield _bug(f"weights_of_{section}", what, clause, optimizer=_weighing(section, old, fresh))
        if section in BETAS and 0 <= fresh <= 1:  # the correction for its bias knows of it too
            yield _number(made, BETAS[section], clause, 1 - fresh)


def _weighing(section: str, old: float, fresh: float) -> type[Optimizer]:
    """Return the optimizer whose average weighs otherwise."""

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

    return rule(average=average, with_momentum=with_momentum)


def _movement(made: MadeStep) -> Iterator[Bug]:
    """By which rate parameters moved, and by how much they decayed."""
    recipe, step = made.case.training.recipe, made.start.step
    rate = learning_rate(recipe, step)
    decoupled = recipe.decay_form in ("times_rate", "alone") and recipe.weight_decay > 0
    bare = made.right(Change(recipe=by_recipe(weight_decay=0.0)) if decoupled else None)
    actual, moved = (_named(made, values, "parameters") for values in (made.delivered, bare))
    before = _before(made, "parameters", moved)
    table = parameters(made.case.config, made.case.part)
    names = [
        name for name in moved if name in actual and not (decoupled and table[name].kind in recipe.undecayed)
    ]
    columns = [_flat({name: moved[name] - before[name] for name in names}, names)]
    columns += [-_flat(before, names)] if decoupled else []
    found = _solved(columns, _flat({name: actual[name] - before[name] for name in names}, names))
    if found is None:
        return
    reported = float(made.delivered.get(f"steps.{step}.rate", rate))
    # What it says is nearer than what parameters, rounded, show.
    moved_by = reported if reported != rate else found[0] * rate
    what = f"a learning rate of {instead(moved_by, rate, digits=4)}"
    if rate:
        factor = moved_by / rate
        yield _bug("learning_rate", what, "OPT-9", rate=lambda m, right: factor * right)
    yield _bug("learning_rate", f"{what} in every step", "OPT-9", rate=lambda m, right: moved_by)
    share = recipe.weight_decay * (rate if recipe.decay_form == "times_rate" else 1.0)
    if decoupled and share and found[1] >= 0:
        yield _number(made, "weight_decay", "OPT-6", found[1] / share * recipe.weight_decay)


def _epsilon(made: MadeStep) -> Iterator[Bug]:
    """With which epsilon parameters moved."""
    recipe = made.case.training.recipe
    if recipe.algorithm == "sgd":
        return
    actual = _named(made, made.delivered, "parameters")
    names = list(actual)

    def off(power: float) -> Array:
        """Return what is left between the parameters that were reported and those of an epsilon."""
        tried = made.right(Change(recipe=by_recipe(epsilon=10.0**power)))
        return _flat(actual, names) - _flat(_named(made, tried, "parameters"), names)

    try:
        power = _nearest(off, *POWERS)
    except (ConfigError, KeyError, ValueError):  # no such training, or other parameters than it has
        return
    yield _number(made, "epsilon", "OPT-3", 10.0**power)


def _nearest(off: Callable[[float], Array], low: float, high: float) -> float:
    """Return where between two numbers least is left: by looks ever closer, then Gauss and Newton's steps."""
    best = low
    for _ in range(LOOKS):
        tried = np.linspace(low, high, SEARCHED)
        left = [np.nan_to_num(np.square(off(float(number))).sum(), nan=np.inf) for number in tried]
        place = int(np.argmin(left))
        best = float(tried[place])
        low, high = float(tried[max(place - 1, 0)]), float(tried[min(place + 1, len(tried) - 1)])
    for _ in range(REFINED):
        left_there = off(best)
        slope = (off(best + NUDGE) - left_there) / NUDGE
        if not np.square(slope).sum() > 0:
            return best
        best = min(max(best - float(slope @ left_there / (slope @ slope)), low), high)
    return best
