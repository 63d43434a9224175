"""Bugs in the loss (SPEC LOS-1 to LOS-5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import group, of_source, option
from concord.conformance.bugs.context import Context, Edit, Ids
from concord.conformance.bugs.operations import Array
from concord.spec.config import EncoderConfig
from concord.spec.parameters import parameters

GROUP, OF_LOSSES, OF_CHANCES = (
    group("loss", tap, clause=clause)
    for tap, clause in (("loss", "LOS-2"), ("losses", "LOS-1"), ("log_probabilities", "LOS-1"))
)
ONE_CLASS: dict[str, Any] = {"variant": "tf1-text-classifier", "scenario": "sigmoid"}
IGNORED: dict[str, Any] = {
    "variant": "bert-pytorch",
    "scenario": "ignored-label",
    "input": "a label to be ignored",
}
bug, also, chances = GROUP.bug, GROUP.also, OF_CHANCES.bug
SMOOTHING = (0.1, 0.05, 0.2)


def one_hot(m: Context, labels: Ids) -> NDArray[np.float64]:
    return np.asarray(labels[:, None] == np.arange(m.config.num_classes), np.float64)


def of_targets(targets: Callable[[Context], NDArray[np.floating]]) -> Edit:
    """Return losses against other targets, (B, C)."""

    def made(m: Context, y: Array) -> Array:
        given = targets(m)
        if m.config.num_classes == 1:
            labels = given[:, 0]
            return _by_share(m, m.now["logits"][:, 0], labels)
        x = m.now["log_probabilities"]
        return -m.o.sum(x * m.o.constant(given, x), 1)[:, 0]

    return made


def _by_share(m: Context, logits: Array, share: NDArray[np.floating]) -> Array:
    """Return binary cross-entropies against a share of the label 1, (B,)."""
    ones, zeros = (m.binary_losses(logits, np.full(share.shape, flag)) for flag in (True, False))
    return ones * m.o.constant(share, ones) + zeros * m.o.constant(1 - share, zeros)


def of_several(edit: Edit) -> Edit:
    """Return the edit of models with more than one class."""
    return lambda m, y: edit(m, y) if m.config.num_classes > 1 else y


def of_labels(labels: Callable[[Ids, int], Ids]) -> Edit:
    """Return losses against other labels, made of the right ones and the number of classes."""

    def targets(m: Context) -> NDArray[np.floating]:
        classes = m.config.num_classes
        given = labels(m.labels, max(classes, 2))
        return one_hot(m, given) if classes > 1 else given[:, None].astype(np.float64)

    return of_targets(targets)


def smoothed(share: float, among_wrong: bool = False) -> Edit:
    """Return losses whose labels give a share to all classes, or to the wrong ones, alike."""

    def targets(m: Context) -> NDArray[np.floating]:
        classes = m.config.num_classes
        if classes == 1:
            return m.labels[:, None] * (1 - share) + share / 2
        given = share / (classes - 1) if among_wrong else share / classes
        return one_hot(m, m.labels) * (1 - share - given * among_wrong) + given

    return of_targets(targets)


def sigmoid_for_softmax(m: Context, y: Array) -> Array:
    """Sum the binary cross-entropies of all classes."""
    wanted = np.arange(m.config.num_classes) == m.labels[:, None]
    return m.o.sum(m.binary_losses(m.now["logits"], wanted), 1)[:, 0]


def logarithm(made: Callable[[Context, Array], Array]) -> Edit:
    """Return the logarithm of something else than the probabilities, made of them."""
    return of_source(lambda m, x: m.o.log(made(m, m.o.softmax(x, 1))))


def plus(epsilon: float) -> Edit:
    return logarithm(lambda m, p: p + epsilon)


def clipped(epsilon: float) -> Edit:
    return logarithm(lambda m, p: m.o.within(p, epsilon, 1.0 - epsilon))


def reduced(
    factor: Callable[[Context, float], float], everything: bool = False, penalty: Edit | None = None
) -> Edit:
    """Return the sum of the losses that count, times a factor made of how many they are, and the L2 term."""

    def made(m: Context, x: Array) -> Array:
        counted = float(m.counted.sum()) if m.config.ignore_label is not None else float(len(m.labels))
        total = m.o.sum(x) if everything or m.config.ignore_label is None else m.total_loss(x)
        total = total * factor(m, counted)
        if penalty:
            return total + penalty(m, x)
        return total + m.penalty() if m.config.l2_weight else total

    return of_source(made)


def penalised(
    names: Callable[[EncoderConfig], Iterable[str]] = lambda config: (), factor: float = 1.0
) -> Edit:
    """Return the loss with the L2 term of some parameters, by default of the classifier's, times a factor."""
    return reduced(lambda m, count: 1 / count, penalty=lambda m, x: m.penalty(*names(m.config)) * factor)


