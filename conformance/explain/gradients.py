"""Mistakes in gradients of parameters.

What became of them afterwards, and which rows of a table count (SPEC GRD-1, GRD-2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Gradients, Hypothesis
from concord.conformance.explain.options import of_derivatives
from concord.conformance.explain.question import Question
from concord.spec.parameters import trainable

Array = NDArray[np.floating]

SMALL = 1e-6
"""How small a gradient beside another passes for none."""

DECAYS = (0.1, 0.05, 0.01, 5e-3, 1e-3, 5e-4, 1e-4, 1e-5)
LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


def of_gradient(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the gradient of a parameter."""
    yield from of_factor(question, parameter)
    yield from of_clipping(question, parameter)
    yield from of_others(question, parameter)
    yield from of_derivatives(question)


def made(name: str, text: str, gradient: Callable[[Gradients], Array], clause: str = "GRD-1") -> Hypothesis:
    """Return the hypothesis of a gradient that is made of right ones."""
    return Hypothesis(name=name, text=text, clause=clause, gradient=gradient)


def scaled(parameter: str, factor: float) -> Callable[[Gradients], Array]:
    """Return what multiplies a gradient."""
    return lambda of: factor * of(parameter)


def of_factor(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that are multiplied by something."""
    batch = len(next(iter(question.case.batch.arrays().values())))
    yield made("no_gradient", "no gradient at all", scaled(parameter, 0.0))
    yield made(
        "gradient_of_sum",
        f"the gradient of the sum over {batch} samples instead of the mean",
        scaled(parameter, batch),
        "LOS-2",
    )
    yield made(
        "gradient_divided_twice",
        f"a gradient that is divided by the {batch} samples twice",
        scaled(parameter, 1 / batch),
        "LOS-2",
    )
    yield made("gradient_accumulated", "a gradient that was counted twice", scaled(parameter, 2.0))
    yield made("gradient_halved", "half the gradient", scaled(parameter, 0.5))
    yield made("gradient_sign", "a gradient of the wrong sign", scaled(parameter, -1.0))


def of_clipping(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that were clipped."""
    every = [question.exact.gradient(name) for name in trainable(question.config, question.case.part)]
    together = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in every))
    alone = float(np.sqrt(np.square(question.right.value).sum()))

    def within(limit: float) -> Callable[[Gradients], Array]:
        return lambda of: np.clip(of(parameter), -limit, limit)

    for limit in LIMITS:
        for length, how in ((together, "together"), (alone, "one by one")):
            if length > limit:
                yield made(
                    "gradient_clipped",
                    f"gradients that were clipped to the norm {limit:g} {how}",
                    scaled(parameter, limit / length),
                )
        yield made(
            "gradient_clipped", f"gradients that were clipped to {limit:g} element by element", within(limit)
        )


def of_others(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that something was added to, or that are those of something else."""

    def turned(of: Gradients) -> Array:
        return of(parameter).swapaxes(-1, -2)

    def of_another(other: str) -> Callable[[Gradients], Array]:
        return lambda of: of(other)

    def decayed(added: Array) -> Callable[[Gradients], Array]:
        return lambda of: of(parameter) + added

    right, weights = question.right.value, question.case.weights
    if right.ndim == 2 and right.shape[0] == right.shape[1]:
        yield made("transposed_gradient", "a gradient that is transposed", turned, "WGT-2")
    if parameter not in weights:
        return
    for share in DECAYS:
        text = f"a gradient that {share:g} times the weight was added to"
        yield made("weight_decay", text, decayed(share * weights[parameter].astype(np.float64)))
    for other in trainable(question.config, question.case.part):
        alike = other != parameter and other in weights and weights[other].shape == right.shape
        if alike and abs(question.exact.gradient(other)).max() > SMALL * abs(right).max():
            yield made("gradient_of_another", f"the gradient of `{other}` instead", of_another(other))
