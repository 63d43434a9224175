"""Bugs in gradients of parameters.

What became of them afterwards, and which rows of a table count (SPEC GRD-1, GRD-2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.options import of_derivatives
from concord.conformance.explain.question import Question
from concord.spec.parameters import trainable

LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


def of_gradient(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the gradient of a parameter."""
    for name, text, factor, clause in (
        ("no_gradient", "no gradient at all", 0.0, "GRD-1"),
        ("gradient_accumulated", "a gradient that was counted twice", 2.0, "GRD-1"),
        *_clipped(question),
    ):
        yield Hypothesis(name, text, clause, gradient=partial(np.multiply, factor))
    for limit in LIMITS:
        text = f"gradients that were clipped to {limit:g} element by element"
        yield Hypothesis(
            "gradient_clipped", text, "GRD-1", gradient=partial(np.clip, a_min=-limit, a_max=limit)
        )
    yield from of_derivatives(question)


def _clipped(question: Question) -> Iterator[tuple[str, str, float, str]]:
    """Yield the factors of gradients that were clipped by a norm."""
    every = [question.exact.gradient(name) for name in trainable(question.config, question.case.part)]
    for how, gradients in (("together", every), ("one by one", [question.right.value])):
        length = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in gradients))
        for limit in LIMITS:
            if length > limit:
                text = f"gradients that were clipped to the norm {limit:g} {how}"
                yield "gradient_clipped", text, limit / length, "GRD-1"
