"""What may be wrong with a step of training: the faults of the table, and recipes with one thing otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from concord.conformance.faults.training.catalogue import ALL
from concord.conformance.faults.training.fault import Change, Place, Window
from concord.conformance.faults.training.fault import recipe as by_recipe
from concord.conformance.wording import instead
from concord.spec.errors import ConfigError
from concord.spec.training.recipe import CHOICES, KINDS_OF_PARAMETERS, RATES, Recipe

STAGES = ("losses", "gradients", "clipped", "moments")
"""A step in the order of computation: what batches give, what becomes of their gradients, how these are clipped, and what is updated."""

NUMBERS: dict[str, tuple[Any, ...]] = {
    "epsilon": (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0),
    "beta1": (0.9, 0.95, 0.8, 0.5, 0.0),
    "beta2": (0.999, 0.9999, 0.99, 0.98, 0.95, 0.9),
    "momentum": (0.0, 0.5, 0.9, 0.99),
    "clip_epsilon": (0.0, 1e-8, 1e-7, 1e-6),
    "dampening": (0.0,),
    "weight_decay": (0.0,),
    "first_step": (0, 1),
    "final_share": (0.0, 0.1),
    "nesterov": (False, True),
    "bias_correction": (False, True),
    "amsgrad": (False, True),
    "centered": (False, True),
    **dict.fromkeys(RATES, (0.0, 0.1, 0.5)),
}
"""Other values that fields of a recipe are given by mistake; of a choice every other one is tried."""

CLAUSES = {
    "OPT-1": ("learning_rate",),
    "OPT-2": ("momentum", "momentum_form", "dampening", "nesterov"),
    "OPT-3": ("epsilon", "epsilon_placement", "beta1", "beta2", "bias_correction"),
    "OPT-4": ("amsgrad",),
    "OPT-5": ("centered", "algorithm"),
    "OPT-6": ("weight_decay", "decay_form", "undecayed"),
    "OPT-7": ("clipping", "clip_at", "clip_epsilon", "table_gradients"),
    "OPT-8": ("table_updates",),
    "OPT-9": ("schedule", "first_step", "warmup_steps", "total_steps", "decay_start", "final_share"),
    "OPT-10": ("accumulation", "accumulation_mean"),
    "DRP-2": RATES,
}
"""Which fields each clause is about."""

CLAUSE_OF = {name: clause for clause, names in CLAUSES.items() for name in names}

PLACES = {
    "losses": ("masks", "window", "load"),
    "gradients": ("shares", "added", "gradients"),
    "clipped": ("clip",),
    "moments": ("optimizer", "keeps", "skips", "rate", "load"),
}
"""Where in a step each place of a change shows first."""


@dataclass(frozen=True)
class Hypothesis:
    """Something that may be wrong with a step.

    Attributes:
        name: of the fault, or of the field of a recipe.
        text: what would explain the step, in words that follow "explained by".
        clause: of SPEC.md that it breaks.
        change: what it makes of a step.
    """

    name: str
    text: str
    clause: str
    change: Change

    def stages(self, recipe: Recipe) -> set[str]:
        """Return where in a step it may show first.

        Raises:
            ConfigError: for a recipe that it makes no recipe of.
        """
        found = {
            stage
            for stage, places in PLACES.items()
            if any(getattr(self.change, place) is not None for place in places)
        }
        changed = {"OPT-10": "gradients", "OPT-7": "clipped", "DRP-2": "losses"}
        return found | {changed.get(CLAUSE_OF[name], "moments") for name in differing(recipe, self.change)}


def differing(recipe: Recipe, change: Change) -> tuple[str, ...]:
    """Return which fields of a recipe a change makes others."""
    made = change.recipe(recipe) if change.recipe else recipe
    return tuple(
        each.name for each in fields(recipe) if getattr(made, each.name) != getattr(recipe, each.name)
    )


def hypotheses(recipe: Recipe, windows: int, step: int) -> Iterator[Hypothesis]:
    """Yield what may be wrong with a step of training by a recipe.

    Args:
        windows: how many steps there are batches for.
        step: the number of the step.
    """
    told: set[Recipe] = {recipe}
    for fault in ALL:
        if fault.algorithm not in ("", recipe.algorithm):
            continue
        if fault.change.recipe:
            try:
                made = fault.change.recipe(recipe)
            except ConfigError:
                continue
            if made == recipe:
                continue
            told.add(made)
        what = fault.what.rstrip(".")
        yield Hypothesis(
            fault.name,
            f"this: {what[0].lower()}{what[1:]}{_otherwise(recipe, fault.change)}",
            fault.clause,
            fault.change,
        )
    for name, value, change in alternatives(recipe):
        if change.recipe and change.recipe(recipe) not in told:
            yield Hypothesis(
                name, f"{name} = {instead(value, getattr(recipe, name))}", CLAUSE_OF[name], change
            )
    for other in range(windows):
        if other not in (step, step - 1, step + 1, 0):
            yield Hypothesis(
                "data_of_other_step",
                f"the batches of step {other + 1} in place of its own",
                "OPT-10",
                Change(window=_of_step(other)),
            )


def alternatives(recipe: Recipe) -> Iterator[tuple[str, Any, Change]]:
    """Yield fields of a recipe with another value, and the change to it."""
    numbers = dict(NUMBERS)
    numbers["undecayed"] = tuple(_others(recipe.undecayed))
    numbers["accumulation"] = tuple(
        value for value in (1, recipe.accumulation - 1, recipe.accumulation + 1) if value > 0
    )
    numbers["warmup_steps"] = (0, recipe.warmup_steps - 1, recipe.warmup_steps + 1)
    numbers["total_steps"] = tuple(
        (recipe.total_steps or 0) + more for more in (-1, 1, recipe.warmup_steps, -recipe.warmup_steps)
    )
    for name in CLAUSE_OF:
        for value in CHOICES.get(name) or numbers.get(name, ()):
            if value == getattr(recipe, name):
                continue
            change = by_recipe(**{name: value}, **_besides(recipe, name, value))
            try:
                assert change.recipe is not None
                change.recipe(recipe)
            except ConfigError:
                continue
            yield name, value, change


def _besides(recipe: Recipe, name: str, value: Any) -> dict[str, Any]:
    """Return what has to be otherwise with a field."""
    if (name, value) == ("clipping", "none"):
        return {"clip_at": None}
    if (name, value) == ("decay_form", "none"):
        return {"weight_decay": 0.0}
    if name == "schedule" and value not in ("linear", "cosine"):
        return {"total_steps": None}
    if (name, value) == ("momentum", 0.0):
        return {"nesterov": False, "dampening": 0.0}
    return {}


def _others(undecayed: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield other sets of kinds: none, all but these, and with one or two kinds more or fewer."""
    now = set(undecayed)
    toggled = [
        {one, other} for place, one in enumerate(KINDS_OF_PARAMETERS) for other in KINDS_OF_PARAMETERS[place:]
    ]
    for changed in (now, set(KINDS_OF_PARAMETERS), *toggled):
        yield tuple(kind for kind in KINDS_OF_PARAMETERS if kind in now ^ changed)


def _of_step(step: int) -> Callable[[Place, Any], Window]:
    def window(m: Place, windows: Any) -> Window:
        found: Window = windows[step]
        return found

    return window


def _otherwise(recipe: Recipe, change: Change) -> str:
    """Say which fields of a recipe a fault makes others."""
    made = change.recipe(recipe) if change.recipe else recipe
    said = [
        f"{name} = {instead(getattr(made, name), getattr(recipe, name))}"
        for name in differing(recipe, change)
        if name not in RATES
    ]
    return f" ({', '.join(said)})" if said else ""
