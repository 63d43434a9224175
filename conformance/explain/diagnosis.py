"""Diagnosis of the first tensor of a run that is wrong: its cause, what is seen of it, and its clauses."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np
from scipy.special import softmax

from concord.conformance.expectation import (
    JudgedProblem,
    is_gradient,
    is_tap_gradient,
    root_mean_square,
    subject_of,
)
from concord.conformance.explain import suspects, whole
from concord.conformance.explain.backward import Backward, Bounds, made_of, shares
from concord.conformance.explain.breakdown import axes_of
from concord.conformance.explain.clauses import likely
from concord.conformance.explain.computation import Prediction
from concord.conformance.explain.hypothesis import MOST_NAMED, RIGHT, Cause, Hypothesis, caused
from concord.conformance.explain.question import Exact, Question, rounding
from concord.conformance.explain.regions import WORDS, Region, everywhere
from concord.conformance.explain.relations import describe
from concord.conformance.explain.said import Description, Diagnosis
from concord.conformance.explain.search import Effort, Search, one_thread
from concord.conformance.explain.step import Step, group_of, role_of
from concord.conformance.watching import say
from concord.conformance.wording import few
from concord.spec.arrays import Array
from concord.spec.precision import precision
from concord.spec.tensors import clause_of

CLAUSE = re.compile(r"\b[A-Z]{3}-\d+\b")

LONGEST = 60.0
"""Seconds of the processor that the search for a mistake may take.

A step of a large model takes long, and all of it longer.
"""

BUDGET = 10.0
"""Seconds of the processor that may be spent on mistakes made in one place, and on other inputs."""

MOST_ELEMENTS = 2**22
"""Of larger tensors a cause is not tried in the whole run, nor with other inputs."""

MOST_PLACES = 16
"""How many places along an axis are left out one by one."""

VISIBLE = 20.0
"""How many times a right tensor's error the effect of a hypothesis must be for the tensor to refute it."""

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
    question, effort = Question(case, pinned, tensor, delivered[tensor]), Effort(LONGEST)
    far, usual = whole.reaches_far(question), clause_of(case.config, tensor, case.part)
    cause: Cause | None = None
    seen: Description | None = None
    region, refuted = everywhere(question.actual.shape), list[str]()
    bounds: Bounds | None = None
    counted = ""
    with np.errstate(all="ignore"):  # what is not finite is compared as such
        if far:
            say(f"looking for what explains {tensor}, {LONGEST:.0f} s of the processor at most")
            with effort.attempt("the search for a cause in the whole model"):
                one = whole.Whole(case, pinned, tensor, delivered[tensor]).of_one_sample()
                cause = Search(one, effort).cause(whole.stages(one))
            if cause and cause.confident:
                return Diagnosis(tensor, _clauses(cause, None, ()), cause, notes=tuple(effort.notes))
        if cause is None and not effort.untried:
            with effort.attempt("the search for a cause"):
                search = Search(question, effort)
                cause = search.cause(suspects.stages(question), suspects.readings(question))
        if cause and not far:
            with effort.attempt("trying the cause in the whole run"):
                cause, refuted = _in_its_place(question, cause, delivered, statuses)
        with effort.attempt("the description"):
            seen, region = describe(question)
        if cause is None and seen:
            with effort.attempt("the search in one place"):
                cause = compose(question, region, usual, seen.exact, effort)
        others = likely(question, seen, usual)
        if question.parameter:
            with effort.attempt("placing it in the backward pass"):
                backward = Backward(question, statuses)
                bounds, counted = backward.bounds(), shares(question, backward, delivered)
            others = _of_gradient(question, seen, bounds, bool(counted), others)
            if cause and set(cause.clauses) == {"GRD-1"} and bounds:
                # That says what became of the gradient, and not where.
                cause = dataclasses.replace(cause, clauses=(*bounds.clauses, "GRD-1"))
        placed = bounds.text if bounds and not (cause and cause.confident) else ""
        told = counted if pinned else ""  # without activations it may come of any step
        cause = _believed(cause, seen) or _read_off(tensor, seen, told, others[0])
        notes = [*effort.notes, counted, placed, *elsewhere(tensor, statuses)]
        notes.append(_without_effect(question, delivered))
    clauses = _clauses(cause, seen, tuple(dict.fromkeys(others)))
    return Diagnosis(tensor, clauses, cause, seen, tuple(filter(None, notes)), tuple(refuted))


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


def _without_effect(question: Question, delivered: Mapping[str, Array]) -> str:
    """Say that masked scores that are wrong give the weights that are right, if they do."""
    name = question.tensor.replace("masked_scores", "weights")
    if not question.tensor.endswith("masked_scores") or name not in delivered:
        return ""
    meant = softmax(question.right.value, axis=-1)
    alike = abs(np.asarray(delivered[name], np.float64) - meant).max() <= ALIKE
    return f"it has no effect on `{name}`" if alike else ""


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


def refuting(
    question: Question, hypothesis: Hypothesis, delivered: Mapping[str, Array], statuses: Mapping[str, str]
) -> str:
    """Return a tap of the same layer that is right, and would not be under a hypothesis; empty if none is."""
    wrong, right = (_whole(question, of) for of in (hypothesis, RIGHT))
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


