"""What scores say where scikit-learn is not asked: no number, equal logits, classes that nobody has."""

import math

import numpy as np

from concord.spec.batch import Batch
from concord.training.metrics import measure, predicted, probabilities
from tests.conftest import small_config


def measured(logits, labels):
    """Measure logits, in a batch of two and one of the rest."""
    parts = [part for part in (slice(2), slice(2, None)) if len(labels[part])]
    given = iter([logits[part] for part in parts])
    batches = [(np.arange(len(labels))[part], Batch(labels=np.array(labels[part]))) for part in parts]
    return measure(lambda _: next(given), small_config(num_classes=logits.shape[1]), batches)


def test_equal_logits_give_the_first_class_and_nan_gives_none():
    nan, inf = np.nan, np.inf
    logits = np.array([[2.0, 2.0, 1.0], [nan, 9.0, 1.0], [-inf, -inf, -inf], [0.0, inf, 1.0]])
    assert predicted(logits).tolist() == [0, -1, 0, 1]
    assert predicted([[3.0], [-2.0], [0.0], [1e-30]]).tolist() == [1, 0, 0, 1]
    found = measured(logits, [0, 1, 2, 1])
    scores = found.scores()
    assert (scores["undecided"], scores["confusion"]) == ([0, 1, 0], [[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    assert (found.accuracy, scores["classes"][1]["recall"]) == (0.5, 0.5)


def test_absent_classes_do_not_count_and_missed_ones_count_as_nothing():
    scores = measured(np.eye(5)[[0, 0, 3]], [0, 1, 1]).scores()
    assert [one["f1"] for one in scores["classes"]] == [2 / 3, 0.0, None, 0.0, None]
    assert scores["macro_f1"] == (2 / 3) / 3
    nothing = measured(np.zeros((0, 3)), [])
    assert (nothing.accuracy, nothing.loss, nothing.scores()["macro_f1"]) == (None, None, None)


def test_probabilities_are_those_of_the_loss():
    for logits in ([[0.0, math.log(3.0)], [1e30, 0.0]], [[math.log(3.0)], [-800.0]]):
        assert np.array_equal(probabilities(logits).round(15), [[0.25, 0.75], [1.0, 0.0]])
    assert np.isnan(probabilities([[np.nan, 1.0]])).all()
