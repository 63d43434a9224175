"""What can be said of the first tensor of a run that is wrong: it is looked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from scipy.special import softmax

from concord.conformance.expectation import JudgedProblem, is_gradient
from concord.conformance.explain import suspects, whole
from concord.conformance.explain.backward import Backward, Bounds, shares
from concord.conformance.explain.clauses import likely
from concord.conformance.explain.composed import compose
from concord.conformance.explain.effort import Effort, one_thread
from concord.conformance.explain.hypothesis import MOST_NAMED, Cause, Hypothesis, caused
from concord.conformance.explain.question import Question
from concord.conformance.explain.relations import describe
from concord.conformance.explain.replacement import elsewhere, refuting
from concord.conformance.explain.said import Description, Diagnosis
from concord.conformance.explain.search import Search
from concord.conformance.watching import say
from concord.spec.arrays import Array
from concord.spec.tensors import clause_of

T = TypeVar("T")

CLAUSE = re.compile(r"\b[A-Z]{3}-\d+\b")


LONGEST = 60.0
"""Seconds of the processor that the search for a mistake may take.

A step of a large model takes long, and all of it longer.
"""

BUDGET = 10.0
"""Seconds of the processor that may be spent on mistakes made in one place, and on other inputs."""

MOST_ELEMENTS = 2**22
"""Of larger tensors a cause is not tried in the whole run."""

ALIKE = 1e-5
"""How far attention weights may differ that are the same."""

NO_NUMBERS = ("nan", "infinite", "not finite")
"""Relations of which one is as good as another: what is no number may have become so in many ways."""


@one_thread()
def diagnose(
    case: JudgedProblem,
    pinned: Mapping[str, Array],
    tensor: str,
    delivered: Mapping[str, Array],
    statuses: Mapping[str, str],
) -> Diagnosis:
    """Return what can be said of the first tensor that is wrong.

    Args:
        case: what was computed.
        pinned: the taps that the run delivered.
        tensor: the first one, or the first gradient, that is wrong.
        delivered: every tensor of the run.
        statuses: what each was judged to be.
    """
    question = Question(case, pinned, tensor, delivered[tensor])
    usual = clause_of(case.config, tensor, case.part)
    notes: list[str] = []
    refuted: list[str] = []
    cause, far, effort = None, whole.reaches_far(question), Effort(LONGEST)
    if far:
        say(f"looking for what explains {tensor}, {LONGEST:.0f} s of the processor at most")

        def anywhere() -> Cause | None:
            one = whole.Whole(case, pinned, tensor, delivered[tensor]).of_one_sample()
            return Search(one, effort).cause(whole.stages(one))

        cause = _tried("the search for a cause in the whole model", notes, anywhere)
        if cause and cause.confident:
            return Diagnosis(tensor, _clauses(cause, None, ()), cause)
    with np.errstate(all="ignore"):  # what is not finite is compared as such
        if cause is None and not effort.untried:
            cause = _tried(
                "the search for a cause",
                notes,
                lambda: Search(question, effort).cause(
                    suspects.stages(question), suspects.readings(question)
                ),
            )
        notes += [effort.text] if effort.untried else []
        if cause and not far:
            found = cause
            cause, refuted = _tried(
                "trying the cause in the whole run",
                notes,
                lambda: _in_its_place(question, found, delivered, statuses),
            ) or (cause, [])
        seen, region = _tried("the description", notes, lambda: describe(question)) or (None, None)
        if cause is None and seen and region:
            where, exact = region, seen.exact
            cause = _tried(
                "the search in one place",
                notes,
                lambda: compose(question, where, usual, exact, Effort(BUDGET)),
            )
        others, counted = likely(question, seen, usual), ""
        if question.parameter:
            bounds, counted = _tried(
                "placing it in the backward pass", notes, lambda: _backward(question, delivered, statuses)
            ) or (None, "")
            others = _of_gradient(question, seen, bounds, bool(counted), others)
            if (
                cause and set(cause.clauses) == {"GRD-1"} and bounds
            ):  # that says what became of the gradient, and not where
                cause = dataclasses.replace(cause, clauses=(*bounds.clauses, "GRD-1"))
            notes += [
                *([counted] if counted else []),
                *([bounds.text] if bounds and not (cause and cause.confident) else []),
            ]
        told = counted if pinned else ""  # without activations it may come of any step
        cause = _believed(cause, seen) or _read_off(tensor, seen, told, others[0])
        notes += [*elsewhere(tensor, statuses), *_without_effect(question, delivered)]
    return Diagnosis(
        tensor, _clauses(cause, seen, tuple(dict.fromkeys(others))), cause, seen, tuple(notes), tuple(refuted)
    )


def _of_gradient(
    question: Question,
    seen: Description | None,
    bounds: Bounds | None,
    counted: bool,
    others: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the clauses in question for a gradient.

    Of the steps that it has come through, but for what is said of whole gradients.
    """
    general = (
        seen is not None and seen.relation == "multiple" and "samples" not in seen.what and not seen.where
    ) or counted
    table = str(question.parameter).startswith("embeddings.") and not str(question.parameter).startswith(
        "embeddings.norm"
    )
    steps = bounds.clauses if bounds else ()
    own = [clause for clause in others if clause not in ("GRD-1", "GRD-5")]
    if own:
        return (*own, *steps, *others)
    return (
        ("GRD-1", *steps)
        if (general and not bounds) or table or (general and "classifier" in question.tensor)
        else (*steps, *others)
    )


