"""Accuracy, F1, precision, recall and confusion, against numbers counted by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from concord.spec.errors import SpecError
from concord.training.metrics import Metrics, predicted, probabilities

# 17 samples of 3 classes: of class 0, 5 + 2 + 0; of class 1, 1 + 3 + 1; of class 2, 2 + 0 + 3.
CONFUSION = [[5, 2, 0], [1, 3, 1], [2, 0, 3]]


def logits_for(chosen: list[int], classes: int) -> np.ndarray:
    return np.eye(classes)[chosen] * 7 - 3


def counted(*parts: tuple[int, int]) -> Metrics:
    """Count in batches of the sizes that are given."""
    truth = [row for row in range(3) for column in range(3) for _ in range(CONFUSION[row][column])]
    chosen = [column for row in range(3) for column in range(3) for _ in range(CONFUSION[row][column])]
    found = Metrics(3)
    for start, end in parts:
        found.add(logits_for(chosen[start:end], 3), truth[start:end])
    return found


def test_metrics_are_those_counted_by_hand() -> None:
    found = counted((0, 17))
    assert found.confusion.tolist() == CONFUSION
    assert (found.count, found.accuracy) == (17, 11 / 17)
    expected = [
        (Fraction(5, 8), Fraction(5, 7), Fraction(2, 3)),
        (Fraction(3, 5), Fraction(3, 5), Fraction(3, 5)),
        (Fraction(3, 4), Fraction(3, 5), Fraction(2, 3)),
    ]
    assert [(one.precision, one.recall, one.f1) for one in found.classes] == [
        tuple(map(float, row)) for row in expected
    ]
    assert [one.support for one in found.classes] == [7, 5, 5]
    assert found.macro_f1 is not None
    assert abs(found.macro_f1 - 29 / 45) <= math.ulp(29 / 45)


def test_metrics_do_not_depend_on_how_samples_come() -> None:
    assert (
        counted((0, 17)).confusion.tolist() == counted((0, 2), (2, 13), (13, 17), (17, 17)).confusion.tolist()
    )


def test_one_logit_is_that_of_the_second_class() -> None:
    logits = np.array([[3.0], [-2.0], [0.0], [1e-30], [np.inf]])
    assert predicted(logits).tolist() == [1, 0, 0, 1, 1]
    found = Metrics(2)
    found.add(logits, [1, 1, 0, 0, 1])
    assert found.confusion.tolist() == [[1, 1], [1, 2]]


def test_equal_logits_give_the_first_class_and_nan_gives_none() -> None:
    logits = np.array([[2.0, 2.0, 1.0], [np.nan, 9.0, 1.0], [-np.inf, -np.inf, -np.inf], [0.0, np.inf, 1.0]])
    assert predicted(logits).tolist() == [0, -1, 0, 1]
    found = Metrics(3)
    found.add(logits, [0, 1, 2, 1])
    assert (found.undecided.tolist(), found.confusion.tolist()) == (
        [0, 1, 0],
        [[1, 0, 0], [0, 1, 0], [1, 0, 0]],
    )
    assert (found.count, found.accuracy, found.classes[1].recall, found.classes[1].precision) == (
        4,
        0.5,
        0.5,
        1.0,
    )


def test_absent_classes_do_not_count_and_missed_ones_count_as_nothing() -> None:
    found = Metrics(5)
    found.add(logits_for([0, 0, 3], 5), [0, 1, 1])
    assert [one.f1 for one in found.classes] == [2 / 3, 0.0, None, 0.0, None]
    assert [(one.precision, one.recall, one.support) for one in found.classes] == [
        (0.5, 1.0, 1),
        (0.0, 0.0, 2),
        (0.0, 0.0, 0),
        (0.0, 0.0, 0),
        (0.0, 0.0, 0),
    ]
    assert found.macro_f1 == (2 / 3) / 3
    assert (Metrics(3).accuracy, Metrics(3).macro_f1, Metrics(3).count) == (None, None, 0)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (np.zeros((3, 2)), [0, 1, 2]),
        (np.zeros((3, 3)), [0, 1]),
        (np.zeros(3), [0, 1, 2]),
        (np.zeros((1, 3)), [3]),
        (np.zeros((1, 3)), [-1]),
        (np.zeros((1, 1)), [0]),
    ],
)
def test_what_does_not_fit_is_refused(logits: np.ndarray, labels: list[int]) -> None:
    with pytest.raises(SpecError, match="but must"):
        Metrics(3).add(logits, labels)


def test_probabilities_are_those_of_the_loss() -> None:
    logits = np.array([[0.0, math.log(3.0)], [1e30, 0.0]])
    assert np.array_equal(probabilities(logits).round(15), [[0.25, 0.75], [1.0, 0.0]])
    one = probabilities(np.array([[math.log(3.0)], [-800.0]]))
    assert np.array_equal(one.round(15), [[0.25, 0.75], [1.0, 0.0]])
    assert np.isnan(probabilities(np.array([[np.nan, 1.0], [1.0, 2.0]]))).tolist() == [
        [True, True],
        [False, False],
    ]
