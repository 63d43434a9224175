"""Known mistakes in one place only, and right steps of wrong inputs.

Tried where no single mistake explains a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from concord.conformance.explain.backward import made_of
from concord.conformance.explain.computation import Prediction
from concord.conformance.explain.effort import Effort
from concord.conformance.explain.hypothesis import Cause, Hypothesis, caused
from concord.conformance.explain.question import Question, rounding
from concord.conformance.explain.regions import WORDS, Region
from concord.conformance.explain.search import Search
from concord.conformance.explain.suspects import mistakes
from concord.spec.arrays import Array
from concord.spec.precision import precision
from concord.spec.tensors import taps

MOST_PLACES = 16
"""How many places along an axis are left out one by one."""

MOST_ELEMENTS = 2**22
"""Inputs of larger tensors are not tried: each way takes a step of the model."""


class InPlace(Question):
    """A question whose hypotheses hold in a region alone: elsewhere the tensor is right."""

    def __init__(self, question: Question, region: Region) -> None:
        self.__dict__.update(question.__dict__)
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
        effort: what it may take: when that is spent, what was found by then is the answer.
    """
    place = InPlace(question, region)
    place.__dict__.setdefault("right", question.right)
    found = Search(place, effort).explaining(_hypotheses(question, region, clause, exact))
    if not found or (exact and len(found) > 2):  # what fits wherever it may says less than what is seen
        return None
    only = f", only {'' if region.text.startswith('where') else 'in '}{region.text}" if region.text else ""
    shown = [dataclasses.replace(one.hypothesis, text=one.hypothesis.text + only) for one in found]
    return dataclasses.replace(caused(question.tensor, shown, False), hypotheses=())


def _hypotheses(question: Question, region: Region, clause: str, exact: bool) -> Iterator[Hypothesis]:
    if region.text and not question.parameter:
        yield from [one for one in mistakes(question) if not one.rare]
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
    axes = taps(question.config, question.case.part)[name].shape.split()
    axes = [*axes[:-2], "query", "key"] if axes.count("tokens") == 2 else axes
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