def _tried(what: str, notes: list[str], step: Callable[[], T]) -> T | None:
    """Return what a step of the search gives.

    Where it fails that is said: a run that is wrong in an unforeseen way still has its verdict.
    """
    try:
        return step()
    except Exception as error:
        notes.append(f"{what} failed: {type(error).__name__}: {error}")
    return None


def _believed(cause: Cause | None, seen: Description | None) -> Cause | None:
    """Return a cause as far as what is seen lets it be believed."""
    if cause and seen and seen.exact and not any(one.sure for one in cause.hypotheses):
        return None  # any numbers would explain it, and what is seen says which
    if cause is None or seen is None or not seen.where:
        return cause
    if cause.hypothesis == "clamped" and seen.exact and seen.region not in ("value", "labels"):
        return None  # a limit is reached by size, and not in a place
    if seen.relation in NO_NUMBERS:
        return dataclasses.replace(
            cause, confident=False, text=cause.text.replace(" is explained by", " may be explained by")
        )
    return cause


def _read_off(tensor: str, seen: Description | None, counted: str, clause: str) -> Cause | None:
    """Return what is seen as a cause, where it gives the whole tensor and is no matter of a number.

    Args:
        counted: what counts wrongly in a gradient.
    """
    if seen and seen.exact and seen.telling:
        name, where = f"seen_{seen.relation}", f"{seen.where_in_words} " if seen.where else ""
        text = f"{where}it {seen.what}"
    elif counted:
        name, text = "seen_counted", counted
    else:
        return None
    cause = caused(tensor, [Hypothesis(name, f"this: {text}", clause)], False)
    return dataclasses.replace(cause, hypotheses=())


def _without_effect(question: Question, delivered: Mapping[str, Array]) -> list[str]:
    """Say that masked scores that are wrong give the weights that are right, if they do."""
    name = question.tensor.replace("masked_scores", "weights")
    if not question.tensor.endswith("masked_scores") or name not in delivered:
        return []
    with np.errstate(all="ignore"):
        meant = softmax(question.right.value, axis=-1)
        alike = abs(np.asarray(delivered[name], np.float64) - meant).max() <= ALIKE
    return [f"it has no effect on `{name}`"] if alike else []


def _in_its_place(
    question: Question, cause: Cause, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> tuple[Cause | None, list[str]]:
    """Return a cause without the options that the rest of the layer refutes, and what refutes them."""
    kept, told = [], []
    tried = question.parameter is None and question.actual.size <= MOST_ELEMENTS
    for place, one in enumerate(cause.hypotheses):
        known = tried and one.fields and place < MOST_NAMED
        if known and (other := refuting(question, one, delivered, statuses)):
            told.append(f"not {one.text}: `{other}` would be wrong too, and is right")
        else:
            kept.append(one)
    if not told:
        return cause, []
    return caused(question.tensor, kept, cause.confident) if kept else None, told


def _backward(
    question: Question, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> tuple[Bounds | None, str]:
    """Return which steps of the backward pass are in question, and what counts wrongly in the gradient."""
    backward = Backward(question, statuses)
    gradients = {
        name.removeprefix("gradients."): array for name, array in delivered.items() if is_gradient(name)
    }
    return backward.bounds(), shares(question, backward, gradients)


def _clauses(cause: Cause | None, seen: Description | None, others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the clauses in question.

    Of a cause that is sure, of what is seen exactly, of a cause that is not sure, of the rest.
    """
    named = tuple(CLAUSE.findall(" ".join(cause.clauses))) if cause else ()
    if cause and cause.confident:
        return tuple(dict.fromkeys(named))
    told = seen and not is_gradient(seen.tensor) and (seen.exact or seen.relation in NO_NUMBERS)
    order = (*others, *named) if told else (*named, *others)
    return tuple(dict.fromkeys(order))
