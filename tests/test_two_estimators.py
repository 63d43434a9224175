import runpy

import pytest

from tests.toys.surroundings import ROOT

PROGRAM = runpy.run_path(str(ROOT / "docs/two_estimators.py"))


@pytest.mark.parametrize("variant", PROGRAM["VARIANTS"][:2])
def test_two_estimators_of_sigma_agree_within_the_stated_bounds(variant):
    median, each = PROGRAM["figures"](PROGRAM["ratios"](variant))
    (low, high), (least, most) = PROGRAM["MEDIANS"], PROGRAM["EACH"]
    assert low < median < high
    assert least < each[0] <= each[-1] < most