def of_kind(kind: str = "") -> Callable[[EncoderConfig], Iterable[str]]:
    """Return what gives the parameters of a kind, or of every, that are trained."""
    return lambda config: (
        name
        for name, parameter in parameters(config).items()
        if parameter.trainable and kind in ("", parameter.kind)
    )


BUGS = (
    OF_LOSSES.bug(
        "loss_label_smoothing",
        "Labels are smoothed by 0.1, as in training.",
        smoothed(0.1),
        cause="label_smoothing",
    ),
    *(
        OF_LOSSES.also(
            "label_smoothing",
            f"labels that are smoothed by {share}{' among the wrong classes' if wrong else ''}",
            smoothed(share, wrong),
        )
        for share in SMOOTHING
        for wrong in (False, True)
        if share != SMOOTHING[0] or wrong
    ),
    OF_LOSSES.bug(
        "loss_sigmoid_for_softmax",
        "Each class has a binary cross-entropy of its own.",
        of_several(sigmoid_for_softmax),
        cause="sigmoid_for_softmax",
    ),
    OF_LOSSES.also(
        "sigmoid_for_softmax",
        "the mean binary cross-entropy of the classes",
        of_several(lambda m, y: sigmoid_for_softmax(m, y) / float(m.config.num_classes)),
    ),
    OF_LOSSES.bug(
        "loss_broadcast",
        "Labels of shape (B, 1) meet losses of shape (B,): every label is held against every sample.",
        of_targets(
            lambda m: np.broadcast_to(one_hot(m, m.labels).mean(0), (len(m.labels), m.config.num_classes))
        ),
        input="more than one sample",
        cause="labels_of_other_samples",
    ),
    OF_LOSSES.also(
        "labels_of_other_samples",
        "the label of the first sample for all",
        of_labels(lambda labels, classes: 0 * labels + labels[0]),
    ),
    OF_LOSSES.bug(
        "loss_labels_from_one",
        "Labels are numbered from 1, and the last wraps around.",
        of_several(of_labels(lambda labels, classes: (labels + 1) % classes)),
        cause="labels_shifted",
    ),
    OF_LOSSES.also(
        "labels_shifted",
        "labels that are 1 too low",
        of_several(of_labels(lambda labels, classes: (labels - 1) % classes)),
    ),
    OF_LOSSES.bug(
        "loss_labels_inverted",
        "The logit is taken for that of class 0.",
        of_labels(lambda labels, classes: classes - 1 - labels),
        input="one class",
        cause="labels_reversed",
        **ONE_CLASS,
    ),
    OF_LOSSES.also(
        "label_ignored", "a loss that takes every label for 0", of_labels(lambda labels, classes: 0 * labels)
    ),
    OF_LOSSES.also("loss_sign", "a loss of the wrong sign", lambda m, y: -y),
    OF_LOSSES.also("loss_in_bits", "logarithms to the base 2", lambda m, y: y / math.log(2.0)),
    OF_LOSSES.also(
        "logarithm_missing", "probabilities instead of their logarithms", lambda m, y: -m.o.exp(-y)
    ),
    OF_LOSSES.bug(
        "loss_sigmoid_twice",
        "The cross-entropy from logits is given probabilities.",
        of_source(lambda m, x: m.binary_losses(m.o.sigmoid(x)[:, 0], m.labels == 1)),
        input="one class",
        cause="sigmoid_twice",
        **ONE_CLASS,
    ),
    chances(
        "loss_softmax_twice",
        "The cross-entropy from logits is given probabilities.",
        of_source(lambda m, x: m.o.log_softmax(m.o.softmax(x, 1), 1)),
        cause="softmax_twice",
    ),
    chances(
        "loss_epsilon_in_logarithm",
        "1e-8 is added to probabilities before their logarithm is taken.",
        plus(1e-8),
        input="any, in float64",
    ),
    *(
        OF_CHANCES.also(
            "epsilon_in_logarithm",
            f"{epsilon:g} added to probabilities before their logarithm",
            plus(epsilon),
        )
        for epsilon in (1e-6, 1e-7, 1e-9, 1e-10, 1e-12)
    ),
    *(
        OF_CHANCES.also(
            "probabilities_clipped",
            f"probabilities clipped at {epsilon:g}",
            clipped(epsilon),
        )
        for epsilon in (1e-6, 1e-8, 1e-9, 1e-10, 1e-12)
    ),
    OF_CHANCES.also(
        "softmax_axis",
        "a softmax over samples instead of classes",
        of_source(lambda m, x: m.o.log_softmax(x, 0)),
    ),
    OF_CHANCES.also(
        "logarithm_missing",
        "probabilities without their logarithm",
        of_source(lambda m, x: m.o.softmax(x, 1)),
    ),
    OF_CHANCES.also("softmax_missing", "logits without a softmax", of_source(lambda m, x: x)),
    OF_CHANCES.also(
        "sigmoid_for_softmax",
        "the logarithm of the logistic function",
        of_source(lambda m, x: m.o.log(m.o.sigmoid(x))),
    ),
    OF_CHANCES.also("logarithm_of_base", "logarithms to the base 2", lambda m, y: y / math.log(2.0)),
    bug(
        "loss_sum_for_mean",
        "Losses are summed over samples.",
        reduced(lambda m, count: 1.0),
        input="more than one sample",
        cause="loss_sum",
    ),
    also(
        "loss_sum",
        "the sum over all samples, also those that are to be left out",
        reduced(lambda m, count: 1.0, everything=True),
        clause="LOS-3",
    ),
    also(
        "loss_divided_twice",
        "a mean that is divided by the number of samples once more",
        reduced(lambda m, count: 1 / count**2),
    ),
    also("loss_sign", "a loss of the wrong sign", reduced(lambda m, count: -1 / count), clause="LOS-1"),
    also(
        "loss_mean",
        "the mean of output times cotangent instead of the sum",
        lambda m, y: y / float(m.batch.required("cotangent").size),
        clause="LOS-5",
    ),
    bug(
        "loss_ignored_label_counted",
        "Samples with the label to be ignored are not left out.",
        option(ignore_label=None),
        alone=True,
        cause="ignore_label",
        clause="LOS-3",
        **IGNORED,
    ),
    bug(
        "loss_divided_by_all",
        "Ignored samples are left out of the sum, but not of the count.",
        reduced(lambda m, count: 1 / len(m.labels)),
        clause="LOS-3",
        **IGNORED,
    ),
    bug(
        "loss_l2_missing",
        "The L2 term is left out.",
        option(l2_weight=0.0),
        input="an L2 term",
        alone=True,
        cause="l2_weight",
        clause="LOS-4",
        **ONE_CLASS,
    ),
    bug(
        "loss_l2_without_bias",
        "The L2 term has the weight alone, not the bias.",
        penalised(lambda config: ["classifier.weight"]),
        input="an L2 term",
        cause="l2_parameters",
        clause="LOS-4",
        **ONE_CLASS,
    ),
    bug(
        "loss_l2_not_halved",
        "The L2 term is not halved.",
        penalised(factor=2.0),
        input="an L2 term",
        cause="l2_weight",
        clause="LOS-4",
        **ONE_CLASS,
    ),
    also("l2_parameters", "an L2 term of every kernel", penalised(of_kind("kernel")), clause="LOS-4"),
    also("l2_parameters", "an L2 term of every parameter", penalised(of_kind()), clause="LOS-4"),
)
