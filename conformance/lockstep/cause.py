"""What explains steps that diverge: they are made again with one thing wrong on purpose.

That is a bug of the catalogue, a recipe with another field, or a number that a step tells.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.catalogue import TRAINING
from concord.conformance.bugs.training.step import CLAUSE_OF, text
from concord.conformance.explain import Cause
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.search import Search
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.lockstep.recovered import recovered
from concord.conformance.wording import instead
from concord.spec.errors import ConfigError
from concord.spec.training.recipe import CHOICES, KINDS_OF_PARAMETERS, RATES, Recipe

NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_epsilon": (0.0, 1e-8, 1e-7, 1e-6),
    "dampening": (0.0,),
    "first_step": (0, 1),
    "final_share": (0.0, 0.1),
    "nesterov": (False, True),
    "bias_correction": (False, True),
    "amsgrad": (False, True),
    "centered": (False, True),
    **dict.fromkeys(RATES, (0.0, 0.1, 0.5)),
}
"""Other values that fields of a recipe are given by mistake; of a choice every other one is tried.

Numbers that a step tells of are fitted (:mod:`concord.conformance.lockstep.recovered`).
"""


def cause_of(first: MadeStep, others: Sequence[MadeStep] = ()) -> Cause | None:
    """Return what explains the first step that diverges, and holds in other steps.

    Everything that a backend reported lies within the tolerances of training with that bug. What steps that
    agree contradict is named only where several steps that diverge confirm it: it is wrong from that step on.

    Args:
        others: steps before it, which agree, and after it, which diverge too.
    """
    right = first.expected.values
    if any(
        array.dtype.kind != "f" or array.shape != right[name].shape
        for name, array in first.delivered.items()
        if name in right
    ):
        return None  # numbers that cannot be compared
    search, diverging = Search(first, others=others), [other for other in others if other.tensor]
    cause = search.cause((suspects(first.case.training.recipe), recovered(first)))
    for failure in search.effort.failures:
        warnings.warn(failure, RuntimeWarning, stacklevel=2)
    if cause:
        return cause
    found = [one for one in search.refuted if all(other.compatible(one.hypothesis) for other in diverging)]
    return search.conclude(found, f" from step {first.start.step + 1} on") if diverging and found else None


def suspects(recipe: Recipe) -> Iterator[Hypothesis]:
    """Yield what may be wrong with a step of training by a recipe."""
    told: set[Recipe] = {recipe}
    for bug in TRAINING.values():
        if bug.only not in ("", recipe.algorithm):
            continue
        if "recipe" in bug.change.places:
            try:
                made = bug.change.recipe(recipe)
            except ConfigError:
                continue
            if made == recipe:
                continue
            told.add(made)
        yield Hypothesis(bug.name, text(bug, recipe), bug.clause, step=bug.change)
    for name, value, made in alternatives(recipe):
        if made not in told:
            what = f"{name} = {instead(value, getattr(recipe, name))}"
            yield Hypothesis(name, what, CLAUSE_OF[name], step=_trained_by(made))


def _trained_by(recipe: Recipe) -> Change:
    return Change(recipe=lambda given: recipe)


def alternatives(recipe: Recipe) -> Iterator[tuple[str, Any, Recipe]]:
    """Yield fields of a recipe, another value of each, and the recipe with it."""
    total, warmup, accumulation = recipe.total_steps or 0, recipe.warmup_steps, recipe.accumulation
    numbers = {
        **NUMBERS,
        "undecayed": tuple(_others(recipe.undecayed)),
        "accumulation": tuple(value for value in (1, accumulation - 1, accumulation + 1) if value > 0),
        "warmup_steps": (0, warmup - 1, warmup + 1),
        "total_steps": tuple(total + more for more in (-1, 1, warmup, -warmup)),
    }
    for name in CLAUSE_OF:
        for value in CHOICES.get(name) or numbers.get(name, ()):
            if value == getattr(recipe, name):
                continue
            try:
                yield name, value, recipe.replace(**{name: value}, **_besides(name, value))
            except ConfigError:
                continue


def _besides(name: str, value: Any) -> dict[str, Any]:
    """Return what has to be otherwise with a field."""
    together: dict[tuple[str, Any], dict[str, Any]] = {
        ("clipping", "none"): {"clip_at": None},
        ("decay_form", "none"): {"weight_decay": 0.0},
    }
    if name == "schedule" and value not in ("linear", "cosine"):
        return {"total_steps": None}
    return together.get((name, value), {})


def _others(undecayed: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield other sets of kinds: none, all but these, and with one or two kinds more or fewer."""
    now, kinds = set(undecayed), KINDS_OF_PARAMETERS
    toggled = [{one, other} for place, one in enumerate(kinds) for other in kinds[place:]]
    for changed in (now, set(kinds), *toggled):
        yield tuple(kind for kind in kinds if kind in now ^ changed)
