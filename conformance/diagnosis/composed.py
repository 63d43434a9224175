"""Known mistakes made in one place only, and right steps of wrong inputs: tried where no single mistake explains a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance.diagnosis.inputs import edited
from concord.conformance.diagnosis.regions import Region
from concord.conformance.explain import Cause, linear, search
from concord.conformance.explain.effort import Effort
from concord.conformance.explain.hypothesis import Hypothesis, changed
from concord.conformance.explain.question import Prediction, Question
from concord.conformance.explain.reading import clear

Array = NDArray[np.floating]


@dataclass(frozen=True)
class _Way:
    text: str
    name: str
    clause: str
    exact: Callable[[], Array]
    predict: Callable[[], Prediction]


def compose(question: Question, region: Region, clause: str, exact: bool, effort: Effort) -> Cause | None:
    """Return what explains a tensor where it is wrong, everything else being right.

    Args:
        region: where it is wrong.
        clause: of the step in question.
        exact: whether it is known already what it is there: then only known mistakes say more.
        effort: what it may take: when that is spent, what was found by then is the answer.
    """
    found: list[_Way] = []
    for way in effort.among(_ways(question, region, clause, exact)):
        if len(found) >= search.MOST_NAMED:
            break
        try:
            with np.errstate(all="ignore"):
                fits = _fits(question, region, way)
            found += [way] if fits else []
        except (LookupError, ValueError, TypeError, ArithmeticError):  # it does not apply here
            continue
    if not found or (
        exact and len(found) > 2
    ):  # what fits wherever it is allowed to says less than what is seen
        return None
    only = f", only {'' if region.text.startswith('where') else 'in '}{region.text}" if region.text else ""
    said = " or by ".join(f"{way.text}{only} ({way.clause})" for way in found)
    names, clauses = dict.fromkeys(way.name for way in found), dict.fromkeys(way.clause for way in found)
    return Cause(" or ".join(names), f"`{question.tensor}` may be explained by {said}", False, tuple(clauses))


def _ways(question: Question, region: Region, clause: str, exact: bool) -> Iterator[_Way]:
    if region.text and not question.parameter:
        for hypothesis in search.mistakes(question):
            if not hypothesis.rare:
                yield _of_hypothesis(question, hypothesis)
    if question.is_tap(linear.LINEAR) and not exact:
        yield from (_of_hypothesis(question, hypothesis) for hypothesis in _of_other_inputs(question))
    for other in () if exact else edited(question):
        broken = "PRC-2" if "rounded to" in other.text else clause
        yield _Way(
            other.text,
            "other_input",
            broken,
            lambda other=other: other.exact(question),  # type: ignore[misc]
            lambda other=other: other.predict(question),  # type: ignore[misc]
        )


def _of_other_inputs(question: Question) -> Iterator[Hypothesis]:
    """Yield linear layers that are applied to another tensor of the run."""
    exact, tap = question.exact, question.tensor
    shape = exact.inputs[tap].shape
    entered = {f"what entered the sublayer of `{name}`": tensor for name, tensor in exact.entered.items()}
    for name, tensor in {
        **entered,
        **{f"`{name}`": tensor for name, tensor in exact.now.items() if name != tap},
    }.items():
        if tensor.shape == shape and tensor is not exact.inputs[tap]:
            values = tensor.value
            change = linear.applied_to(lambda m, values=values: m.constant(values))  # type: ignore[misc]
            yield changed(
                "linear_of_other_input",
                f"{name} instead of what should go into it",
                "NRM-1" if " entered " in name else "RES-1",
                change,
            ).at(tap)


def _of_hypothesis(question: Question, hypothesis: Hypothesis) -> _Way:
    return _Way(
        hypothesis.text,
        hypothesis.name,
        hypothesis.clause,
        lambda: question.values(hypothesis),
        lambda: question.predict(hypothesis),
    )


def _fits(question: Question, region: Region, way: _Way) -> bool:
    """Return whether the tensor is what a mistake gives in a region, and right elsewhere."""
    right, actual = question.right, question.actual
    value = way.exact()
    if (
        value.shape != actual.shape
        or not np.isfinite(value[region.flags]).all()
        or not np.isfinite(actual).all()
    ):
        return False
    made = np.where(region.flags, value, right.value)
    before, left = actual - right.value, actual - made
    if np.sqrt(np.mean(np.square(left))) > 0.1 * np.sqrt(np.mean(np.square(before))):
        return False
    prediction = way.predict()
    sigma = np.where(region.flags, prediction.sigma, right.sigma)
    return clear(before, actual - np.where(region.flags, prediction.value, right.value), sigma)
