"""Steps that are right, of something wrong: recomputed from what went in after it was moved, shortened, cut off or taken elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance.diagnosis.regions import WORDS
from concord.conformance.explain.hypothesis import RIGHT
from concord.conformance.explain.question import Exact, Prediction, Question, rounding
from concord.spec.precision import precision
from concord.spec.tape import Node
from concord.spec.tensors import taps

Array = NDArray[np.floating]

MOST_PLACES = 16
"""How many places along an axis are tried one by one."""

MOST_ELEMENTS = 2**22
"""Larger tensors are not tried: each way takes a step of the model."""


@dataclass(frozen=True)
class Edited:
    """A step of edited inputs.

    Attributes:
        text: what would explain the tensor, in words that follow "is explained by".
        forced: the taps that it is computed from.
    """

    text: str
    forced: Mapping[str, Array]

    def exact(self, question: Question) -> Array:
        """Return the tensor in exact arithmetic."""
        return self._of(question).run(RIGHT, Exact(question.case.dtype)).values[question.tensor]

    def predict(self, question: Question) -> Prediction:
        """Return it with its sigma."""
        return self._of(question).right

    def _of(self, question: Question) -> Question:
        other = copy.copy(question)
        for name in ("right", "exact", "span"):
            other.__dict__.pop(name, None)
        other.forced = self.forced
        return other


def edited(question: Question) -> Iterator[Edited]:
    """Yield the step of other inputs than the run's own."""
    if question.parameter or question.actual.size > MOST_ELEMENTS:
        return
    for name in sources(question):
        if name not in question.forced:
            continue
        for text, array in _edits(question, name):
            yield Edited(text, {**question.forced, name: array})


def sources(question: Question) -> list[str]:
    """Return the taps that a tensor is computed from in one step, found on the tape."""
    exact = question.exact
    named = {id(tensor): name for name, tensor in exact.now.items() if name != question.tensor}
    found, seen, waiting = [], set(), [exact.taps[question.tensor]] if question.tensor in exact.taps else []
    while waiting:
        tensor: Node = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in named:
            found.append(named[id(tensor)])
        else:
            waiting += [operand for operand, _ in tensor.operands]
    return found[::-1]


def _edits(question: Question, name: str) -> Iterator[tuple[str, Array]]:
    array = question.forced[name]
    known = taps(question.config, question.case.part)
    axes = known[name].shape.split() if name in known else [f"axis {i}" for i in range(array.ndim)]
    axes = [*axes[:-2], "query", "key"] if axes.count("tokens") == 2 else axes
    for short in ("float16", "bfloat16"):
        yield f"`{name}` rounded to {short}", rounding(short)(array)
    for factor, words in _factors(question):
        yield f"`{name}` multiplied by {words}", factor * array
    for place, axis in enumerate(axes):
        if array.shape[place] > 1:
            yield from _moves(
                name, array, place, WORDS.get(axis, axis), -precision(question.case.dtype).largest / 2
            )
    for one in range(array.ndim):
        for other in range(one):
            if array.shape[one] == array.shape[other] > 1:
                yield (
                    f"`{name}` with its {WORDS.get(axes[other], axes[other])} and {WORDS.get(axes[one], axes[one])} axes exchanged",
                    array.swapaxes(one, other),
                )
    for other_name, other_array in question.forced.items():
        alike = other_array.shape == array.shape and other_name != name
        same_role = other_name.split(".", 2)[2:] == name.split(".", 2)[2:] and name.startswith("layers.")
        if (
            alike
            and (same_role or other_name.rpartition(".")[0] == name.rpartition(".")[0])
            and _before(known, other_name, question.tensor)
        ):
            yield f"`{other_name}` in place of `{name}`", other_array


def _before(known: Mapping[str, object], name: str, tensor: str) -> bool:
    names = list(known)
    return name in known and tensor in known and names.index(name) < names.index(tensor)


def _factors(question: Question) -> Iterator[tuple[float, str]]:
    root = math.sqrt(question.config.head_dim)
    for factor, words in (
        (2.0, "2"),
        (0.5, "1/2"),
        (-1.0, "-1"),
        (math.sqrt(2), "sqrt(2)"),
        (math.sqrt(0.5), "1 / sqrt(2)"),
        (root, "sqrt(K)"),
        (1 / root, "1 / sqrt(K)"),
    ):
        if factor != 1:
            yield factor, words


def _moves(name: str, array: Array, place: int, word: str, lowest: float) -> Iterator[tuple[str, Array]]:
    size = array.shape[place]
    nothing = (
        lowest if name.endswith("scores") else 0.0
    )  # what a softmax does not see, and rounding leaves finite
    yield f"`{name}` of the {word} before", np.roll(array, 1, place)
    if size > 2:
        yield f"`{name}` of the {word} after", np.roll(array, -1, place)
        yield f"`{name}` in reverse order along the {word} axis", np.flip(array, place)
    places = range(size) if size <= MOST_PLACES else (0, 1, size // 2, size - 1)
    index = np.arange(size).reshape([-1 if i == place else 1 for i in range(array.ndim)])
    for i in places:
        yield (
            f"`{name}` of {word} {i} for every {word}",
            np.broadcast_to(np.take(array, [i], place), array.shape),
        )
        yield f"`{name}` with {word} {i} left out", np.where(index == i, nothing, array)
        if 1 < i < size - 1:
            yield (
                f"`{name}` with {word} {i} and those after it left out",
                np.where(index >= i, nothing, array),
            )
