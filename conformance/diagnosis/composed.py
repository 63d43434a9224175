"""Known mistakes in one place only, and right steps of wrong inputs.

Tried where no single mistake explains a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from concord.conformance.bugs.context import Edit
from concord.conformance.bugs.products import LINEAR
from concord.conformance.diagnosis.backward import made_of
from concord.conformance.diagnosis.regions import WORDS, Region
from concord.conformance.diagnosis.relations import moves
from concord.conformance.expectation import Array, root_mean_square
from concord.conformance.explain import Cause, search
from concord.conformance.explain.effort import Effort
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.question import Question, rounding
from concord.conformance.explain.reading import clear
from concord.spec.precision import precision
from concord.spec.tensors import taps

MOST_PLACES = 16
"""How many places along an axis are tried one by one."""

MOST_ELEMENTS = 2**22
"""Inputs of larger tensors are not tried: each way takes a step of the model."""


def _explains(question: Question, one: Hypothesis, region: Region) -> bool:
    """Return whether the tensor is what a hypothesis gives in a region, and right elsewhere."""
    right, actual, value = question.right, question.actual, question.values(one)
    sound = value.shape == actual.shape and np.isfinite(value[region.flags]).all()
    if not (sound and np.isfinite(actual).all()):
        return False
    before, left = actual - right.value, actual - np.where(region.flags, value, right.value)
    if root_mean_square(left) > 0.1 * root_mean_square(before):
        return False
    made = question.predict(one)
    left = actual - np.where(region.flags, made.value, right.value)
    return clear(before, left, np.where(region.flags, made.sigma, right.sigma))


def compose(question: Question, region: Region, clause: str, exact: bool, effort: Effort) -> Cause | None:
    """Return what explains a tensor where it is wrong, everything else being right.

    Args:
        region: where it is wrong.
        clause: of the step in question.
        exact: whether it is known already what it is there: then only known mistakes say more.
        effort: what it may take: when that is spent, what was found by then is the answer.
    """
    found: list[Hypothesis] = []
    for one in effort.among(_hypotheses(question, region, clause, exact)):
        if len(found) >= search.MOST_NAMED:
            break
        try:
            with np.errstate(all="ignore"):
                found += [one] if _explains(question, one, region) else []
        except (LookupError, ValueError, TypeError, ArithmeticError):  # it does not apply here
            continue
    if not found or (exact and len(found) > 2):  # what fits wherever it may says less than what is seen
        return None
    only = f", only {'' if region.text.startswith('where') else 'in '}{region.text}" if region.text else ""
    said = " or by ".join(f"{one.text}{only} ({one.clause})" for one in found)
    names, clauses = dict.fromkeys(one.name for one in found), dict.fromkeys(one.clause for one in found)
    return Cause(" or ".join(names), f"`{question.tensor}` may be explained by {said}", False, tuple(clauses))


def _hypotheses(question: Question, region: Region, clause: str, exact: bool) -> Iterator[Hypothesis]:
    if region.text and not question.parameter:
        yield from [one for one in search.mistakes(question) if not one.rare]
    if question.is_tap(LINEAR) and not exact:
        yield from _of_other_inputs(question)
    if exact or question.parameter or question.actual.size > MOST_ELEMENTS:
        return
    for name in sources(question):
        for text, array in _edits(question, name) if name in question.pinned else ():
            broken = "PRC-2" if "rounded to" in text else clause
            yield Hypothesis("other_input", text, broken, inputs={name: array})


def _of_other_inputs(question: Question) -> Iterator[Hypothesis]:
    """Yield linear layers that are applied to another tensor of the run."""
    exact, tap = question.exact, question.tensor
    entered = {f"what entered the sublayer of `{name}`": tensor for name, tensor in exact.entered.items()}
    others = entered | {f"`{name}`": tensor for name, tensor in exact.now.items() if name != tap}
    for name, tensor in others.items():
        if tensor.shape == exact.inputs[tap].shape and tensor is not exact.inputs[tap]:
            text = f"{name} instead of what should go into it"
            clause = "NRM-1" if " entered " in name else "RES-1"
            edit = _applied_to(tensor.value)
            yield Hypothesis("linear_of_other_input", text, clause, change=edit, on=(tap,))


def _applied_to(values: Array) -> Edit:
    return lambda m, y: m.again(y, m.o.constant(values, y))


def sources(question: Question) -> list[str]:
    """Return the taps that a tensor is computed from in one step, found on the tape."""
    exact, tap = question.exact, question.tensor
    named = {id(tensor): name for name, tensor in exact.now.items() if name != tap}
    return made_of(exact.taps[tap], named)[::-1] if tap in exact.taps else []


def _edits(question: Question, name: str) -> Iterator[tuple[str, Array]]:
    """Yield what else may have gone into the step in place of a tap, in words."""
    array, known = question.pinned[name], taps(question.config, question.case.part)
    axes = known[name].shape.split() if name in known else [f"axis {i}" for i in range(array.ndim)]
    axes = [*axes[:-2], "query", "key"] if axes.count("tokens") == 2 else axes
    for short in ("float16", "bfloat16"):
        yield f"`{name}` rounded to {short}", rounding(short)(array)
    root, two = math.sqrt(question.config.head_dim), math.sqrt(2)
    factors = {"2": 2.0, "1/2": 0.5, "-1": -1.0, "sqrt(2)": two, "1 / sqrt(2)": 1 / two}
    for words, factor in {**factors, "sqrt(K)": root, "1 / sqrt(K)": 1 / root}.items():
        if factor != 1:
            yield f"`{name}` multiplied by {words}", factor * array
    for _, text, moved in moves(array, axes, MOST_PLACES):
        yield f"`{name}` {text}", moved
    # What a softmax does not see, and rounding leaves finite.
    nothing = -precision(question.case.dtype).largest / 2 if name.endswith("scores") else 0.0
    for place, axis in enumerate(axes):
        word, size = WORDS.get(axis, axis), array.shape[place]
        index = np.arange(size).reshape([-1 if i == place else 1 for i in range(array.ndim)])
        for i in range(size) if 1 < size <= MOST_PLACES else ():
            yield f"`{name}` with {word} {i} left out", np.where(index == i, nothing, array)
            if 1 < i < size - 1:
                yield (
                    f"`{name}` with {word} {i} and those after it left out",
                    np.where(index >= i, nothing, array),
                )
    before = list(known)[: list(known).index(question.tensor)] if question.tensor in known else []
    for other in before:
        same_role = other.split(".", 2)[2:] == name.split(".", 2)[2:] and name.startswith("layers.")
        alike = other != name and np.shape(question.pinned.get(other, 0)) == array.shape
        if alike and (same_role or other.rpartition(".")[0] == name.rpartition(".")[0]):
            yield f"`{other}` in place of `{name}`", question.pinned[other]
