"""Cause of a divergent training step."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.bug import recipe as with_recipe
from concord.conformance.bugs.catalogue import TRAINING
from concord.conformance.bugs.training.edited_step import CLAUSE_OF
from concord.conformance.bugs.training.edits import kept_in_other_step, of_other_step
from concord.conformance.explain.computation import within
from concord.conformance.explain.fitting import Left, fitted, power
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.explain.search import Search
from concord.conformance.judging.explanation import Explanation
from concord.conformance.lockstep.training_step import DeliveredStep
from concord.conformance.wording import few, instead_of, joined, multiple
from concord.spec.arrays import Array
from concord.spec.errors import ConfigError
from concord.spec.parameters import parameters
from concord.spec.training.recipe import CHOICES, KINDS_OF_PARAMETERS, RATES, Recipe
from concord.spec.training.schedules import learning_rate

# Values that recipe fields get by mistake; for choices, all alternatives are tried.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_epsilon": (0.0, 1e-8, 1e-7, 1e-6),
    "dampening": (0.0,),
    "first_step": (0, 1),
    "final_share": (0.0, 0.1),
    **dict.fromkeys(("nesterov", "bias_correction", "amsgrad", "centered"), (False, True)),
    **dict.fromkeys(RATES, (0.0, 0.1, 0.5)),
}

# Relative difference between a rate and its float32 rounding.
SAME_RATE = 1e-6

# Largest number of steps by which a schedule may be longer or shorter.
LONGEST = 2_000


def cause_of(first: DeliveredStep, others: Sequence[DeliveredStep] = ()) -> Explanation | None:
    """Return an explanation of the first divergent step that ``others`` confirm."""
    search, diverging = Search(first, others=others), [other for other in others if other.tensor]
    cause = search.explain((suspects(first.case.training.recipe), recovered(first)))
    for failure in search.effort.failures:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)
    if cause:
        return cause
    lasting = [
        refuted
        for refuted in search.refuted
        if all(other.compatible(refuted.hypothesis) for other in diverging)
    ]
    # Agreeing steps contradict these, unless an error starts at this step: then several steps must confirm
    # it.
    if diverging and lasting:
        return search.conclude(lasting, f" from step {first.start.step + 1} on")
    return search.explain((), readings(first))


def suspects(recipe: Recipe) -> Iterator[Hypothesis]:
    """Yield bugs and alternative values."""
    for bug in TRAINING.values():
        if bug.only in ("", recipe.algorithm):
            yield Hypothesis(bug.name, bug.explanation, bug.clause, change=bug.change)
    for by, which in ((1, "next"), (-1, "previous")):
        for text, clause, change in (
            ("the batches", "OPT-10", Change(batches=partial(of_other_step, by=by))),
            ("the dropout masks", "DRP-3", Change(masks=partial(kept_in_other_step, by=by))),
        ):
            yield Hypothesis("other_step", f"{text} of the {which} step", clause, change=change)
    if any(getattr(recipe, name) for name in RATES):
        off = with_recipe(**dict.fromkeys(RATES, 0.0))
        yield Hypothesis("dropout_off", "training without dropout", "DRP-2", change=off)
    for name, fields in alternatives(recipe):
        with contextlib.suppress(ConfigError):
            recipe.replace(**fields)
            text = f"{name} = {instead_of(fields[name], getattr(recipe, name))}"
            yield Hypothesis(name, text, CLAUSE_OF[name], change=with_recipe(**fields))


def alternatives(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield alternative values, with the fields that they require."""
    total, warmup, accumulation = recipe.total_steps or 0, recipe.warmup_steps, recipe.accumulation
    numbers = {
        **NUMBERS,
        "momentum": (0.0,),
        "beta1": (recipe.beta2,),
        "weight_decay": (2 * recipe.weight_decay,),
        "undecayed": tuple(_others(recipe.undecayed)),
        "accumulation": tuple(value for value in (1, accumulation - 1, accumulation + 1) if value > 0),
        "warmup_steps": (0, warmup - 1, warmup + 1),
        "total_steps": tuple(total + more for more in (-1, 1, warmup, -warmup)),
    }
    for name in CLAUSE_OF:
        for value in CHOICES.get(name) or numbers.get(name, ()):
            if value != getattr(recipe, name):
                yield name, {name: value, **_besides(recipe, name, value)}


