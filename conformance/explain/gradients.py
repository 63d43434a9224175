"""Mistakes in gradients of parameters.

What became of them afterwards, and which rows of a table count (SPEC GRD-1, GRD-2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from concord.conformance.expectation import Array
from concord.conformance.explain.hypothesis import Gradients, Hypothesis
from concord.conformance.explain.options import of_derivatives
from concord.conformance.explain.question import Question
from concord.spec.parameters import trainable

SMALL = 1e-6
"""How small a gradient beside another passes for none."""

DECAYS = (0.1, 0.05, 0.01, 5e-3, 1e-3, 5e-4, 1e-4, 1e-5)
LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


def of_gradient(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the gradient of a parameter."""
    made = [*of_factor(question), *of_clipping(question, parameter), *of_others(question, parameter)]
    for name, text, gradient, clause in made:
        yield Hypothesis(name, text, clause, gradient=partial(_made, parameter, gradient))
    yield from of_derivatives(question)


Function = Callable[[Array, Gradients], Array]

Made = tuple[str, str, float | Function, str]
"""The name, what is said, what a gradient is multiplied by, or made into, and the clause."""


def _made(parameter: str, gradient: float | Function, of: Gradients) -> Array:
    own = of(parameter)
    return gradient(own, of) if callable(gradient) else gradient * own


def _clipped(limit: float) -> Function:
    return lambda own, of: np.clip(own, -limit, limit)


def _added(term: Array) -> Function:
    return lambda own, of: own + term


def _another(other: str) -> Function:
    return lambda own, of: of(other)


def of_factor(question: Question) -> Iterator[Made]:
    """Yield gradients that are multiplied by something."""
    batch = len(next(iter(question.case.batch.arrays().values())))
    summed = f"the gradient of the sum over {batch} samples instead of the mean"
    yield "no_gradient", "no gradient at all", 0.0, "GRD-1"
    yield "gradient_of_sum", summed, batch, "LOS-2"
    twice = f"a gradient that is divided by the {batch} samples twice"
    yield "gradient_divided_twice", twice, 1 / batch, "LOS-2"
    yield "gradient_accumulated", "a gradient that was counted twice", 2.0, "GRD-1"
    yield "gradient_halved", "half the gradient", 0.5, "GRD-1"
    yield "gradient_sign", "a gradient of the wrong sign", -1.0, "GRD-1"


def of_clipping(question: Question, parameter: str) -> Iterator[Made]:
    """Yield gradients that were clipped."""
    every = [question.exact.gradient(name) for name in trainable(question.config, question.case.part)]
    together = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in every))
    alone = float(np.sqrt(np.square(question.right.value).sum()))
    for limit in LIMITS:
        for length, how in ((together, "together"), (alone, "one by one")):
            if length > limit:
                text = f"gradients that were clipped to the norm {limit:g} {how}"
                yield "gradient_clipped", text, limit / length, "GRD-1"
        text = f"gradients that were clipped to {limit:g} element by element"
        yield "gradient_clipped", text, _clipped(limit), "GRD-1"


def of_others(question: Question, parameter: str) -> Iterator[Made]:
    """Yield gradients that something was added to, or that are those of something else."""
    right, weights = question.right.value, question.case.weights
    if right.ndim == 2 and right.shape[0] == right.shape[1]:
        text = "a gradient that is transposed"
        yield "transposed_gradient", text, lambda own, of: own.swapaxes(-1, -2), "WGT-2"
    if parameter not in weights:
        return
    weight = weights[parameter].astype(np.float64)
    for share in DECAYS:
        text = f"a gradient that {share:g} times the weight was added to"
        yield "weight_decay", text, _added(share * weight), "GRD-1"
    for other in trainable(question.config, question.case.part):
        alike = other != parameter and other in weights and weights[other].shape == right.shape
        if alike and abs(question.exact.gradient(other)).max() > SMALL * abs(right).max():
            text = f"the gradient of `{other}` instead"
            yield "gradient_of_another", text, _another(other), "GRD-1"