def _whole(question: Question, hypothesis: Hypothesis) -> Step:
    """Return the run with a hypothesis to its end, each step of the run's own taps."""
    other = copy.copy(question)
    other.tensor = ""  # no tap: nothing ends before the loss
    return other.run(hypothesis, Exact(question.case.dtype), whole=True)


def elsewhere(tensor: str, statuses: Mapping[str, str]) -> list[str]:
    """Say which other steps are wrong by themselves.

    Every step is judged from the run's own tensors before it.
    """
    wrong = [
        name
        for name, status in statuses.items()
        if status == "diverges" and name != tensor and name not in ("loss", "logits")
    ]
    if is_gradient(tensor) and not is_tap_gradient(tensor):
        return []  # what flows on from a wrong gradient is wrong too
    kind = "gradients." if is_gradient(tensor) else ""
    steps = [
        name for name in wrong if is_tap_gradient(name) == bool(kind) and (kind or not is_gradient(name))
    ]
    role = role_of(tensor)
    same = [group_of(subject_of(name)) for name in steps if role_of(name) == role]
    others = list(dict.fromkeys(role_of(name) for name in steps if role_of(name) != role))
    notes = []
    if same:
        notes.append(f"the same tensor is wrong by itself in {', '.join(same)} too")
    if others:
        shown = few([f"`{name}`" for name in others])
        notes.append(
            f"{len(others)} other step{'s are' if len(others) > 1 else ' is'} wrong "
            f"by {'themselves' if len(others) > 1 else 'itself'}: {shown}"
        )
    return notes


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


class InPlace(Question):
    """A question whose hypotheses hold in a region alone: elsewhere the tensor is right."""

    def __init__(self, question: Question, region: Region) -> None:
        self.__dict__.update(question.__dict__, right=question.right)
        self.flags = region.flags

    def values(self, hypothesis: Hypothesis) -> Array:
        """Return the tensor under a hypothesis, right outside of the region."""
        return np.where(self.flags, super().values(hypothesis), self.right.value)

    def predict(self, hypothesis: Hypothesis, dtype: str | None = None) -> Prediction:
        """Return the same with its sigma."""
        there, right = super().predict(hypothesis, dtype), self.right
        return Prediction(
            np.where(self.flags, there.value, right.value), np.where(self.flags, there.sigma, right.sigma)
        )


def compose(question: Question, region: Region, clause: str, exact: bool, effort: Effort) -> Cause | None:
    """Return what explains a tensor where it is wrong, everything else being right.

    Args:
        region: where it is wrong.
        clause: of the step in question.
        exact: whether it is known already what it is there: then only known mistakes say more.
        effort: what takes note of failures.
    """
    of_place = Effort(BUDGET)
    of_place.failures = effort.failures
    found = Search(InPlace(question, region), of_place).explaining(
        _hypotheses(question, region, clause, exact)
    )
    if not found or (exact and len(found) > 2):  # what fits wherever it may says less than what is seen
        return None
    only = f", only {'' if region.text.startswith('where') else 'in '}{region.text}" if region.text else ""
    shown = [dataclasses.replace(one.hypothesis, text=one.hypothesis.text + only) for one in found]
    return dataclasses.replace(caused(question.tensor, shown, False), hypotheses=())


def _hypotheses(question: Question, region: Region, clause: str, exact: bool) -> Iterator[Hypothesis]:
    if region.text and not question.parameter:
        yield from [one for one in suspects.mistakes(question) if not one.rare]
    if exact or question.parameter or question.actual.size > MOST_ELEMENTS:
        return
    for name in sources(question):
        if name in question.pinned:
            for short in ("float16", "bfloat16"):
                text, array = f"`{name}` rounded to {short}", rounding(short)(question.pinned[name])
                yield Hypothesis("other_input", text, "PRC-2", inputs={name: array})
            for words, array in _others(question, name):
                yield Hypothesis("other_input", f"`{name}` {words}", clause, inputs={name: array})


def sources(question: Question) -> list[str]:
    """Return the taps that a tensor is computed from in one step, found on the tape."""
    exact, tap = question.exact, question.tensor
    named = {id(tensor): name for name, tensor in exact.now.items() if name != tap}
    return made_of(exact.taps[tap], named)[::-1] if tap in exact.taps else []


def _others(question: Question, name: str) -> Iterator[tuple[str, Array]]:
    """Yield a tap whose places along an axis are each the next one's, or some of them left out, in words."""
    array = question.pinned[name]
    axes = axes_of(question.case, name, array.ndim)
    # What a softmax does not see, and rounding leaves finite.
    nothing = -precision(question.case.dtype).largest / 2 if name.endswith("scores") else 0.0
    for place, axis in enumerate(axes):
        word, size = WORDS.get(axis, axis), array.shape[place]
        index = np.arange(size).reshape([-1 if i == place else 1 for i in range(array.ndim)])
        for by, way in ((1, "before"), (-1, "after")) if size > 1 else ():
            yield f"of the {word} {way}", np.roll(array, by, place)
        for i in range(size) if 1 < size <= MOST_PLACES else ():
            yield f"with {word} {i} left out", np.where(index == i, nothing, array)
            if 1 < i < size - 1:
                yield f"with {word} {i} and those after it left out", np.where(index >= i, nothing, array)
