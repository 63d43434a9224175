import numpy as np
import pytest

from concord.porting.difference import classify
from tests.toys.checkpoints import CONFIG, WEIGHTS

QUERY = "layers.0.attention.query.weight"
TOKEN = "embeddings.token.weight"
RIGHT = WEIGHTS[QUERY]


def with_number(value, array=RIGHT):
    copy = array.copy()
    copy[3, 5] = value
    return copy


def above(array):
    return np.nextafter(array, np.float32(9))


@pytest.mark.parametrize(
    ("name", "change", "words", "cause"),
    [
        (
            QUERY,
            lambda a: np.roll(a, 7, 1),
            "2 heads are in a different order, at positions 0, 1",
            "reordered",
        ),
        (
            QUERY,
            lambda a: a.reshape(14, 2, 7).swapaxes(1, 2).reshape(14, 14),
            "12 columns are in a different order",
            "(head_dim, heads)",
        ),
        (
            "classifier.weight",
            lambda a: a[:, [0, 2, 1]],
            "2 columns are in a different order",
            "the classes were",
        ),
        (
            TOKEN,
            lambda a: a[np.r_[0, 3, 2, 1, 4:29]],
            "2 rows are in a different order",
            "the vocabulary was",
        ),
        (
            TOKEN,
            lambda a: np.concatenate([a, a[:2]]),
            "B has 2 more rows; the other rows are the same",
            "padded",
        ),
        (TOKEN, lambda a: a * np.float32(np.sqrt(14)), "B is A times 3.7416", "the factor is sqrt(d_model)"),
        (
            TOKEN,
            lambda a: a / np.float32(np.sqrt(7)),
            "B is A times 0.3779",
            "the factor is 1 / sqrt(head_dim)",
        ),
        ("classifier.bias", lambda a: a * 3, "different: 3 of 3 values differ", ""),
        (QUERY, above, "the same except for the last digits", "recomputed"),
        (
            TOKEN,
            lambda a: a * np.float32(np.arange(29) > 0)[:, None],
            "1 row differs, at 0",
            "zeroed in B",
        ),
        (QUERY, lambda a: a[:, :3], "has shape (14, 14) in A and (14, 3) in B", ""),
        (QUERY, np.float64, "the same values in a different dtype", ""),
    ],
)
def test_a_mistake_has_a_name_and_a_cause(name, change, words, cause):
    other = np.ascontiguousarray(change(WEIGHTS[name]))
    difference = classify(WEIGHTS[name], other, name, CONFIG)
    assert difference.words.startswith(words)
    assert cause in difference.cause
    assert bool(difference.cause) == bool(cause)


# Zeros and non-finite numbers.

OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (0.5, np.nan, "1 of 196 values differ; of these 1 is not finite"),
        (np.nan, OTHER_NAN, "1 of 196 values differ; of these 1 is not finite"),
        (np.nan, -np.inf, "1 of 196 values differ; of these 1 is not finite"),
        (0.0, -0.0, "the same except for the last digits: 1 of 196 values differ"),
    ],
)
def test_what_is_not_finite_is_called_what_it_is(one, other, words):
    assert classify(with_number(one), with_number(other), "", CONFIG).words.endswith(words)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("count", [1, 3])
def test_numbers_that_are_not_finite_are_named_with_their_place_before_all_else(value, count):
    wrong = RIGHT.copy()
    wrong[3, 5 : 5 + count] = value
    for pair, which in (((RIGHT, wrong), "B"), ((wrong, RIGHT), "A")):
        difference = classify(*pair, TOKEN, CONFIG)
        assert difference.words.startswith(
            f"{which} is {value} at (3, 5), where the other is {RIGHT[3, 5]:g}"
        )
        assert ("more not finite" in difference.words) == (count > 1)
        assert (difference.kind, difference.cause) == ("not finite", "")


def test_a_number_out_of_the_range_of_a_dtype_is_said_to_be_that():
    large = with_number(1e5)
    with np.errstate(over="ignore"):
        narrow = large.astype(np.float16)
    assert classify(large, narrow, "", CONFIG).cause == "100000 is out of the range of float16"


def test_the_row_of_padding_was_zeroed_only_if_it_is_zeros():
    table, trained = WEIGHTS[TOKEN], WEIGHTS[TOKEN].copy()
    trained[CONFIG.pad_id] += 1
    assert classify(table, trained, TOKEN, CONFIG).cause == ""


def test_the_same_nan_is_no_difference_and_hides_none():
    array = with_number(np.nan)
    kinds = [classify(array, other, "", CONFIG).kind for other in (array, array.T, array.astype(np.float64))]
    assert kinds == ["same values", "transposed", "same values"]
    near = classify(array, above(array), "", CONFIG).words
    assert near.startswith("the same except for the last digits: 195 of 196 values differ, by")
    assert "of these" not in near
    assert near.endswith(" of A's)")


def test_the_end_of_a_large_tensor_is_looked_at_too(monkeypatch):
    monkeypatch.setattr("concord.porting.difference.WHOLE", 53)
    array = np.random.default_rng(3).standard_normal((97, 7))
    for changed in (np.nextafter(array, 9), array * 3):
        assert classify(array, changed, "", CONFIG).kind in ("rounding", "scaled")
        changed[31:] += np.random.default_rng(4).standard_normal((66, 7))
        assert classify(array, changed, "", CONFIG).kind == "different"
