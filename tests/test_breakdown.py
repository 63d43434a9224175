"""Where in a tensor its error lies: over its axes and at its worst elements, in few bytes."""

import json
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.conformance.judging.breakdown import GRID, LARGEST, MOST_ELEMENTS, SMALLEST, break_down
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.scoring import scores_of
from concord.conformance.run import record

AXES = ("batch", "heads", "query", "key")


def broken(tolerances):
    """Return the breakdown of a tensor that errs by so many tolerances of 1/8 each; NaN is not judged."""
    value = np.zeros(tolerances.shape)
    sigma = np.where(np.isnan(tolerances), np.nan, 0.125 / Z)
    actual = np.where(np.isinf(tolerances), np.nan, np.nan_to_num(tolerances) / 8)
    return break_down(actual, value, sigma, scores_of(actual, value, sigma), AXES[: value.ndim])


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
ERRORS = (0.0, 0.26, 0.3, 1.5, 5.0, 2.0**59, 2.0**70, -9.0, np.inf, np.nan)


def power(errors):
    """Return the power of two that the largest of some errors reaches; None where none was judged."""
    found = [abs(error) for error in errors.ravel() if not np.isnan(error)]
    return int(np.floor(np.log2(np.clip(max(found), 2.0**SMALLEST, 2.0**LARGEST)))) if found else None


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SIZES, st.integers(0, 999))
def test_each_error_is_in_its_maps_and_among_the_worst(sizes, seed):
    errors = np.random.default_rng(seed).choice(ERRORS, sizes)
    found = broken(errors)
    long = [axis for axis, size in enumerate(sizes) if size > 1]
    pairs = list(pairwise(long)) or [(long[0],)] if long else []
    assert [one.axes for one in found.maps] == [
        ("" if len(pair) == 1 else AXES[pair[0]], AXES[pair[-1]]) for pair in pairs
    ]
    for pair, shown in zip(pairs, found.maps, strict=True):
        moved = np.moveaxis(errors, pair, range(len(pair)))
        cells = [power(moved[place]) for place in np.ndindex(moved.shape[: len(pair)])]
        assert [level for row in shown.levels for level in row] == cells
    judged = errors[~np.isnan(errors)]
    expected = sorted(abs(judged[judged != 0]), reverse=True)[:MOST_ELEMENTS]
    assert [one.ratio for one in found.worst] == expected
    for one in found.worst:
        assert (abs(errors[one.index]), one.expected, one.tolerance) == (one.ratio, 0.0, 0.125)


def test_a_breakdown_of_a_large_tensor_has_few_bytes_and_misses_no_element():
    errors = np.full((3, 4, 509, 521), 0.5)
    errors[2, 3, 401, 307] = 2.0**20
    found = broken(errors)
    assert [(len(one.levels), len(one.levels[0])) for one in found.maps] == [(3, 4), (4, 48), GRID]
    assert all(20 in np.array(one.levels) for one in found.maps)
    assert len(json.dumps(record.plain(found))) < 12_000
