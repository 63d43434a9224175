"""Bugs in the loss (SPEC LOS-1 to LOS-5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Changes, of_source, option
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array
from concord.spec.arrays import Ids
from concord.spec.config import EncoderConfig
from concord.spec.parameters import parameters


def one_hot(m: Context, labels: Ids) -> NDArray[np.float64]:
    return np.asarray(labels[:, None] == np.arange(m.config.num_classes), np.float64)


def of_targets(targets: Callable[[Context], NDArray[np.floating]]) -> Edit:
    """Return losses against other targets, (B, C)."""

    def made(m: Context, y: Array) -> Array:
        given = targets(m)
        if m.config.num_classes == 1:
            share, logits = given[:, 0], m.now["logits"][:, 0]  # of the label 1
            ones, zeros = (m.binary_losses(logits, np.full(share.shape, flag)) for flag in (True, False))
            return ones * m.constant(share, ones) + zeros * m.constant(1 - share, zeros)
        x = m.now["log_probabilities"]
        return -m.sum(x * m.constant(given, x), 1)[:, 0]

    return made


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
    return m.sum(m.binary_losses(m.now["logits"], wanted), 1)[:, 0]


def in_bits(m: Context, y: Array) -> Array:
    """Take logarithms to the base 2."""
    return y / math.log(2.0)


def logarithm(made: Edit) -> Edit:
    """Return the logarithm of something else than the probabilities, made of them."""
    return of_source(lambda m, x: m.log(made(m, m.softmax(x, 1))))


def plus(epsilon: float) -> Edit:
    return logarithm(lambda m, p: p + epsilon)


def clipped(epsilon: float) -> Edit:
    return logarithm(lambda m, p: m.within(p, epsilon, 1.0 - epsilon))


def reduced(
    factor: Callable[[Context, float], float], everything: bool = False, penalty: Edit | None = None
) -> Edit:
    """Return the sum of the losses that count, times a factor made of how many they are, and the L2 term."""

    def made(m: Context, x: Array) -> Array:
        counted = float(m.counted.sum()) if m.config.ignore_label is not None else float(len(m.labels))
        total = m.sum(x) if everything or m.config.ignore_label is None else m.total_loss(x)
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


EDITS: Changes = {
    "loss_sigmoid_for_softmax": of_several(sigmoid_for_softmax),
    "sigmoid_losses_averaged": of_several(
        lambda m, y: sigmoid_for_softmax(m, y) / float(m.config.num_classes)
    ),
    "loss_broadcast": of_targets(
        lambda m: np.broadcast_to(one_hot(m, m.labels).mean(0), (len(m.labels), m.config.num_classes))
    ),
    "labels_of_other_samples": of_labels(lambda labels, classes: 0 * labels + labels[0]),
    "loss_labels_from_one": of_several(of_labels(lambda labels, classes: (labels + 1) % classes)),
    "labels_shifted": of_several(of_labels(lambda labels, classes: (labels - 1) % classes)),
    "loss_labels_inverted": of_labels(lambda labels, classes: classes - 1 - labels),
    "label_ignored": of_labels(lambda labels, classes: 0 * labels),
    "logarithm_missing": lambda m, y: -m.exp(-y),
    "loss_sigmoid_twice": of_source(lambda m, x: m.binary_losses(m.sigmoid(x)[:, 0], m.labels == 1)),
    "loss_softmax_twice": of_source(lambda m, x: m.log_softmax(m.softmax(x, 1), 1)),
    "logarithm_of_sigmoid": of_source(lambda m, x: m.log(m.sigmoid(x))),
    "loss_sum_for_mean": reduced(lambda m, count: 1.0),
    "loss_sum": reduced(lambda m, count: 1.0, everything=True),
    "loss_divided_twice": reduced(lambda m, count: 1 / count**2),
    "loss_sum_sign": reduced(lambda m, count: -1 / count),
    "loss_mean": lambda m, y: y / float(m.batch.required("cotangent").size),
    "loss_ignored_label_counted": option(ignore_label=None),
    "loss_divided_by_all": reduced(lambda m, count: 1 / len(m.labels)),
    "loss_l2_without_bias": penalised(lambda config: ["classifier.weight"]),
    "l2_parameters": {"kernel": penalised(of_kind("kernel")), "parameter": penalised(of_kind())},
}
