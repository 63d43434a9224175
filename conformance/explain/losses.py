"""Mistakes in the loss (SPEC LOS-1 to LOS-4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.head import logistic
from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.parameters import parameters
from concord.spec.tape import Node

SMOOTHING = (0.1, 0.05, 0.2)
"""How much labels may be smoothed."""


def of_log_probabilities(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with log-probabilities."""

    def logarithm(probabilities: Callable[[Any], Any]) -> Change:
        return lambda m, tap, y: m.function(
            m.a.softmax(m.now["logits"]), lambda p: np.log(probabilities(p)), absolute=True
        )

    def over_samples(m: Step, tap: str, y: Node) -> Node:
        turned = m.a.log_softmax(m.rearranged(m.now["logits"], np.transpose))
        return m.rearranged(turned, np.transpose)

    yield changed(
        "softmax_twice",
        "a softmax of probabilities, which are taken for logits",
        "LOS-1",
        lambda m, tap, y: m.a.log_softmax(m.a.softmax(m.now["logits"])),
    )
    yield changed("softmax_axis", "a softmax over samples instead of classes", "LOS-1", over_samples)
    yield changed(
        "logarithm_missing",
        "probabilities without their logarithm",
        "LOS-1",
        lambda m, tap, y: m.a.softmax(m.now["logits"]),
    )
    yield changed("softmax_missing", "logits without a softmax", "LOS-1", lambda m, tap, y: m.now["logits"])
    yield changed(
        "sigmoid_for_softmax",
        "the logarithm of the logistic function",
        "LOS-1",
        lambda m, tap, y: m.function(y, lambda _: np.log(logistic(m.now["logits"].value))),
    )
    yield changed(
        "logarithm_of_base",
        "logarithms to the base 2",
        "LOS-1",
        lambda m, tap, y: m.a.scale(y, float(1 / np.log(2))),
    )
    for epsilon in (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12):
        yield changed(
            "epsilon_in_logarithm",
            f"{epsilon:g} added to probabilities before their logarithm",
            "LOS-1",
            logarithm(_plus(epsilon)),
        )
        yield changed(
            "probabilities_clipped",
            f"probabilities clipped at {epsilon:g}",
            "LOS-1",
            logarithm(_clipped(epsilon)),
        )
    floor = {"log_softmax_floor": -64.0}
    yield Hypothesis(
        name="log_softmax_floor",
        text="a log-softmax that clips what lies 64 below the largest logit",
        clause="LOS-1",
        deviations=floor,
    )


def _plus(epsilon: float) -> Callable[[Any], Any]:
    return lambda p: p + epsilon


def _clipped(epsilon: float) -> Callable[[Any], Any]:
    return lambda p: np.clip(p, epsilon, 1 - epsilon)


