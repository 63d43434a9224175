"""How well a classifier does: loss and accuracy, and what scikit-learn says of each class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_softmax, softmax

from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, optional

NumberedBatches = Iterable[tuple[NDArray[np.int64], Batch]]
"""Batches, each with the numbers of its samples (B,)."""

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
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = -log_softmax(given, axis=1)
    return found[np.arange(len(given)), np.asarray(labels, np.int64)]


def predicted(logits: ArrayLike) -> NDArray[np.int64]:
    """Return the class of the largest logit (B,), the first of equal ones; -1 where a logit is NaN.

    Of a single logit it is class 1 above 0.
    """
    given = np.asarray(logits, np.float64)
    chosen = (given[:, 0] > 0).astype(np.int64) if given.shape[1] == 1 else given.argmax(axis=1)
    return np.where(np.isnan(given).any(axis=1), -1, chosen)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Samples with their class and the model's logits (N samples that count in the loss, C classes).

    Attributes:
        truth: int64 (N,).
        logits: float64 (N, C), or (N, 1) of a model with one output.
        numbers: int64 (N,), of the samples.
    """

    truth: NDArray[np.int64]
    logits: NDArray[np.float64]
    numbers: NDArray[np.int64]

    @cached_property
    def chosen(self) -> NDArray[np.int64]:
        """The predicted classes (N,); -1 where a logit is NaN, which counts as wrong."""
        return predicted(self.logits)

    @property
    def accuracy(self) -> float | None:
        """How many of all samples are predicted right; None without any."""
        return float((self.truth == self.chosen).mean()) if len(self.truth) else None

    @property
    def loss(self) -> float | None:
        """The mean loss (SPEC LOS-1, LOS-3, without LOS-4); None without any sample."""
        return float(losses(self.logits, self.truth).mean()) if len(self.truth) else None

    def scores(self) -> dict[str, Any]:
        """Return precision, recall, F1 and support of each class, and the confusion matrix.

        A class that no sample has and none is predicted as is absent: its F1 is None, and ``macro_f1`` leaves
        it out. ``undecided`` counts the samples of each class that have a NaN logit.

        Raises:
            SpecError: if scikit-learn is not installed.
        """
        with optional("metrics of each class", "training"):
            from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
        count = max(self.logits.shape[1], 2)
        labels, none = np.arange(count), np.zeros(count)
        confusion, rows = np.diag(none.astype(int)), (none, none, none, none.astype(int))
        if len(self.truth):
            confusion = confusion_matrix(self.truth, self.chosen, labels=labels)
            rows = precision_recall_fscore_support(self.truth, self.chosen, labels=labels, zero_division=0.0)
        there = (rows[3] > 0) | (confusion.sum(axis=0) > 0)
        return {
            "confusion": confusion.tolist(),
            "undecided": (rows[3] - confusion.sum(axis=1)).tolist(),
            "macro_f1": float(rows[2][there].mean()) if there.any() else None,
            "classes": [
                {"precision": precision, "recall": recall, "f1": f1 if present else None, "support": support}
                for precision, recall, f1, support, present in zip(
                    *(row.tolist() for row in rows), there, strict=True
                )
            ],
        }


def measure(
    predict: Predict,
    config: EncoderConfig,
    batches: NumberedBatches,
    done: Callable[[int], Any] = lambda count: None,
) -> Predictions:
    """Return what a model predicts of labelled batches; samples that do not count in the loss are left out.

    Args:
        done: is called with how many samples are done.

    Raises:
        SpecError: if logits have another shape than the model says.
    """
    width, none = max(config.num_classes, 1), np.zeros(0, np.int64)
    found, count = [(none, np.zeros((0, width)), none)], 0
    for numbers, batch in batches:
        labels = batch.required("labels")
        logits, expected = np.asarray(predict(batch), np.float64), (len(labels), width)
        if logits.shape != expected:
            raise SpecError(f"logits have shape {logits.shape} but must have {expected}")
        counted = labels != config.ignore_label  # all of them where there is none
        found.append((labels[counted], logits[counted], numbers[counted]))
        done(count := count + len(labels))
    return Predictions(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
