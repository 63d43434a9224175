"""Why the first wrong tensor of a run of the family is wrong: its cause, what is seen of it, its clauses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from concord.conformance.bugs.context import Flags
from concord.conformance.explain import suspects
from concord.conformance.explain.backward import bounds
from concord.conformance.explain.description import Description, clauses_of, clauses_of_rows, describe
from concord.conformance.explain.hypothesis import MOST_NAMED, RIGHT, Hypothesis, explained_by
from concord.conformance.explain.partial_model import group_of
from concord.conformance.explain.question import Exact, Question
from concord.conformance.explain.search import Effort, Search, one_thread
from concord.conformance.judging.expectation import (
    JudgedProblem,
    is_gradient,
    is_tap_gradient,
    root_mean_square,
)
from concord.conformance.judging.explanation import Explanation
from concord.conformance.progress import say
from concord.conformance.wording import few
from concord.spec.arrays import Array
from concord.spec.tensors import clause_of

LONGEST = 60.0
"""Seconds of the processor that the search for a bug may take.

A step of a large model takes long, and all of it longer.
"""

BUDGET = 10.0
"""Seconds of the processor that may be spent on bugs made in one place."""

FITTING = 2
"""What more hypotheses explain in one place says nothing of it."""

MOST_ELEMENTS = 2**22
"""Of larger tensors a cause is not tried in the whole run."""

VISIBLE = 20.0
"""How many times a right tensor's error the effect of a hypothesis must be for the tensor to refute it."""


@one_thread()
def explain(
    case: JudgedProblem,
    pinned: Mapping[str, Array],
    tensor: str,
    delivered: Mapping[str, Array],
    statuses: Mapping[str, str],
) -> Explanation:
    """Say what is known of the first tensor that is wrong.

    Args:
        case: what was computed.
        pinned: the taps that the run delivered.
        tensor: the first one, or the first gradient, that is wrong.
        delivered: every tensor of the run.
        statuses: what each was judged to be.
    """
    question, effort = Question(case, pinned, tensor, delivered[tensor]), Effort(LONGEST)
    question.delivered = delivered
    defining = clause_of(case.config, tensor, case.part)
    cause: Explanation | None = None
    seen: Description | None = None
    place, steps, ruling, kind = "", tuple[str, ...](), tuple[str, ...](), ""
    with np.errstate(all="ignore"):  # what is not finite is compared as such
        if question.hidden:
            say(f"looking for what explains {tensor}, {LONGEST:.0f} s of the processor at most")
        with effort.attempt("the search for a cause"):
            search = Search(question, effort)
            cause = search.explain(suspects.stages(question), suspects.readings(question))
        if cause:
            with effort.attempt("trying the cause in the whole run"):
                cause = _in_its_place(question, cause, delivered, statuses)
        with effort.attempt("the description"):
            seen, region, kind = describe(question)
            # What zeros say they say by themselves: many a bug leaves some.
            if cause is None and seen and seen.where and not question.parameter and kind != "zero":
                cause = _in_place(question, region, seen.where, effort)
                ruling = clauses_of_rows(question, seen, kind) if cause else ()
        if cause and seen and seen.where and not np.isfinite(question.actual).all():
            # What is no number may have become so in many ways.
            cause = explained_by(tensor, cause.hypotheses, False)
        if question.parameter:
            with effort.attempt("placing it in the backward pass"):
                place, steps = bounds(question, statuses)
            if steps[1:] == ("GRD-1",) and kind and not cause:
                steps = steps[::-1]  # what it is made of is right, and this is no derivative
            if cause and steps and all(one.gradient for one in cause.hypotheses):
                # That says what became of the gradient, and not where.
                cause = dataclasses.replace(cause, clauses=(*steps, "GRD-1"))
    certain = cause is not None and cause.confident
    others = () if certain else (*steps, *clauses_of(question, seen, kind, defining))
    told = [place] if place and not certain else []
    ruling = ruling if {*ruling} & {"MSK-5", "MSK-8"} else ()
    clauses = tuple(dict.fromkeys((*ruling, *(cause.clauses if cause else ()), *others)))
    return dataclasses.replace(
        cause or Explanation(tensor),
        clauses=clauses,
        description=seen.text if seen else "",
        notes=(*effort.notes, *told, *elsewhere(tensor, statuses)),
    )


def _in_its_place(
    question: Question, cause: Explanation, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> Explanation:
    """Return a cause without the options that the rest of the layer contradicts.

    If that leaves none, they hold in this tensor alone.
    """
    if question.parameter or question.actual.size > MOST_ELEMENTS:
        return cause
    against = {
        one.text: other
        for one in cause.hypotheses[:MOST_NAMED]
        if one.fields and (other := refuting(question, one, delivered, statuses))
    }
    if kept := [one for one in cause.hypotheses if one.text not in against]:
        return explained_by(question.tensor, kept, cause.confident) if against else cause
    there = ", ".join(f"`{name}`" for name in dict.fromkeys(against.values()))
    return explained_by(question.tensor, cause.hypotheses, False, f", here alone: {there} would be wrong too")


def refuting(
    question: Question, hypothesis: Hypothesis, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> str:
    """Return a tap of the same layer that is right, and would not be under a hypothesis; empty if none is."""
    wrong, right = (
        question.run(of, Exact(question.case.dtype), whole=True, wanted="") for of in (hypothesis, RIGHT)
    )
    for name, status in statuses.items():
        there = name in delivered and name in wrong.taps and name in right.taps
        if not there or status != "agrees" or group_of(name) != group_of(question.tensor):
            continue
        actual, made, meant = np.asarray(delivered[name]), wrong.taps[name].value, right.taps[name].value
        if not all(x.shape == actual.shape and np.isfinite(x).all() for x in (actual, made, meant)):
            continue
        error, effect = root_mean_square(actual - meant), root_mean_square(made - meant)
        if effect > VISIBLE * max(error, 1e-7 * root_mean_square(meant)):
            return name
    return ""


def elsewhere(tensor: str, statuses: Mapping[str, str]) -> list[str]:
    """Say which other steps are wrong by themselves: each is judged from the run's own tensors before it."""
    if is_gradient(tensor) and not is_tap_gradient(tensor):
        return []  # what flows on from a wrong gradient is wrong too
    others = [
        f"`{name}`"
        for name, status in statuses.items()
        if status == "diverges"
        and name not in (tensor, "loss", "logits")
        and is_gradient(name) == is_gradient(tensor)
        and is_tap_gradient(name) == is_tap_gradient(tensor)
    ]
    return [f"wrong too, judged alone: {few(others)}"] if others else []


def _in_place(question: Question, region: Flags, where: str, effort: Effort) -> Explanation | None:
    """Return what explains a tensor where it is wrong, everything else being right.

    Args:
        effort: what takes note of failures.
    """
    of_place = Effort(BUDGET)
    of_place.failures = effort.failures
    tried = (one for one in suspects.bugs(question) if not one.rare)
    found = [one.hypothesis for one in Search(question.within(region), of_place).explaining(tried)]
    if not 0 < len(found) <= FITTING:
        return None
    cause = explained_by(question.tensor, found, False, f", only in {where}")
    return dataclasses.replace(cause, hypotheses=())  # elsewhere they cannot be tried
