"""A hypothesis put in its place.

What else of the run it explains, and what it would make wrong that is right.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

import numpy as np

from concord.conformance.expectation import is_gradient, is_tap_gradient, root_mean_square, subject_of
from concord.conformance.explain.hypothesis import RIGHT, Hypothesis
from concord.conformance.explain.question import Exact, Question
from concord.conformance.explain.step import Step, group_of
from concord.conformance.wording import few
from concord.spec.arrays import Array

VISIBLE = 20.0
"""How many times a right tensor's error the effect of a hypothesis must be for the tensor to refute it."""


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
    with contextlib.suppress(ZeroDivisionError):
        return other.run(hypothesis, Exact(question.case.dtype), whole=True)
    raise ValueError("it cannot be computed")


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
    same = [_layer(name) for name in steps if role_of(name) == role]
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


def _layer(name: str) -> str:
    return group_of(subject_of(name))


def role_of(name: str) -> str:
    """Return a tensor's name without the number of its layer."""
    bare = subject_of(name)
    return f"layers.*.{bare.split('.', 2)[2]}" if bare.startswith("layers.") and bare.count(".") > 1 else bare
