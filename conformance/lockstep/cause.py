"""What explains steps that diverge: they are made again with one thing wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.training.step import text
from concord.conformance.explain import Cause
from concord.conformance.explain.hypothesis import INAPPLICABLE
from concord.conformance.explain.search import EDGE, MOST_NAMED, MUCH_BETTER
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.lockstep.recovered import recovered
from concord.conformance.lockstep.suspects import suspects
from concord.spec.training.recipe import Recipe


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
    recipe, steps = first.case.training.recipe, len(first.case.training.steps)
    diverging = [other for other in others if other.tensor]
    with np.errstate(all="ignore"):  # what is not finite is compared as such
        known = explaining(first, suspects(recipe, steps, first.start.step))
        if found := holding(known, others):
            return conclude(found, recipe)
        guessed = explaining(first, recovered(first))
        if found := holding(guessed, others):
            # One number may stand for several rules: the first that holds.
            return conclude(list({bug.name: (off, bug) for off, bug in reversed(found)}.values()), recipe)
        if diverging and (found := holding([*known, *guessed], diverging)):
            return conclude(found, recipe, f" from step {first.start.step + 1} on")
    return None


def holding(found: Sequence[tuple[float, Bug]], others: Sequence[MadeStep]) -> list[tuple[float, Bug]]:
    """Return the bugs that hold in other steps."""
    return [(distance, bug) for distance, bug in found if all(holds(bug, other) for other in others)]


def holds(bug: Bug, other: MadeStep) -> bool:
    """Return whether a bug that explains one step is compatible with another."""
    training = other.case.training
    if bug.name == "data_of_other_step":  # each step has batches of its own
        same = (
            one
            for one in suspects(training.recipe, len(training.steps), other.start.step)
            if "batches" in one.change.places
        )
        return not other.tensor or bool(next(iter(explaining(other, same)), None))
    return other.compatible(bug)


def explaining(made: MadeStep, tried: Iterable[Bug]) -> list[tuple[float, Bug]]:
    """Return the bugs that explain a step, and by how many tolerances it lies off each."""
    found = []
    for bug in tried:
        try:
            if not made.possible(bug):
                continue
            values = made.tried(bug)
            if made.nearer(values) and (distance := made.distance(bug, values)) <= 1:
                found.append((distance, bug))
        except INAPPLICABLE:
            continue
    return found


def conclude(found: Sequence[tuple[float, Bug]], recipe: Recipe, since: str = "") -> Cause:
    """Return the cause: what explains a step best, and all that explains it as well.

    Args:
        since: from which step on, where it does not hold in steps before.
    """
    best = min(distance for distance, _ in found)
    kept = [bug for distance, bug in found if distance <= EDGE or distance < MUCH_BETTER * best]
    names, clauses = (tuple(dict.fromkeys(getattr(bug, of) for bug in kept)) for of in ("name", "clause"))
    said = " or by ".join(f"{text(bug, recipe)} ({bug.clause})" for bug in kept[:MOST_NAMED])
    more = f" or by {len(kept) - MOST_NAMED} others" if len(kept) > MOST_NAMED else ""
    how = "explained" if len(names) == 1 else "may be explained"
    return Cause(" or ".join(names), f"{how} by {said}{more}{since}", len(names) == 1, clauses)
