"""Where in a tensor its error lies: over its axes, over its sizes, at its worst elements.

And in few bytes.
"""

import json

import numpy as np
import pytest

from concord.backends.interface import Run
from concord.conformance import record
from concord.conformance.estimate import Z
from concord.conformance.expectation import JudgedProblem
from concord.conformance.explain.breakdown import (
    GRID,
    LARGEST,
    MOST_ELEMENTS,
    SMALLEST,
    axes_of,
    break_down,
)
from concord.conformance.scoring import scores_of
from concord.spec.cases import build_case
from concord.spec.reference import reference
from tests.toys.rounded import verdict_of

AXES = ("batch", "heads", "query", "key")
SHAPE = (2, 3, 5, 7)


def broken(tolerances, axes=AXES, **more):
    """Return the breakdown of a tensor that errs by so many tolerances of 1/8 each."""
    value, sigma = np.zeros(tolerances.shape), np.full(tolerances.shape, 0.125 / Z)
    actual = tolerances / 8
    return break_down(actual, value, sigma, scores_of(actual, value, sigma), axes, **more)


def test_heat_maps_show_the_largest_error_over_neighbouring_axes():
    errors = np.full(SHAPE, 0.3)
    errors[1, 2, :, 4] = 9.0
    errors[0, 0, 3, 3] = 2.0
    found = broken(errors)
    assert [(one.axes, one.shape) for one in found.maps] == [
        (("batch", "heads"), (2, 3)),
        (("heads", "query"), (3, 5)),
        (("query", "key"), (5, 7)),
    ]
    assert found.maps[0].levels == ((1, -2, -2), (-2, -2, 3))
    assert found.maps[1].levels == ((-2, -2, -2, 1, -2), (-2,) * 5, (3,) * 5)
    assert [row[4] for row in found.maps[2].levels] == [3] * 5
    assert found.maps[2].levels[3][3] == 1


def test_axes_of_one_entry_are_left_out_and_one_axis_alone_is_a_row():
    errors = np.array([0.5, 4.0, 1.0])
    assert [
        (one.axes, one.levels) for one in broken(errors.reshape(1, 3, 1), ("batch", "tokens", "d_model")).maps
    ] == [(("", "tokens"), ((-1, 2, 0),))]
    assert broken(np.array(3.0), ()).maps == ()


def test_the_histogram_counts_elements_by_powers_of_two_of_a_tolerance():
    found = broken(np.array([0.26, 0.3, 1.5, 5.0, 7.9, 0.0, 2.0**60]), ("d_model",))
    assert found.lowest == SMALLEST
    counts = dict(zip(range(found.lowest, found.lowest + len(found.histogram)), found.histogram, strict=True))
    assert {power: count for power, count in counts.items() if count} == {
        SMALLEST: 1,
        -2: 2,
        0: 1,
        2: 2,
        LARGEST: 1,
    }
    assert broken(np.array([5.0, 9.0]), ("d_model",)).lowest == 2


def test_the_worst_elements_come_first_with_their_values():
    errors = np.zeros(SHAPE)
    errors[1, 2, 4, 6], errors[0, 1, 3, 5] = 64.0, -128.0
    found = broken(errors)
    assert [(one.index, one.actual, one.expected, one.tolerance, one.ratio) for one in found.worst] == [
        ((0, 1, 3, 5), -16.0, 0.0, 0.125, 128.0),
        ((1, 2, 4, 6), 8.0, 0.0, 0.125, 64.0),
    ]
    assert len(broken(np.full(SHAPE, 2.0)).worst) == MOST_ELEMENTS


def test_what_is_not_finite_is_largest_and_what_is_undetermined_is_nothing():
    value, sigma = np.zeros((2, 3)), np.full((2, 3), 0.5 / Z)
    actual = np.full((2, 3), 0.1)
    actual[0, 1], sigma[1, 2] = np.nan, np.nan
    found = break_down(actual, value, sigma, scores_of(actual, value, sigma), ("batch", "classes"))
    assert found.maps[0].levels == ((-3, LARGEST, -3), (-3, -3, None))
    assert sum(found.histogram) == 5
    assert (found.worst[0].index, found.worst[0].ratio) == ((0, 1), np.inf)


def test_a_breakdown_of_a_large_tensor_has_few_bytes_and_misses_no_element():
    errors = np.full((3, 4, 509, 521), 0.5)
    errors[2, 3, 401, 307] = 2.0**20
    found = broken(errors)
    assert [(len(one.levels), len(one.levels[0])) for one in found.maps] == [(3, 4), (4, 48), GRID]
    assert all(20 in np.array(one.levels) for one in found.maps)
    assert len(json.dumps(record.plain(found))) < 12_000


def test_axes_are_those_of_the_specification():
    case = build_case("bert", "ragged")
    problem = JudgedProblem(case.config, case.weights, case.batch)
    named = {
        "layers.0.attention.scores": ("batch", "heads", "query", "key"),
        "gradients.taps.layers.0.attention.query": ("batch", "tokens", "heads", "head_dim"),
        "gradients.layers.0.feed_forward.inner.weight": ("d_model", "d_ff"),
        "gradients.layers.0.attention.query.weight": ("d_model in", "d_model out"),
        "gradients.embeddings.token.weight": ("vocab", "d_model"),
        "loss": (),
    }
    assert {name: axes_of(problem, name, len(axes)) for name, axes in named.items()} == named
    assert axes_of(problem, "a sum of others", 2) == ("axis 0", "axis 1")


@pytest.mark.parametrize("taps", [True, False])
def test_the_judgement_that_decides_says_where_and_no_other(taps):
    case = build_case("bert", "ragged")
    truth = reference(case.config, case.weights, case.batch, False, case.part, "float64")
    wrong = {name: array.copy() for name, array in truth.taps.items()}
    wrong["logits"][1, 0] += 1.0
    run = Run(
        wrong["logits"],
        truth.loss,
        wrong if taps else {},
        {},
        "toy",
        "float64",
        requested=("taps",) if taps else (),
    )
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.axes, row.deciding.breakdown.worst[0].index) == (
        "logits",
        ("batch", "classes"),
        (1, 0),
    )
    assert (row.local is not None) == taps
    assert not (taps and row.end_to_end.breakdown)
    beyond = [
        [level is not None and level >= 0 for level in levels]
        for levels in row.deciding.breakdown.maps[0].levels
    ]
    assert np.array(beyond).nonzero()[0].tolist() == [1]
