"""Explanation of the family's first wrong tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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

# Seconds of CPU time for the search, since one step of a large model takes long.
LONGEST = 60.0

# Seconds of CPU time for bugs that are confined to a region.
BUDGET = 10.0

# If more hypotheses fit, the region does not distinguish them, and none is named.
FITTING = 2

# Largest tensor for which a cause is also tried in the rest of the layer.
MOST_ELEMENTS = 2**22

# A correct tensor refutes a hypothesis whose effect on it is this many times the tensor's error.
VISIBLE = 20.0


@one_thread()
def explain(
    case: JudgedProblem,
    pinned: Mapping[str, Array],
    tensor: str,
    delivered: Mapping[str, Array],
    statuses: Mapping[str, str],
) -> Explanation:
    """Explain the first wrong tensor of a run.

    Args:
        delivered: every tensor of the run, including its ``pinned`` taps.
    """
    question, effort = Question(case, pinned, tensor, delivered[tensor]), Effort(LONGEST)
    question.delivered = delivered
    defining = clause_of(case.config, tensor, case.part)
    cause: Explanation | None = None
    description: Description | None = None
    place, steps, ruling, kind = "", tuple[str, ...](), tuple[str, ...](), ""
    with np.errstate(all="ignore"):  # infinities and NaN are compared as values
        if question.hidden:
            say(f"looking for the cause of {tensor}, at most {LONGEST:.0f} s of CPU time")
        with effort.attempt("the search for a cause"):
            search = Search(question, effort)
            cause = search.explain(suspects.stages(question), suspects.readings(question))
        if cause:
            with effort.attempt("checking the cause against the whole run"):
                cause = _in_its_place(question, cause, delivered, statuses)
        with effort.attempt("describing the error"):
            description, region, kind = describe(question)
            # Not for a region of zeros: many bugs cause zeros, so a hypothesis about them is weak.
            if (
                cause is None
                and description
                and description.where
                and not question.parameter
                and kind != "zero"
            ):
                cause = _in_place(question, region, description.where, effort)
                ruling = clauses_of_rows(question, description, kind) if cause else ()
        if cause and description and description.where and not np.isfinite(question.actual).all():
            # Infinity and NaN have many causes, so a fitting cause is not certain.
            cause = explained_by(tensor, cause.hypotheses, False)
        if question.parameter:
            with effort.attempt("locating the error in the backward pass"):
                place, steps = bounds(question, statuses)
            if steps[1:] == ("GRD-1",) and kind and not cause:
                steps = steps[::-1]  # its inputs are correct: no derivative is wrong
            if cause and steps and all(hypothesis.gradient for hypothesis in cause.hypotheses):
                # An edit of the whole gradient (missing, doubled, clipped) does not identify the wrong step.
                cause = replace(cause, clauses=(*steps, "GRD-1"))
    certain = cause is not None and cause.confident
    other_clauses = () if certain else (*steps, *clauses_of(question, description, kind, defining))
    notes = [place] if place and not certain else []
    ruling = ruling if {*ruling} & {"MSK-5", "MSK-8"} else ()
    clauses = tuple(dict.fromkeys((*ruling, *(cause.clauses if cause else ()), *other_clauses)))
    return replace(
        cause or Explanation(tensor),
        clauses=clauses,
        description=description.text if description else "",
        notes=(*effort.notes, *notes, *elsewhere(tensor, statuses)),
    )


def _in_its_place(
    question: Question, cause: Explanation, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> Explanation:
    """Remove options that correct taps of the layer refute.

    If no option remains, the cause is uncertain and holds for this tensor alone.
    """
    if question.parameter or question.actual.size > MOST_ELEMENTS:
        return cause
    refutations = {
        hypothesis.text: tap
        for hypothesis in cause.hypotheses[:MOST_NAMED]
        if hypothesis.fields and (tap := refuting(question, hypothesis, delivered, statuses))
    }
    if remaining := [hypothesis for hypothesis in cause.hypotheses if hypothesis.text not in refutations]:
        return explained_by(question.tensor, remaining, cause.confident) if refutations else cause
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(refutations.values()))
    return explained_by(
        question.tensor,
        cause.hypotheses,
        False,
        f", but only here: with that cause, {names} would be wrong too",
    )


def refuting(
    question: Question, hypothesis: Hypothesis, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> str:
    """Return a correct tap of the layer that refutes a hypothesis, if any."""
    wrong, right = (
        question.run(assumption, Exact(question.case.dtype), whole=True, wanted="")
        for assumption in (hypothesis, RIGHT)
    )
    for name, status in statuses.items():
        in_all = name in delivered and name in wrong.taps and name in right.taps
        if not in_all or status != "agrees" or group_of(name) != group_of(question.tensor):
            continue
        actual, predicted, expected = (
            np.asarray(delivered[name]),
            wrong.taps[name].value,
            right.taps[name].value,
        )
        if not all(x.shape == actual.shape and np.isfinite(x).all() for x in (actual, predicted, expected)):
            continue
        error, effect = root_mean_square(actual - expected), root_mean_square(predicted - expected)
        if effect > VISIBLE * max(error, 1e-7 * root_mean_square(expected)):
            return name
    return ""


def elsewhere(tensor: str, statuses: Mapping[str, str]) -> list[str]:
    if is_gradient(tensor) and not is_tap_gradient(tensor):
        return []  # gradients after a wrong one are also wrong
    names = [
        f"`{name}`"
        for name, status in statuses.items()
        if status == "diverges"
        and name not in (tensor, "loss", "logits")
        and is_gradient(name) == is_gradient(tensor)
        and is_tap_gradient(name) == is_tap_gradient(tensor)
    ]
    return [f"also wrong when judged separately: {few(names)}"] if names else []


def _in_place(question: Question, region: Flags, where: str, effort: Effort) -> Explanation | None:
    of_region = Effort(BUDGET)
    of_region.failures = effort.failures
    candidates = (bug for bug in suspects.bugs(question) if not bug.rare)
    fitting = [fit.hypothesis for fit in Search(question.within(region), of_region).explaining(candidates)]
    if not 0 < len(fitting) <= FITTING:
        return None
    cause = explained_by(question.tensor, fitting, False, f", only in {where}")
    return replace(cause, hypotheses=())  # other cases lack the region, and cannot try them