def _besides(recipe: Recipe, name: str, value: Any) -> dict[str, Any]:
    # Without these fields, the recipe would be refused.
    if name == "momentum":
        return {"dampening": 0.0, "nesterov": False}
    if name == "beta1":  # swapped
        return {"beta2": recipe.beta1}
    if name == "schedule" and value not in ("linear", "cosine"):
        return {"total_steps": None}
    none: dict[str, dict[str, Any]] = {"clipping": {"clip_at": None}, "decay_form": {"weight_decay": 0.0}}
    return none.get(name, {}) if value == "none" else {}


def _others(undecayed: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    # The empty set, the complement, and sets with one or two kinds toggled.
    now, kinds = set(undecayed), KINDS_OF_PARAMETERS
    toggled = [{kind, other} for place, kind in enumerate(kinds) for other in kinds[place:]]
    for changed in (now, set(kinds), *toggled):
        yield tuple(kind for kind in kinds if kind in now ^ changed)


# Values of a recipe that cannot be guessed.


def recovered(delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    """Yield fitted values, according to the first wrong stage."""
    for look in LOOKS.get(delivered_step.stage, ()):
        with contextlib.suppress(*INAPPLICABLE):  # different training, or different tensors
            yield from look(delivered_step)


def _number(delivered_step: DeliveredStep, name: str, value: float) -> Hypothesis:
    text = f"{name} = {instead_of(value, getattr(delivered_step.case.training.recipe, name), digits=4)}"
    return Hypothesis(name, text, CLAUSE_OF[name], change=with_recipe(**{name: value}))


def _left(delivered_step: DeliveredStep, section: str, change: Callable[[float], Change]) -> Left:
    prefix = f"steps.{delivered_step.start.step}.{section}."
    report = {name: array for name, array in delivered_step.delivered.items() if name.startswith(prefix)}

    def left(numbers: Array) -> Array:
        values = delivered_step.exactly(change(float(numbers[0])))
        shared = [(report[name] - values[name]).reshape(-1) for name in report if name in values]
        return np.concatenate(shared) if shared else np.zeros(0)

    return left


def _schedule(delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    recipe, step = delivered_step.case.training.recipe, delivered_step.start.step
    reported = float(delivered_step.delivered.get(f"steps.{step}.rate", math.nan))

    def fits(name: str, value: int) -> bool:
        try:
            rate = learning_rate(recipe.replace(**{name: value}), step)
        except ConfigError:
            return False
        return abs(rate - reported) <= SAME_RATE * abs(rate)

    for name in ("warmup_steps", "total_steps"):
        if current := getattr(recipe, name):
            near = range(max(1, current - LONGEST), current + LONGEST)
            nearest = sorted(near, key=lambda value: abs(value - current))
            fitting = next((value for value in nearest if fits(name, value)), current)
            if fitting != current:
                yield _number(delivered_step, name, fitting)


def _fitted(name: str, section: str, delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    start = getattr(delivered_step.case.training.recipe, name)
    if name == "clip_at":  # clipped gradients are proportional to it below the norm
        start = float(delivered_step.exactly(Change())[f"steps.{delivered_step.start.step}.norm"]) / 4
    residual = _left(delivered_step, section, lambda number: with_recipe(**{name: number}))
    yield _number(delivered_step, name, *fitted(residual, start))


def _epsilon(delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    if delivered_step.case.training.recipe.algorithm != "sgd":
        fitted_exponent = power(
            _left(delivered_step, "parameters", lambda exponent: with_recipe(epsilon=10.0**exponent))
        )
        yield _number(delivered_step, "epsilon", 10.0**fitted_exponent)


def _rate(delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    step = delivered_step.start.step
    rate = learning_rate(delivered_step.case.training.recipe, step)

    def moved(factor: float) -> Change:
        return Change(rate=lambda _, right: factor * right)

    (factor,) = fitted(_left(delivered_step, "parameters", moved), 1.0)
    reported = float(delivered_step.delivered.get(f"steps.{step}.rate", rate))
    # A reported rate is more precise than a rate fitted to rounded parameters.
    moved_by = reported if reported != rate else factor * rate
    text = f"a learning rate of {instead_of(moved_by, rate, digits=4)}"
    if rate:
        yield Hypothesis("learning_rate", text, "OPT-9", change=moved(moved_by / rate))
    always = Change(rate=lambda *_: moved_by)
    yield Hypothesis("learning_rate", f"{text} in every step", "OPT-9", change=always)


# Fits to try, by the first wrong stage.
LOOKS: dict[str, tuple[Callable[[DeliveredStep], Iterator[Hypothesis]], ...]] = {
    "clipped": (partial(_fitted, "clip_at", "clipped"),),
    "moments": (
        _schedule,
        partial(_fitted, "beta1", "first_moment"),
        partial(_fitted, "beta2", "second_moment"),
        partial(_fitted, "momentum", "momentum"),
        partial(_fitted, "weight_decay", "parameters"),
        _rate,
        _epsilon,
    ),
}


# Findings from a single section.

# Kinds of parameters with a special name.
KINDS = {"embedding": "token and segment tables", "positions": "position tables", "kernel": "weights"}

# Each section's description, and the clause that it breaks; if empty, that of its tensors.
SECTIONS = {
    "gradients": ("gradients", "GRD-1"),
    "clipped": ("gradients", "OPT-7"),
    "parameters": ("updated parameters", ""),
}


def readings(delivered_step: DeliveredStep) -> Iterator[Hypothesis]:
    """Yield descriptions of the values of wrong parameters."""
    section = delivered_step.tensor.split(".")[2]
    if section not in SECTIONS:
        return
    prefix = f"steps.{delivered_step.start.step}.{section}."
    rows = {
        row.tensor.removeprefix(prefix): row
        for row in delivered_step.verdict.table
        if row.tensor.startswith(prefix)
    }
    wrong = [name for name, row in rows.items() if row.status == "diverges"]
    subject, clause = SECTIONS[section]
    for description, others in _instead(delivered_step, section).items():
        like = {
            name for name in rows if name in others and _is(delivered_step, f"{prefix}{name}", others[name])
        }
        if like >= {*wrong}:
            text = f"{subject}{_of(delivered_step, wrong, like, [*rows])} that are {description}"
            yield Hypothesis("read_off", text, clause or rows[wrong[0]].clause, rare=True)
            return


def _of(
    delivered_step: DeliveredStep, wrong: Sequence[str], like: Collection[str], every: Sequence[str]
) -> str:
    # Name whole kinds if all their parameters have the property, right or wrong; otherwise name a few
    # parameters.
    kinds = {
        name: parameter.kind
        for name, parameter in parameters(delivered_step.case.config, delivered_step.case.part).items()
    }
    some = dict.fromkeys(kinds[name] for name in wrong)
    if {*every} <= {*like}:
        return ""
    if {name for name in every if kinds[name] in some} <= {*like}:
        return f" of {joined([KINDS.get(kind, f'every {kind}') for kind in some])}"
    return f" of {few(f'`{name}`' for name in wrong)}"


def _instead(delivered_step: DeliveredStep, section: str) -> dict[str, dict[str, Array]]:
    values, prefix = delivered_step.expected.values, f"steps.{delivered_step.start.step}."

    def of(kind: str) -> dict[str, Array]:
        begin = f"{prefix}{kind}."
        return {
            name.removeprefix(begin): expected for name, expected in values.items() if name.startswith(begin)
        }

    right = of(section)
    possible = {"zero": {name: 0.0 * expected for name, expected in right.items()}}
    if section == "clipped":
        possible["not clipped"] = of("gradients")
    if section == "parameters":
        possible["as they were before the step"] = {
            name: delivered_step.start.state[f"parameters.{name}"]
            for name in right
            if f"parameters.{name}" in delivered_step.start.state
        }
    first = delivered_step.tensor.split(".", 3)[3]
    expected, actual = right[first].astype(np.float64), delivered_step.actual.astype(np.float64)
    if section != "parameters" and expected.any():
        factor = float((expected * actual).sum() / np.square(expected).sum())
        possible[f"multiplied by {multiple(float(f'{factor:.4g}'))}"] = {
            name: factor * value for name, value in right.items()
        }
    return possible


def _is(delivered_step: DeliveredStep, name: str, value: Array) -> bool:
    right, sigma = delivered_step.expected.values[name], delivered_step.expected.sigmas[name]
    largest = float(
        np.max(abs(value), initial=0.0) / max(np.max(abs(right), initial=0.0), np.finfo(float).tiny)
    )
    return name in delivered_step.delivered and within(
        delivered_step.delivered[name] - value, sigma * max(1.0, largest)
    )
