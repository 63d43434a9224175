"""Bugs of the loss (SPEC LOS-1 to LOS-5)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.context import Array, Context, Edits, Flags, only


def of_targets(m: Context, targets: NDArray[np.floating]) -> Array:
    """Losses against soft targets, (B, C)."""
    if m.config.num_classes == 1:
        share, logits = targets[:, 0], m.now["logits"][:, 0]  # of the label 1
        ones, zeros = (binary_losses(m, logits, np.full(share.shape, flag)) for flag in (True, False))
        return ones * m.constant(share, ones) + zeros * m.constant(1 - share, zeros)
    x = m.now["log_probabilities"]
    return -m.sum(x * m.constant(targets, x), 1)[:, 0]


def binary_losses(m: Context, logits: Array, labels: Flags) -> Array:
    wrong = m.where(labels, -logits, logits)
    return m.relu(wrong) + m.log(m.exp(-m.abs(wrong)) + 1.0)


def smoothed(m: Context, share: float) -> Array:
    classes = m.config.num_classes
    if classes == 1:
        return of_targets(m, m.labels[:, None] * (1 - share) + share / 2)
    one_hot = np.asarray(m.labels[:, None] == np.arange(classes), np.float64)
    return of_targets(m, one_hot * (1 - share) + share / classes)


def count(m: Context) -> float:
    return float(len(m.labels) if m.config.ignore_label is None else m.counted.sum())


def reduced(m: Context, factor: float, penalised: Iterable[str] = ("weight", "bias")) -> Array:
    """Scale the sum of counted losses, and add the L2 term of some classifier parameters (SPEC LOS-2 to
    LOS-4).
    """
    total = m.sum(m.x if m.config.ignore_label is None else m.where(m.counted, m.x, 0.0)) * factor
    for leaf in penalised if m.config.l2_weight else ():
        parameter = m.weight(f"classifier.{leaf}")
        total = total + m.sum(parameter * parameter) * (0.5 * m.config.l2_weight)
    return total


EDITS: Edits = {
    "log_softmax_over_one_sample": only(lambda m: m.ids.shape[0] == 1, lambda m: m.log_softmax(m.x, 0)),
    "probabilities_clipped": lambda m: m.log(m.within(m.softmax(m.x, 1), 1e-7, 1.0 - 1e-7)),
    "loss_divided_by_all": lambda m: reduced(m, 1 / len(m.labels)),
    "loss_l2_without_bias": lambda m: reduced(m, 1 / count(m), ("weight",)),
}
