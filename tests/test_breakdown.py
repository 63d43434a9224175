import json

import numpy as np

from concord.conformance.judging.breakdown import GRID, LARGEST, MOST_ELEMENTS, SMALLEST, break_down
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.scoring import scores_of
from concord.conformance.run import record

AXES = ("batch", "heads", "query", "key")


def broken(tolerances):
    value = np.zeros(tolerances.shape)
    sigma = np.where(np.isnan(tolerances), np.nan, 0.125 / Z)
    actual = np.where(np.isinf(tolerances), np.nan, np.nan_to_num(tolerances) / 8)
    return break_down(actual, value, sigma, scores_of(actual, value, sigma), AXES[: value.ndim])


def levels_of(breakdown):
    return {grid.axes: [list(row) for row in grid.levels] for grid in breakdown.maps}


def test_each_error_is_in_its_maps_and_among_the_worst():
    errors = np.full((2, 1, 3, 5), 0.3)
    errors[1, 0, 2, 4], errors[0, 0, 1, 3], errors[:, 0, 0, 0] = -9.0, np.inf, np.nan
    breakdown = broken(errors)
    assert levels_of(breakdown) == {  # powers of two; an axis of length 1 has no map
        ("batch", "query"): [[-2, LARGEST, -2], [-2, -2, 3]],
        ("query", "key"): [[None, -2, -2, -2, -2], [-2, -2, -2, LARGEST, -2], [-2, -2, -2, -2, 3]],
    }
    assert [element.ratio for element in breakdown.worst] == [np.inf, 9.0, *[0.3] * (MOST_ELEMENTS - 2)]
    first, second, *_ = breakdown.worst
    assert (first.index, second.index) == ((0, 0, 1, 3), (1, 0, 2, 4))
    assert (second.expected, second.actual, second.tolerance) == (0.0, -9 / 8, 0.125)


def test_an_axis_alone_has_a_map_of_one_row():
    assert levels_of(broken(np.array([2.0**70, 0.0, 1.5]))) == {("", "batch"): [[LARGEST, SMALLEST, 0]]}


def test_a_breakdown_of_a_large_tensor_has_few_bytes_and_misses_no_element():
    errors = np.full((3, 4, 509, 521), 0.5)
    errors[2, 3, 401, 307] = 2.0**20
    breakdown = broken(errors)
    assert [(len(grid.levels), len(grid.levels[0])) for grid in breakdown.maps] == [(3, 4), (4, 48), GRID]
    assert all(20 in np.array(grid.levels) for grid in breakdown.maps)
    assert len(json.dumps(record.plain(breakdown))) < 12_000
