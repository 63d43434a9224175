"""Recipes, schedules, dropout and windows, compared with numbers computed by hand."""

import math

import numpy as np
import pytest

from concord import spec
from concord.spec.training.dropout import kept, philox
from concord.spec.training.recipe import Recipe, recipe_from_mapping, rounded_hyperparameters
from concord.spec.training.reference_optimizer import batch_weights
from concord.spec.training.schedules import learning_rate

ADAM = Recipe(algorithm="adam", learning_rate=0.01)


# Recipes.


@pytest.mark.clause("OPT-1")
def test_recipe_lists_everything_that_is_wrong():
    wrong = {"learning_rate": -1, "clip_at": 2, "undecayed": ["norm"], "schedule": "cosine"}
    with pytest.raises(spec.ConfigError) as caught:
        recipe_from_mapping({"algorithm": "adam", **wrong})
    message = str(caught.value)
    assert len(caught.value.problems) == 4
    assert all(
        name in message
        for name in ("'learning_rate' is -1.0", "'clip_at' is 2.0", "norm", "'total_steps' is None")
    )


@pytest.mark.clause("OPT-11")
@pytest.mark.parametrize(
    ("fields", "dtype", "expected"),
    [
        ({"algorithm": "adam"}, "float16", {"epsilon": 0.0}),
        (
            {"algorithm": "adam", "epsilon": 1e-5, "beta1": 0.9999},
            "float16",
            {"beta1": 1.0, "epsilon": float(np.float16(1e-5))},
        ),
        ({"algorithm": "sgd", "weight_decay": 0.1, "decay_form": "coupled"}, "bfloat16", {}),
    ],
)
def test_numbers_that_a_precision_loses_are_listed(fields, dtype, expected):
    recipe = Recipe(**{"learning_rate": 0.01, **fields})
    assert [line.partition(": ")[0] for line in rounded_hyperparameters(recipe, dtype)] == [
        f"{name} is {getattr(recipe, name):g} but {rounded:.6g} in {dtype}"
        for name, rounded in expected.items()
    ]


# Dropout.


@pytest.mark.clause("DRP-3")
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(np.array([word], np.uint32) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == expected


def test_dropout_masks_keep_their_share_and_differ_in_all_that_they_are_keyed_by():
    shape, rate = (101, 103), 0.2
    first = kept(3, 5, 1, "head", shape, rate)
    assert abs(first.mean() - 0.8) < 5 * math.sqrt(0.2 * 0.8 / first.size)
    assert np.array_equal(first, kept(3, 5, 1, "head", shape, rate))
    for key in ((4, 5, 1, "head"), (3, 6, 1, "head"), (3, 5, 0, "head"), (3, 5, 1, "embeddings")):
        other = kept(*key, shape, rate)
        assert abs((first == other).mean() - 0.68) < 5 * math.sqrt(0.68 * 0.32 / first.size)


# Schedules.

LINEAR = {"schedule": "linear", "warmup_steps": 2}


@pytest.mark.clause("OPT-9")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({**LINEAR, "total_steps": 6, "final_share": 0.2}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            {**LINEAR, "total_steps": 10, "decay_start": "first_step", "first_step": 0},
            [0.0, 0.5, 0.8, 0.7, 0.6, 0.5],
        ),
        (
            {"schedule": "cosine", "total_steps": 4, "first_step": 0},
            [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0, 0.0],
        ),
        (
            {"schedule": "inverse_square_root", "warmup_steps": 2},
            [0.5, 1.0, math.sqrt(2 / 3), math.sqrt(1 / 2), math.sqrt(2 / 5), math.sqrt(1 / 3)],
        ),
    ],
)
def test_schedule_gives_the_share_of_each_step(fields, expected):
    actual = [
        learning_rate(Recipe(algorithm="sgd", learning_rate=2.0, **fields), step) / 2.0 for step in range(6)
    ]
    assert np.abs(np.subtract(actual, expected)).max() < 1e-15


# Windows.


@pytest.mark.clause("OPT-10")
@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("configured", [1 / 3, 1 / 3]),
        ("batches", [1 / 2, 1 / 2]),
        ("samples", [7 / 12, 5 / 12]),
        ("labels", [3 / 4, 1 / 4]),
    ],
)
def test_short_window_is_weighted_as_the_recipe_says(mean, expected):
    assert batch_weights(ADAM.replace(accumulation=3, accumulation_mean=mean), [(7, 3), (5, 1)]) == expected
