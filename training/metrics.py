"""How well a classifier does: accuracy, F1, precision and recall of each class, and what is taken for what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_softmax, softmax

from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError

Predict = Callable[[Batch], NDArray[np.floating]]
"""Returns the logits (B, C) of a batch."""


def probabilities(logits: ArrayLike) -> NDArray[np.float64]:
    """Return the probability of each class, as the loss has it (SPEC LOS-1).

    Args:
        logits: numbers (B, C), or (B, 1) of a model with one output: the logit of class 1.

    Returns:
        Float64 (B, C), or (B, 2): rows of NaN where a logit is NaN, or where infinite ones leave none.
    """
    given = np.asarray(logits, np.float64)
    if given.shape[1] == 1:
        return np.hstack([expit(-given), expit(given)])
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = softmax(given, axis=1)
    return found


def losses(logits: ArrayLike, labels: ArrayLike) -> NDArray[np.float64]:
    """Return the loss of each sample (B,), in float64 (SPEC LOS-1).

    Args:
        logits: numbers (B, C), or (B, 1) of a model with one output.
        labels: integers (B,).
    """
    given = np.asarray(logits, np.float64)
    if given.shape[1] == 1:
        given = np.hstack([np.zeros_like(given), given])
    chosen: NDArray[np.float64] = -log_softmax(given, axis=1)[
        np.arange(len(given)), np.asarray(labels, np.int64)
    ]
    return chosen


def predicted(logits: ArrayLike) -> NDArray[np.int64]:
    """Return the class of the largest logit (B,), the first of equal ones; class 1 of a single logit above 0; -1 where a logit is NaN."""
    given = np.asarray(logits, np.float64)
    chosen = (given[:, 0] > 0).astype(np.int64) if given.shape[1] == 1 else given.argmax(axis=1)
    return np.where(np.isnan(given).any(axis=1), -1, chosen)


@dataclass(frozen=True)
class Class:
    """How well one class is told from the others.

    Attributes:
        precision: the share of what is taken for it that is of it; 0 if nothing is taken for it.
        recall: the share of it that is taken for it; 0 if there is none of it.
        f1: their harmonic mean; 0 where both are 0. None for a class that is absent: there is none of it, and nothing is taken for it.
        support: how many samples are of it.
    """

    precision: float
    recall: float
    f1: float | None
    support: int


@dataclass
class Metrics:
    """What has been counted of predictions (C classes).

    Attributes:
        num_classes: C; 2 for a model with one output.
        confusion: int64 (C, C), how many samples of the class of the row were taken for that of the column.
        undecided: int64 (C,), how many of each class have a NaN logit: they are taken for none, and so count as wrong.
    """

    num_classes: int
    confusion: NDArray[np.int64] = field(init=False)
    undecided: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.confusion = np.zeros((self.num_classes, self.num_classes), np.int64)
        self.undecided = np.zeros(self.num_classes, np.int64)

    def add(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Count some samples.

        Args:
            logits: numbers (B, C), or (B, 1) where there are two classes.
            labels: integers (B,) in [0, C).

        Raises:
            SpecError: if shapes or labels do not fit.
        """
        given, truth = np.asarray(logits), np.asarray(labels, np.int64)
        widths = (self.num_classes, 1) if self.num_classes == 2 else (self.num_classes,)
        if given.ndim != 2 or given.shape[1] not in widths or truth.shape != given.shape[:1]:
            raise SpecError(
                f"logits have shape {given.shape} and labels {truth.shape} but must have (B, {self.num_classes}) and (B,)"
            )
        if ((truth < 0) | (truth >= self.num_classes)).any():
            raise SpecError(
                f"labels reach from {truth.min()} to {truth.max()} but must lie in [0, {self.num_classes})"
            )
        chosen = predicted(given)
        np.add.at(self.confusion, (truth[chosen >= 0], chosen[chosen >= 0]), 1)
        np.add.at(self.undecided, truth[chosen < 0], 1)

    @property
    def count(self) -> int:
        """How many samples were counted."""
        return int(self.confusion.sum() + self.undecided.sum())

    @property
    def accuracy(self) -> float | None:
        """The share of samples taken for what they are; None without any."""
        return float(np.trace(self.confusion) / self.count) if self.count else None

    @property
    def classes(self) -> list[Class]:
        """Precision, recall, F1 and support of each class."""
        right, taken = np.diag(self.confusion), self.confusion.sum(axis=0)
        support = self.confusion.sum(axis=1) + self.undecided
        found = []
        for hits, claimed, there in zip(right.tolist(), taken.tolist(), support.tolist(), strict=True):
            f1 = 2 * hits / (claimed + there) if claimed + there else None
            found.append(Class(hits / claimed if claimed else 0.0, hits / there if there else 0.0, f1, there))
        return found

    @property
    def macro_f1(self) -> float | None:
        """The mean F1 of the classes that are not absent; None if all are."""
        present = [found.f1 for found in self.classes if found.f1 is not None]
        return sum(present) / len(present) if present else None


def measure(
    predict: Predict,
    config: EncoderConfig,
    batches: Iterable[Batch],
    done: Callable[[int], Any] = lambda count: None,
) -> tuple[Metrics, float | None]:
    """Return what a model's predictions come to, and the mean loss (SPEC LOS-1, LOS-3, without LOS-4) in float64; None without any sample.

    Args:
        predict: of the model.
        batches: labelled; samples that do not count in the loss are left out.
        done: is told how many samples are done.
    """
    metrics, found, count = Metrics(max(config.num_classes, 2)), [np.zeros(0)], 0
    for batch in batches:
        labels = batch.required("labels")
        counted = labels != config.ignore_label  # all of them where there is none
        logits = np.asarray(predict(batch), np.float64)[counted]
        metrics.add(logits, labels[counted])
        found.append(losses(logits, labels[counted]))
        done(count := count + len(labels))
    return metrics, float(np.concatenate(found).mean()) if metrics.count else None