def of_losses(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the loss of each sample."""
    yield changed("loss_sign", "a loss of the wrong sign", "LOS-1", lambda m, tap, y: m.a.scale(y, -1.0))
    yield changed(
        "loss_in_bits",
        "logarithms to the base 2",
        "LOS-1",
        lambda m, tap, y: m.a.scale(y, float(1 / np.log(2))),
    )
    yield from (of_softmax if question.config.num_classes > 1 else of_sigmoid)(question)


def of_softmax(question: Question) -> Iterator[Hypothesis]:
    """Yield other losses of several classes."""
    classes = question.config.num_classes

    def held(
        name: str, text: str, targets: Callable[[NDArray[np.integer]], NDArray[np.floating]]
    ) -> Hypothesis:
        """Return the hypothesis of other targets: (B,) to (B, C)."""

        def change(m: Step, tap: str, y: Node) -> Node:
            products = m.a.multiply(
                m.now["log_probabilities"], m.constant(targets(m.batch.required("labels")))
            )
            return m.a.reshape(m.a.scale(m.a.sum(products, -1), -1.0), y.shape)

        return changed(name, text, "LOS-1", change)

    def one_hot(labels: NDArray[np.integer]) -> NDArray[np.floating]:
        hot: NDArray[np.floating] = np.eye(classes)[labels]
        return hot

    def binary(m: Step, tap: str, y: Node) -> Node:
        losses = m.a.sigmoid_cross_entropy(
            m.now["logits"], one_hot(m.batch.required("labels")).astype(y.value.dtype)
        )
        return m.a.reshape(m.a.sum(losses, -1), y.shape)

    for share in SMOOTHING:
        yield held(
            "label_smoothing",
            f"labels that are smoothed by {share}",
            _smoothed(one_hot, share, share / classes),
        )
        yield held(
            "label_smoothing",
            f"labels that are smoothed by {share} among the wrong classes",
            _smoothed(one_hot, share + share / (classes - 1), share / (classes - 1)),
        )
    yield held("labels_shifted", "labels that are 1 too high", lambda labels: one_hot((labels + 1) % classes))
    yield held("labels_shifted", "labels that are 1 too low", lambda labels: one_hot((labels - 1) % classes))
    yield held("labels_reversed", "labels in reverse order", lambda labels: one_hot(classes - 1 - labels))
    yield held(
        "labels_of_other_samples",
        "every label held against every sample",
        lambda labels: np.broadcast_to(one_hot(labels).mean(0), (len(labels), classes)),
    )
    yield held(
        "labels_of_other_samples",
        "the label of the first sample for all",
        lambda labels: one_hot(0 * labels + labels[0]),
    )
    yield changed("sigmoid_for_softmax", "a binary cross-entropy of each class, summed", "LOS-1", binary)
    yield changed(
        "sigmoid_for_softmax",
        "the mean binary cross-entropy of the classes",
        "LOS-1",
        lambda m, tap, y: m.a.divide_by(binary(m, tap, y), classes),
    )
    yield changed(
        "logarithm_missing",
        "probabilities instead of their logarithms",
        "LOS-1",
        lambda m, tap, y: m.function(y, lambda loss: -np.exp(-loss)),
    )


def _smoothed(
    one_hot: Callable[[NDArray[np.integer]], NDArray[np.floating]], taken: float, given: float
) -> Callable[[NDArray[np.integer]], NDArray[np.floating]]:
    return lambda labels: one_hot(labels) * (1 - taken) + given


def of_sigmoid(question: Question) -> Iterator[Hypothesis]:
    """Yield other losses of one class."""

    def entropy(m: Step, logits: Node, targets: NDArray[Any]) -> Node:
        return m.a.reshape(
            m.a.sigmoid_cross_entropy(logits, targets.astype(logits.value.dtype)[:, None]), (len(targets),)
        )

    def labels(m: Step) -> NDArray[Any]:
        return m.batch.required("labels")

    def softened(share: float) -> Change:
        return lambda m, tap, y: entropy(m, m.now["logits"], labels(m) * (1 - share) + share / 2)

    yield changed(
        "sigmoid_twice",
        "a cross-entropy of probabilities, which are taken for logits",
        "LOS-1",
        lambda m, tap, y: entropy(m, m.function(m.now["logits"], logistic), labels(m)),
    )
    yield changed(
        "labels_reversed",
        "labels 0 and 1 in each other's place",
        "LOS-1",
        lambda m, tap, y: entropy(m, m.now["logits"], 1 - labels(m)),
    )
    for share in SMOOTHING:
        yield changed("label_smoothing", f"labels that are smoothed by {share}", "LOS-1", softened(share))
    yield changed(
        "label_ignored",
        "a loss that takes every label for 0",
        "LOS-1",
        lambda m, tap, y: entropy(m, m.now["logits"], 0 * labels(m)),
    )


def of_loss(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the loss of the batch."""
    config = question.config
    if question.case.part != "model":
        count = math.prod(question.case.batch.required("cotangent").shape)
        text = "the mean of output times cotangent instead of the sum"
        yield changed("loss_mean", text, "LOS-5", lambda m, tap, y: m.a.divide_by(y, float(count)))
        return
    yield from options(
        config, "ignore_label", (None, *range(config.num_classes if config.num_classes > 1 else 0)), "LOS-3"
    )
    yield from options(
        config,
        "l2_weight",
        (0.0, 2 * config.l2_weight, 0.5 * config.l2_weight, 0.1, 0.01, 0.001, 1e-4),
        "LOS-4",
    )
    yield from of_reduction(question)
    if config.l2_weight:
        yield from of_penalty(question)


def of_reduction(question: Question) -> Iterator[Hypothesis]:
    """Yield other ways to make one loss of those of the samples."""
    config, size = question.config, len(question.case.batch.required("labels"))

    def reduced(
        name: str, text: str, clause: str, factor: Callable[[float], float], everything: bool = False
    ) -> Hypothesis:
        """Return the hypothesis of a sum of losses times a factor, which is made of how many samples count."""

        def change(m: Step, tap: str, y: Node) -> Node:
            labels = m.batch.required("labels")
            counted = (
                labels != config.ignore_label if config.ignore_label is not None else np.ones(size, bool)
            )
            total = m.a.sum(m.now["losses"] if everything else m.a.replace(m.now["losses"], counted, 0.0))
            return m.a.add(m.a.scale(total, factor(float(counted.sum()))), squares(m, CLASSIFIER))

        return changed(name, text, clause, change)

    yield reduced("loss_sum", "the sum over samples instead of the mean", "LOS-2", lambda count: 1.0)
    yield reduced(
        "loss_divided_twice",
        "a mean that is divided by the number of samples once more",
        "LOS-2",
        lambda count: 1 / count**2,
    )
    yield reduced("loss_sign", "a loss of the wrong sign", "LOS-1", lambda count: -1 / count)
    if config.ignore_label is not None:
        yield reduced(
            "loss_sum",
            "the sum over all samples, also those that are to be left out",
            "LOS-3",
            lambda count: 1.0,
            True,
        )
        text = "a mean whose count includes the samples that are left out"
        yield reduced("loss_divided_by_all", text, "LOS-3", lambda count: 1 / size)


CLASSIFIER = ("classifier.weight", "classifier.bias")


def squares(m: Step, names: Iterable[str]) -> Node:
    """Return the L2 term of some parameters."""
    total = m.constant(np.zeros(()))
    for name in names if m.config.l2_weight else ():
        total = m.a.add(
            total,
            m.a.scale(m.a.sum(m.a.multiply(m.weights[name], m.weights[name])), 0.5 * m.config.l2_weight),
        )
    return total


def of_penalty(question: Question) -> Iterator[Hypothesis]:
    """Yield L2 terms of other parameters."""
    table = parameters(question.config)

    def penalised(text: str, names: Iterable[str]) -> Hypothesis:
        chosen = tuple(names)

        def change(m: Step, tap: str, y: Node) -> Node:
            return m.a.add(m.a.subtract(y, squares(m, CLASSIFIER)), squares(m, chosen))

        return changed("l2_parameters", f"an L2 term of {text}", "LOS-4", change)

    yield penalised("the weight alone, without the bias", ["classifier.weight"])
    yield penalised("every kernel", (name for name, parameter in table.items() if parameter.kind == "kernel"))
    yield penalised("every parameter", (name for name, parameter in table.items() if parameter.trainable))
