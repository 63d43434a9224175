"""Bugs in the loss (SPEC LOS-1 to LOS-5)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Edits, only, option
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.operations import Array
from concord.spec.arrays import Ids
from concord.spec.parameters import parameters


def one_hot(m: Context, labels: Ids) -> NDArray[np.float64]:
    return np.asarray(labels[:, None] == np.arange(m.config.num_classes), np.float64)


def of_targets(m: Context, targets: NDArray[np.floating]) -> Array:
    """Return losses against other targets, (B, C)."""
    if m.config.num_classes == 1:
        share, logits = targets[:, 0], m.now["logits"][:, 0]  # of the label 1
        ones, zeros = (binary_losses(m, logits, np.full(share.shape, flag)) for flag in (True, False))
        return ones * m.constant(share, ones) + zeros * m.constant(1 - share, zeros)
    x = m.now["log_probabilities"]
    return -m.sum(x * m.constant(targets, x), 1)[:, 0]


def binary_losses(m: Context, logits: Array, wanted: Flags) -> Array:
    """Return the cross-entropy of each logit by itself (SPEC LOS-1)."""
    wrong = m.where(wanted, -logits, logits)
    return m.relu(wrong) + m.log(m.exp(-m.abs(wrong)) + 1.0)


def of_labels(m: Context, labels: Ids) -> Array:
    """Return losses against other labels."""
    several = m.config.num_classes > 1
    return of_targets(m, one_hot(m, labels) if several else labels[:, None].astype(np.float64))


def of_several(edit: Edit) -> Edit:
    """Return the edit of models with more than one class."""
    return only(lambda m: m.config.num_classes > 1, edit)


def smoothed(m: Context, share: float, among_wrong: bool = False) -> Array:
    """Return losses whose labels give a share to all classes, or to the wrong ones, alike."""
    classes = m.config.num_classes
    if classes == 1:
        return of_targets(m, m.labels[:, None] * (1 - share) + share / 2)
    given = share / (classes - 1) if among_wrong else share / classes
    return of_targets(m, one_hot(m, m.labels) * (1 - share - given * among_wrong) + given)


def sigmoid_for_softmax(m: Context) -> Array:
    """Sum the binary cross-entropies of all classes."""
    wanted = np.arange(m.config.num_classes) == m.labels[:, None]
    return m.sum(binary_losses(m, m.now["logits"], wanted), 1)[:, 0]


def in_bits(m: Context) -> Array:
    """Take logarithms to the base 2."""
    return m.y / math.log(2.0)


def plus(m: Context, epsilon: float) -> Array:
    """Return the logarithm of the probabilities and a small number."""
    return m.log(m.softmax(m.x, 1) + epsilon)


def clipped(m: Context, epsilon: float) -> Array:
    return m.log(m.within(m.softmax(m.x, 1), epsilon, 1.0 - epsilon))


def count(m: Context) -> float:
    """Return how many losses count."""
    return float(len(m.labels) if m.config.ignore_label is None else m.counted.sum())


def reduced(m: Context, factor: float, everything: bool = False, penalty: Array = None) -> Array:
    """Return the sum of the losses that count, or of all, times a factor, and the L2 term, or another."""
    if not everything and m.config.ignore_label is not None:
        total = m.sum(m.where(m.counted, m.x, 0.0))
    else:
        total = m.sum(m.x)
    if penalty is None and not m.config.l2_weight:
        return total * factor
    return total * factor + (penalty_of(m) if penalty is None else penalty)


def mean_of_other_count(m: Context, more: int) -> Array:
    """Divide the sum of the losses by another number of samples."""
    return reduced(m, 1 / max(count(m) + more, 1))


def penalty_of(m: Context, names: Iterable[str] = ()) -> Array:
    """Return the L2 term of parameters, by default of the classifier's (SPEC LOS-4)."""
    given = [m.weight(name) for name in names or ("classifier.weight", "classifier.bias")]
    squares = [m.sum(parameter * parameter) for parameter in given]
    return sum(squares[1:], start=squares[0]) * (0.5 * m.config.l2_weight)


def penalised(m: Context, names: Iterable[str] = (), factor: float = 1.0) -> Array:
    """Return the loss with the L2 term of some parameters, by default of the classifier's, times a factor."""
    return reduced(m, 1 / count(m), penalty=penalty_of(m, names) * factor)


def of_kind(m: Context, *kinds: str) -> list[str]:
    """Return the parameters of some kinds, by default of all, that are trained."""
    return [
        name
        for name, parameter in parameters(m.config).items()
        if parameter.trainable and parameter.kind in (kinds or (parameter.kind,))
    ]


EDITS: Edits = {
    "loss_sigmoid_for_softmax": of_several(sigmoid_for_softmax),
    "sigmoid_losses_averaged": of_several(lambda m: sigmoid_for_softmax(m) / float(m.config.num_classes)),
    "loss_broadcast": lambda m: of_targets(
        m, np.broadcast_to(one_hot(m, m.labels).mean(0), (len(m.labels), m.config.num_classes))
    ),
    "labels_of_other_samples": lambda m: of_labels(m, 0 * m.labels + m.labels[0]),
    "loss_labels_from_one": of_several(lambda m: of_labels(m, (m.labels + 1) % m.config.num_classes)),
    "labels_shifted": of_several(lambda m: of_labels(m, (m.labels - 1) % m.config.num_classes)),
    "loss_labels_inverted": lambda m: of_labels(m, max(m.config.num_classes, 2) - 1 - m.labels),
    "label_ignored": lambda m: of_labels(m, 0 * m.labels),
    "logarithm_missing": lambda m: -m.exp(-m.y),
    "loss_sigmoid_twice": lambda m: binary_losses(m, m.sigmoid(m.x)[:, 0], m.labels == 1),
    "loss_softmax_twice": lambda m: m.log_softmax(m.softmax(m.x, 1), 1),
    "logarithm_of_sigmoid": lambda m: m.log(m.sigmoid(m.x)),
    "loss_divided_twice": lambda m: reduced(m, 1 / count(m) ** 2),
    "loss_sum_sign": lambda m: reduced(m, -1 / count(m)),
    "loss_mean": lambda m: m.y / float(m.batch.required("cotangent").size),
    "loss_ignored_label_counted": lambda r: option(r, ignore_label=None),
    "loss_divided_by_all": lambda m: reduced(m, 1 / len(m.labels)),
    "l2_parameters": {
        "kernel": lambda m: penalised(m, of_kind(m, "kernel")),
        "parameter": lambda m: penalised(m, of_kind(m)),
    },
}
