"""Accuracy, F1, precision, recall and confusion, against numbers counted by hand."""

import math
from itertools import pairwise

import numpy as np

from concord.spec.batch import Batch
from concord.training.metrics import measure, predicted, probabilities
from tests.conftest import small_config

# 17 samples of 3 classes: of class 0, 5 + 2 + 0; of class 1, 1 + 3 + 1; of class 2, 2 + 0 + 3.
CONFUSION = [[5, 2, 0], [1, 3, 1], [2, 0, 3]]


TRUTH, CHOSEN = (
    [(row, column)[axis] for row in range(3) for column in range(3) for _ in range(CONFUSION[row][column])]
    for axis in (0, 1)
)
NARROW = small_config(num_classes=3)


def logits_for(chosen, classes):
    return np.eye(classes)[chosen] * 7 - 3


def predictions(logits, labels, *ends):
    """Measure logits in batches that end where it is said."""
    parts = [slice(start, end) for start, end in pairwise([0, *ends, len(labels)])]
    given = iter([logits[part] for part in parts])
    batches = [(np.arange(len(labels))[part], Batch(labels=np.array(labels[part], int))) for part in parts]
    return measure(lambda _: next(given), NARROW.replace(num_classes=logits.shape[1]), batches)


def test_metrics_are_those_counted_by_hand():
    found = predictions(logits_for(CHOSEN, 3), TRUTH)
    assert (len(found.truth), found.accuracy) == (17, 11 / 17)
    scores = found.scores()
    assert scores["confusion"] == CONFUSION
    assert [one["support"] for one in scores["classes"]] == [7, 5, 5]
    middle = scores["classes"][1]
    assert {round(middle[name], 15) for name in ("precision", "recall", "f1")} == {0.6}
    assert abs(scores["macro_f1"] - 29 / 45) <= math.ulp(29 / 45)


def test_equal_logits_give_the_first_class_and_nan_gives_none():
    logits = np.array([[2.0, 2.0, 1.0], [np.nan, 9.0, 1.0], [-np.inf, -np.inf, -np.inf], [0.0, np.inf, 1.0]])
    assert predicted(logits).tolist() == [0, -1, 0, 1]
    assert predicted([[3.0], [-2.0], [0.0], [1e-30]]).tolist() == [1, 0, 0, 1]
    with np.errstate(invalid="ignore"):
        found = predictions(logits, [0, 1, 2, 1])
    scores = found.scores()
    assert (scores["undecided"], scores["confusion"]) == ([0, 1, 0], [[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    assert (found.accuracy, scores["classes"][1]["recall"]) == (0.5, 0.5)


def test_absent_classes_do_not_count_and_missed_ones_count_as_nothing():
    scores = predictions(logits_for([0, 0, 3], 5), [0, 1, 1]).scores()
    assert [one["f1"] for one in scores["classes"]] == [2 / 3, 0.0, None, 0.0, None]
    assert scores["macro_f1"] == (2 / 3) / 3
    nothing = predictions(np.zeros((0, 3)), [])
    assert (nothing.accuracy, nothing.loss, nothing.scores()["macro_f1"]) == (None, None, None)


def test_probabilities_are_those_of_the_loss():
    logits = np.array([[0.0, math.log(3.0)], [1e30, 0.0]])
    assert np.array_equal(probabilities(logits).round(15), [[0.25, 0.75], [1.0, 0.0]])
    one = probabilities([[math.log(3.0)], [-800.0]])
    assert np.array_equal(one.round(15), [[0.25, 0.75], [1.0, 0.0]])
    assert np.isnan(probabilities([[np.nan, 1.0]])).all()
