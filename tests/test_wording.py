import math

import numpy as np
import pytest

from concord.conformance.wording import distinct, instead_of, multiple

RANDOM = np.random.default_rng(7)
NUMBERS = [float(x) for x in RANDOM.standard_normal(53) * 10.0 ** RANDOM.integers(-30, 31, 53)]


@pytest.mark.parametrize("units", [1, 1000])
def test_numbers_that_differ_look_different(units):
    for number in NUMBERS:
        other = number + units * math.ulp(number)
        actual, expected = instead_of(other, number).split(" instead of ")
        assert actual != expected
        assert max(abs(float(actual) / other - 1), abs(float(expected) / number - 1)) < 1e-5


def test_no_more_digits_are_said_than_tell_numbers_apart():
    assert instead_of(1e-5, 1e-12) == "1e-05 instead of 1e-12"
    assert instead_of(float(np.float32(0.1)), 0.1) == "0.100000001 instead of 0.1"
    assert distinct(0.12345671, 0.12345672, 3.0) == ("0.12345671", "0.12345672", "3")


@pytest.mark.parametrize("whole", [0.0, 1.0, -1.0])
def test_a_factor_that_changes_something_is_told_from_one_that_does_not(whole):
    for exponent in range(-50, 1):
        factor = whole + 2.0**exponent
        assert float(multiple(factor)) != whole or factor == whole
    assert multiple(whole) == f"{whole:g}"
