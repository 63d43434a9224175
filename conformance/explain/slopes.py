"""Mistakes in the derivative of one step, whose value is right: its slope, a term of it, a factor (SPEC FFN-2, ATT-5, NRM-2, HED-2, LOS-1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.head import erf, logistic
from concord.conformance.explain.hypothesis import Hypothesis, changed
from concord.conformance.explain.norms import NORMS, owner
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.tape import Node

Array = NDArray[np.floating]

Slope = Callable[[Array, Array], Array]
"""Makes a derivative of what goes into a function and what comes out."""


def of_slopes(question: Question) -> Iterator[Hypothesis]:
    """Yield wrong derivatives of single steps."""
    yield from _of_activation()
    yield from _of_softmax()
    yield from _of_norm(question)
    if question.case.part == "model":
        yield from _of_head(question)


def sloped(source: Callable[[Step, str], Node], slope: Slope) -> Change:
    """Return what differentiates an elementwise function in another way."""

    def change(m: Step, tap: str, y: Node) -> Node:
        x = source(m, tap)
        return m.a._record(
            y.value, (x, lambda g: m.a.settle(g * slope(x.value, m.now.get(tap, y).value).astype(g.dtype)))
        )

    return change


def _bell(x: Array) -> Array:
    return np.asarray(np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi))


def _quick(x: Array, y: Array) -> Array:
    gate = logistic(1.702 * x)
    return np.asarray(gate + 1.702 * x * gate * (1 - gate))


def _silu(x: Array, y: Array) -> Array:
    gate = logistic(x)
    return np.asarray(gate + x * gate * (1 - gate))


def _of_tanh_form(x: Array, y: Array, inner: float = 1.0) -> Array:
    argument = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    steep = inner * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * np.square(x))
    return np.asarray(0.5 * (1 + np.tanh(argument)) + 0.5 * x * (1 - np.square(np.tanh(argument))) * steep)


def _of_activation() -> Iterator[Hypothesis]:
    slopes: tuple[tuple[str, Slope], ...] = (
        ("the slope of the quick GELU, x sigmoid(1.702 x)", _quick),
        ("the slope of x sigmoid(x)", _silu),
        (
            "the slope of the GELU without its second term, x times the bell",
            lambda x, y: 0.5 * (1 + erf(x / math.sqrt(2))),
        ),
        ("the slope of the GELU without the term of its tanh", lambda x, y: _of_tanh_form(x, y, 0.0)),
        (
            "the slope of the GELU whose second term lacks x",
            lambda x, y: 0.5 * (1 + erf(x / math.sqrt(2))) + _bell(x),
        ),
        ("the slope of a ReLU that is 1 at and above the result's 0", lambda x, y: (y >= 0) * 1.0),
        ("the logistic function for a slope", lambda x, y: logistic(x)),
        ("the slope of a ReLU that lets 0.01 through", lambda x, y: np.where(x > 0, 1.0, 0.01)),
        ("the slope of a ReLU that lets 0.1 through", lambda x, y: np.where(x > 0, 1.0, 0.1)),
        ("the slope of a ReLU that lets 0.2 through", lambda x, y: np.where(x > 0, 1.0, 0.2)),
        (
            "the slope of an activation taken at the result instead of what went in",
            lambda x, y: 0.5 * (1 + erf(y / math.sqrt(2))) + y * _bell(y),
        ),
        ("the slope of an activation with tanh taken at the result", lambda x, y: _of_tanh_form(y, y)),
        ("the slope of tanh", lambda x, y: 1 - np.square(np.tanh(x))),
    )
    for text, slope in slopes:
        yield changed(
            "activation_slope",
            text,
            "FFN-2",
            sloped(lambda m, tap: m.beside(tap, "inner"), slope),
            "*.activation",
        )


def _of_softmax() -> Iterator[Hypothesis]:
    def softmax(
        text: str,
        inner: Callable[[Array, Array], Array | float],
        outer: Callable[[Array], Array] = lambda w: w,
    ) -> Hypothesis:
        def change(m: Step, tap: str, y: Node) -> Node:
            prefix = tap.rpartition(".")[0]
            scores = m.now.get(f"{prefix}.masked_scores") or m.now[f"{prefix}.scores"]
            w = y.value
            return m.a._record(w, (scores, lambda g: m.a.settle(outer(w) * (g - inner(g, w)))))

        return changed("softmax_slope", text, "ATT-5", change, "*.attention.weights", "attention.weights")

    yield softmax(
        "a softmax whose derivative takes half the sum over the row off",
        lambda g, w: 0.5 * (g * w).sum(-1, keepdims=True),
    )
    yield softmax(
        "a softmax whose derivative takes twice the sum over the row off",
        lambda g, w: 2 * (g * w).sum(-1, keepdims=True),
    )
    yield softmax(
        "a softmax whose derivative takes the mean over the row off, not the sum",
        lambda g, w: (g * w).mean(-1, keepdims=True),
    )
    yield softmax(
        "a softmax whose derivative adds the sum over the row", lambda g, w: -(g * w).sum(-1, keepdims=True)
    )
    yield softmax("a softmax whose derivative sums over queries", lambda g, w: (g * w).sum(-2, keepdims=True))
    yield softmax("a softmax whose derivative sums over heads", lambda g, w: (g * w).sum(-3, keepdims=True))
    yield softmax(
        "a softmax whose derivative sums gradients without their weights",
        lambda g, w: g.sum(-1, keepdims=True),
    )
    yield softmax(
        "a softmax whose derivative takes the mean gradient off", lambda g, w: g.mean(-1, keepdims=True)
    )
    yield softmax(
        "a softmax that is differentiated element by element, with w (1 - w)",
        lambda g, w: 0.0,
        lambda w: w * (1 - w),
    )
    yield softmax(
        "a softmax whose derivative takes the largest of the row off, not the sum",
        lambda g, w: (g * w).max(-1, keepdims=True),
    )


def _of_norm(question: Question) -> Iterator[Hypothesis]:
    def norm(text: str, pull: Callable[[Array, Array, Array], Array]) -> Hypothesis:
        """Return the norm whose gradient is made of the gained one, the normed input and the deviation."""

        def change(m: Step, tap: str, y: Node) -> Node:
            config, x, own = m.config, m.x, owner(m.config.norm_sharing, tap)
            gain, offset = m.weights[f"{own}.weight"], m.weights[f"{own}.bias"]
            centered = x.value - x.value.mean(-1, keepdims=True)
            variance = np.square(centered).sum(-1, keepdims=True) / (
                config.d_model - (config.norm_variance == "unbiased")
            )
            inside = config.norm_epsilon_placement == "inside"
            deviation = (
                np.sqrt(variance + config.norm_epsilon) if inside else np.sqrt(variance) + config.norm_epsilon
            )
            normed = centered / deviation
            through = m.a._record(y.value, (x, lambda g: m.a.settle(pull(g * gain.value, normed, deviation))))
            kept = m.a.add(m.a.multiply(m.constant(normed[0] if m.a.lead else normed), gain), offset)
            return m.a._record(y.value, (through, lambda g: g), (kept, lambda g: g))

        return changed("norm_slope", text, "NRM-2", change, *NORMS)

    def mean(values: Array) -> Array:
        return np.asarray(values.mean(-1, keepdims=True))

    yield norm(
        "a norm whose derivative takes sums for means",
        lambda g, n, d: (g - g.sum(-1, keepdims=True) - n * (g * n).sum(-1, keepdims=True)) / d,
    )
    yield norm(
        "a norm whose derivative is divided by the variance",
        lambda g, n, d: (g - mean(g) - n * mean(g * n)) / d**2,
    )
    yield norm(
        "a norm whose derivative is not divided by the deviation",
        lambda g, n, d: g - mean(g) - n * mean(g * n),
    )
    yield norm(
        "a norm whose derivative adds the term of the variance",
        lambda g, n, d: (g - mean(g) + n * mean(g * n)) / d,
    )
    yield norm(
        "a norm whose derivative has twice the term of the variance",
        lambda g, n, d: (g - mean(g) - 2 * n * mean(g * n)) / d,
    )
    yield norm(
        "a norm whose derivative has half the term of the variance",
        lambda g, n, d: (g - mean(g) - 0.5 * n * mean(g * n)) / d,
    )


def _of_head(question: Question) -> Iterator[Hypothesis]:
    slopes: tuple[tuple[str, Slope], ...] = (
        ("a tanh whose slope is 1 less its size, not its square", lambda x, y: 1 - abs(y)),
        ("a tanh whose slope is 1 less itself, not its square", lambda x, y: 1 - y),
        ("a tanh whose slope is its square", lambda x, y: np.square(y)),
        ("a tanh whose slope is that of a logistic function", lambda x, y: y * (1 - y)),
        ("a tanh whose slope is taken at the result", lambda x, y: 1 - np.square(np.tanh(y))),
    )
    for text, slope in slopes if question.config.pooler == "tanh" else ():
        yield changed(
            "tanh_slope", text, "HED-2", sloped(lambda m, tap: m.now["pooler.dense"], slope), "pooler.output"
        )

    def losses(text: str, made: Callable[[Array, NDArray[np.integer], Array], Array]) -> Hypothesis:
        """Return the loss whose gradient of the logits is made of probabilities, labels and the right one."""

        def change(m: Step, tap: str, y: Node) -> Node:
            labels = m.batch.required("labels")
            shares = np.exp(y.value - y.value.max(-1, keepdims=True))
            shares = shares / shares.sum(-1, keepdims=True)
            return m.a._record(y.value, (y, lambda g: m.a.settle(made(shares, labels, g))))

        return changed("loss_slope", text, "LOS-1", change, "logits")

    classes = question.config.num_classes
    if classes > 1:
        for share in (0.1, 0.05, 0.2):
            text = f"a loss whose derivative is of labels that are smoothed by {share}"
            yield losses(
                text,
                lambda p, labels, g, share=share: (  # type: ignore[misc]
                    g + share * (np.eye(classes)[labels] - 1 / classes) / len(labels)
                ),
            )
        yield losses(
            "a loss whose derivative is the probabilities, without the labels",
            lambda p, labels, g: g + np.eye(classes)[labels] / len(labels),
        )
