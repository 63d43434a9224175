"""Mistakes in activations and head (SPEC FFN-2, HED-2, HED-3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.tape import Node

Flags = NDArray[np.bool_]
Function = Callable[[Any], Any]


def logistic(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def erf_by_polynomial(x: Any) -> Any:
    """Return erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    t = 1 / (1 + 0.3275911 * abs(x))
    polynomial = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return np.sign(x) * (1 - polynomial * np.exp(-x * x))


ERF = np.frompyfunc(math.erf, 1, 1)


def erf(x: Any) -> Any:
    """Return erf."""
    return ERF(x).astype(x.dtype)


def gelu_tanh(cubic: float = 0.044715, factor: float = math.sqrt(2 / math.pi)) -> Function:
    """Return what x is multiplied by in the approximation of GELU, with other constants."""
    return lambda x: 0.5 * (1 + np.tanh(factor * (x + cubic * x * x * x)))


def of_activation(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the activation."""
    inner, bias = tap.replace("activation", "inner"), tap.replace("activation", "inner.bias")

    def gate(name: str, text: str, function: Function) -> Hypothesis:
        """Return the hypothesis of x times a function of x."""

        def change(m: Step, tap: str, y: Node) -> Node:
            return m.a.multiply(m.now[inner], m.function(m.now[inner], function, absolute=True))

        return changed(name, text, "FFN-2", change)

    def elementwise(name: str, text: str, function: Function) -> Hypothesis:
        return changed(name, text, "FFN-2", lambda m, tap, y: m.function(m.now[inner], function))

    def before_bias(m: Step, tap: str, y: Node) -> Node:
        return m.a.add(m.activation(m.a.subtract(m.now[inner], m.weights[bias]), None), m.weights[bias])

    yield from options(question.config, "activation", ("relu", "gelu_erf", "gelu_tanh"), "FFN-2")
    yield gate("quick_gelu", "x sigmoid(1.702 x), the quick GELU", lambda x: logistic(1.702 * x))
    yield gate("silu", "x sigmoid(x)", logistic)
    yield gate(
        "gelu_without_root", "a GELU with erf(x) instead of erf(x / sqrt(2))", lambda x: 0.5 * (1 + erf(x))
    )
    if question.config.activation == "gelu_erf":
        yield gate(
            "gelu_by_polynomial",
            "a GELU whose erf is approximated to 1.5e-7",
            lambda x: 0.5 * (1 + erf_by_polynomial(x * math.sqrt(0.5))),
        )
    for cubic in (0.0, 0.44715, 0.0044715, 0.044715**2, 0.04715, 0.0447):
        yield gate("gelu_cubic_term", f"a GELU whose cubic term has the factor {cubic:g}", gelu_tanh(cubic))
    for factor, text in (
        (2 / math.pi, "2 / pi"),
        (math.sqrt(math.pi / 2), "sqrt(pi / 2)"),
        (1.0, "1"),
        (math.sqrt(2) / math.pi, "sqrt(2) / pi"),
    ):
        yield gate(
            "gelu_inner_factor",
            f"a GELU whose tanh has the factor {text} instead of sqrt(2 / pi)",
            gelu_tanh(factor=factor),
        )
    for slope in (0.01, 0.1, 0.2):
        yield elementwise(
            "leaky_relu", f"a ReLU that lets {slope:g} of what is negative through", _leaky(slope)
        )
    yield elementwise("elu", "an ELU", lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))))
    if question.config.activation == "relu":
        yield elementwise("relu6", "a ReLU that is clipped at 6", lambda x: np.clip(x, 0, 6))
    yield elementwise("tanh_activation", "tanh", np.tanh)
    yield changed("no_activation", "no activation", "FFN-2", lambda m, tap, y: m.now[inner])
    yield changed("activation_before_bias", f"`{bias}` added after the activation", "FFN-1", before_bias)


def _leaky(slope: float) -> Function:
    return lambda x: np.where(x > 0, x, slope * x)


def of_outer(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the end of the feed-forward sublayer, besides the linear layer."""
    yield changed(
        "activation_twice",
        "an activation after the second linear layer too",
        "FFN-1",
        lambda m, tap, y: m.activation(y, None),
    )


def of_pooler(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield other functions after the pooler."""
    right = {"tanh": "tanh", "relu": "a ReLU"}[question.config.pooler]
    yield changed(
        "pooler_activation_missing",
        f"no {right.removeprefix('a ')}",
        "HED-2",
        _function_of("pooler.dense", lambda x: x),
    )
    others: tuple[tuple[str, Function], ...] = (
        ("tanh", np.tanh),
        ("a ReLU", lambda x: np.maximum(x, 0)),
        ("the logistic function", logistic),
        ("a GELU", lambda x: x * 0.5 * (1 + erf(x * math.sqrt(0.5)))),
    )
    for text, function in others:
        if text != right:
            yield changed(
                "pooler_activation",
                f"{text} instead of {right}",
                "HED-2",
                _function_of("pooler.dense", function),
            )


def _function_of(source: str, function: Function) -> Change:
    return lambda m, tap, y: m.function(m.now[source], function)


def of_logits(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with logits besides the linear layer."""
    if question.config.num_classes > 1:
        yield changed(
            "logits_softmaxed", "probabilities instead of logits", "HED-3", lambda m, tap, y: m.a.softmax(y)
        )
        yield changed(
            "logits_softmaxed",
            "log-probabilities instead of logits",
            "HED-3",
            lambda m, tap, y: m.a.log_softmax(y),
        )
    else:
        yield changed(
            "logits_softmaxed",
            "a probability instead of a logit",
            "HED-3",
            lambda m, tap, y: m.function(y, logistic),
        )
    yield changed(
        "logits_activated", "logits that pass through a ReLU", "HED-3", lambda m, tap, y: m.a.relu(y)
    )
    yield changed("logits_activated", "logits that pass through tanh", "HED-3", lambda m, tap, y: m.a.tanh(y))
