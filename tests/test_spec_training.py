"""Recipes, schedules, dropout, optimizers and trajectories, each against a formula of its own."""

import math

import numpy as np
import pytest

from concord import spec
from concord.spec.arithmetic import Arithmetic
from concord.spec.training.dropout import kept, philox
from concord.spec.training.recipe import Recipe, recipe_from_mapping, rounded_hyperparameters
from concord.spec.training.reference_optimizer import ReferenceOptimizer, batch_weights, clipped, moments
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Training, Trajectory

ADAM = Recipe(algorithm="adam", learning_rate=0.01)


# Recipes.


@pytest.mark.clause("OPT-1")
def test_recipe_lists_everything_that_is_wrong():
    wrong = {"learning_rate": -1, "clip_at": 2, "undecayed": ["norm"], "schedule": "cosine"}
    with pytest.raises(spec.ConfigError) as caught:
        recipe_from_mapping({"algorithm": "adam", **wrong})
    said = str(caught.value)
    assert len(caught.value.problems) == 4
    assert all(
        name in said
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
        (
            {"algorithm": "rmsprop", "epsilon_placement": "inside", "beta1": 0.999, "beta2": 0.9},
            "bfloat16",
            {},
        ),
        (
            {"algorithm": "sgd", "weight_decay": 0.1, "decay_form": "times_rate"},
            "bfloat16",
            {"weight_decay": 0.10009765625},
        ),
        ({"algorithm": "sgd", "weight_decay": 0.1, "decay_form": "coupled"}, "bfloat16", {}),
    ],
)
def test_numbers_that_a_precision_loses_are_listed(fields, dtype, expected):
    asked = Recipe(**{"learning_rate": 0.01, **fields})
    assert [line.partition(": ")[0] for line in rounded_hyperparameters(asked, dtype)] == [
        f"{name} is {getattr(asked, name):g} but {rounded:.6g} in {dtype}"
        for name, rounded in expected.items()
    ]


# Dropout.


def words(*values):
    return tuple(np.array([value], np.uint32) for value in values)


@pytest.mark.clause("DRP-3")
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    assert tuple(int(word[0]) for word in philox(words(*counter), key)) == expected


def test_dropout_masks_differ_in_everything_that_they_are_keyed_by():
    shape, rate = (101, 103), 0.2
    first = kept(3, 5, 1, "head", shape, rate)
    keys = ((4, 5, 1, "head"), (3, 6, 1, "head"), (3, 5, 0, "head"), (3, 5, 1, "embeddings"))
    others = [kept(*key, shape, rate) for key in keys]
    deviation = math.sqrt(0.2 * 0.8 / first.size)
    assert abs(first.mean() - 0.8) < 5 * deviation
    agree = 0.8**2 + 0.2**2
    assert all(
        abs((first == other).mean() - agree) < 5 * math.sqrt(agree * (1 - agree) / first.size)
        for other in others
    )
    assert np.array_equal(first, kept(3, 5, 1, "head", shape, rate))


# Schedules.

LINEAR = {"schedule": "linear", "warmup_steps": 2}


@pytest.mark.clause("OPT-9")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({**LINEAR, "total_steps": 6}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (
            {**LINEAR, "total_steps": 6, "final_share": 0.2},
            [0.5, 1.0, 0.8, 0.6, 0.4, 0.2],
        ),
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
    found = [
        learning_rate(Recipe(algorithm="sgd", learning_rate=2.0, **fields), step) / 2.0 for step in range(6)
    ]
    assert np.abs(np.subtract(found, expected)).max() < 1e-15


# Optimizers.

BETAS = {"algorithm": "adam", "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-2}
RMSPROP = {"algorithm": "rmsprop", "beta2": 0.95, "epsilon": 1e-2}
SGD = {"algorithm": "sgd", "momentum": 0.9}
RECIPES = {
    "sgd": {"algorithm": "sgd"},
    "momentum": {**SGD, "dampening": 0.3},
    "displacement": {**SGD, "momentum_form": "displacement", "nesterov": True},
    "nesterov": {**SGD, "nesterov": True},
    "adam": BETAS,
    "adam_uncorrected": {**BETAS, "epsilon_placement": "uncorrected"},
    "adam_without_correction": {
        **BETAS,
        "bias_correction": False,
        "weight_decay": 0.1,
        "decay_form": "times_rate",
    },
    "adam_coupled": {**BETAS, "weight_decay": 0.1, "decay_form": "coupled"},
    "adam_alone": {**BETAS, "weight_decay": 0.1, "decay_form": "alone"},
    "amsgrad": {**BETAS, "amsgrad": True},
    "rmsprop": {**RMSPROP, "epsilon_placement": "inside", "centered": True, "momentum": 0.9},
    "rmsprop_outside": {**RMSPROP, "epsilon_placement": "uncorrected"},
}


def stepped(r, kept, p, g, rate, t):
    """Return parameters after step ``t``, by textbook formulas."""

    def moved(name, old, new, value):
        found = old * kept.get(name, 0.0) + new * value
        kept[name] = found
        return found

    forms = {"times_rate": rate * r.weight_decay, "alone": r.weight_decay}
    left = p - forms.get(r.decay_form, 0.0) * p
    if r.decay_form == "coupled":
        g = g + r.weight_decay * p
    if r.algorithm == "adam":
        m, v = moved("m", r.beta1, 1 - r.beta1, g), moved("v", r.beta2, 1 - r.beta2, g**2)
        one, two = (1 - r.beta1**t, 1 - r.beta2**t) if r.bias_correction else (1.0, 1.0)
        if r.amsgrad:
            v = kept["largest"] = np.maximum(kept.get("largest", 0.0), v)
        if r.epsilon_placement == "uncorrected":
            return left - rate * math.sqrt(two) / one * m / (np.sqrt(v) + r.epsilon)
        return left - rate * (m / one) / (np.sqrt(v / two) + r.epsilon)
    if r.algorithm == "rmsprop":
        v = moved("v", r.beta2, 1 - r.beta2, g**2)
        if r.centered:
            v = v - moved("m", r.beta2, 1 - r.beta2, g) ** 2
        inside = r.epsilon_placement == "inside"
        g = g / np.sqrt(v + r.epsilon) if inside else g / (np.sqrt(v) + r.epsilon)
    if r.momentum_form == "displacement":
        d = moved("d", r.momentum, rate, g)
        return left - (r.momentum * d + rate * g if r.nesterov else d)
    velocity = moved("b", r.momentum, 1 - r.dampening if t > 1 else 1.0, g)
    return left - rate * (g + r.momentum * velocity if r.nesterov else velocity)


@pytest.mark.clause("OPT-2", "OPT-3", "OPT-4", "OPT-5", "OPT-6")
@pytest.mark.parametrize("name", RECIPES)
def test_optimizer_computes_its_formula(name):
    described, generator = Recipe(learning_rate=1.0, **RECIPES[name]), np.random.default_rng(7)
    arithmetic, state = Arithmetic(), {}
    arithmetic.recording = False
    optimizer = ReferenceOptimizer(arithmetic, described, {"w": "kernel"})
    expected = generator.normal(size=(3, 5))
    node = arithmetic.leaf(expected)
    for step in range(1, 6):
        gradient, rate = generator.normal(size=(3, 5)) * 10.0 ** generator.integers(-3, 1, (3, 5)), 0.1 / step
        expected = stepped(described, state, expected, gradient, rate, step)
        node = optimizer.update({"w": node}, {"w": arithmetic.leaf(gradient)}, rate)["w"]
    assert np.abs(node.value - expected).max() < 1e-14
    assert {key.partition(".")[0] for key in optimizer.state} == set(moments(described))


def updated(fields, kind="kernel", rows=None):
    """Return a table (5, 3) before and after two steps, the second with gradients of rows 1 and 3 alone."""
    arithmetic = Arithmetic()
    arithmetic.recording = False
    optimizer = ReferenceOptimizer(arithmetic, ADAM.replace(**fields), {"w": kind})
    generator = np.random.default_rng(11)
    before = generator.normal(size=(5, 3))
    gradients = [
        generator.normal(size=(5, 3)),
        np.where(np.isin(np.arange(5), [1, 3])[:, None], generator.normal(size=(5, 3)), 0.0),
    ]
    first = optimizer.update({"w": arithmetic.leaf(before)}, {"w": arithmetic.leaf(gradients[0])}, 0.01)["w"]
    second = optimizer.update(
        {"w": first},
        {"w": arithmetic.leaf(gradients[1])},
        0.01,
        None if rows is None else {"w": np.array(rows)},
    )["w"]
    return first.value, second.value


@pytest.mark.clause("OPT-8")
def test_lazy_updates_leave_rows_alone_that_nothing_looked_up():
    first, second = updated({"embedding_updates": "lazy"}, rows=[1, 3])
    assert np.array_equal(first[[0, 2, 4]], second[[0, 2, 4]])
    dense = updated({}, rows=[1, 3])[1]
    assert np.array_equal(second[[1, 3]], dense[[1, 3]])
    assert (dense[[0, 2, 4]] != first[[0, 2, 4]]).all()


@pytest.mark.clause("OPT-6")
def test_decay_leaves_out_kinds_of_parameters():
    fields = {"weight_decay": 0.1, "decay_form": "times_rate", "undecayed": ("gamma",)}
    assert np.array_equal(updated(fields, "gamma")[1], updated({}, "gamma")[1])
    assert not np.array_equal(updated(fields, "kernel")[1], updated({}, "kernel")[1])


# Clipping and accumulation.


def clip(**fields):
    arithmetic = Arithmetic()
    arithmetic.recording = False
    given = {"a": np.array([3.0, 4.0]), "b": np.array([[12.0]])}
    found, norm = clipped(
        arithmetic,
        ADAM.replace(**fields),
        {name: arithmetic.leaf(x) for name, x in given.items()},
        kinds={"a": "bias", "b": "kernel"},
    )
    return {name: node.value for name, node in found.items()}, None if norm is None else float(norm.value)


@pytest.mark.clause("OPT-7")
@pytest.mark.parametrize(
    ("fields", "a", "b", "norm"),
    [
        ({"clipping": "global_norm", "clip_at": 6.5}, [1.5, 2.0], 6.0, 13.0),
        ({"clipping": "global_norm", "clip_at": 13.5}, [3.0, 4.0], 12.0, 13.0),
        ({"clipping": "global_norm", "clip_at": 7.0, "clip_epsilon": 1.0}, [1.5, 2.0], 6.0, 13.0),
        ({"clipping": "tensor_norm", "clip_at": 6.0}, [3.0, 4.0], 6.0, None),
        ({"clipping": "group_norm", "clip_at": 2.5, "undecayed": ("bias",)}, [1.5, 2.0], 2.5, None),
        ({"clipping": "value", "clip_at": 3.5}, [3.0, 3.5], 3.5, None),
    ],
)
def test_clipping_bounds_what_it_says(fields, a, b, norm):
    found, actual = clip(**fields)
    assert np.abs(found["a"] - a).max() < 1e-15
    assert abs(found["b"][0, 0] - b) < 1e-15
    assert actual == norm


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


# Trajectories.


def test_accumulation_by_samples_is_one_large_batch():
    sizes = {"d_model": 6, "num_heads": 2, "d_ff": 5, "vocab_size": 13, "max_positions": 7, "num_classes": 3}
    config = spec.variant("nndl-paddle", num_layers=1, **sizes)
    recipe = ADAM.replace(accumulation=2, accumulation_mean="samples", clipping="global_norm", clip_at=0.5)
    batches = [
        spec.example_batch(config, batch=4, tokens=5, seed=number, padding="ragged") for number in range(3)
    ]

    def halves(batch):
        parts = (slice(0, 3), slice(3, 4))
        given = batch.arrays().items()
        return [spec.from_arrays({name: array[part] for name, array in given}) for part in parts]

    def clipped_in(recipe, steps):
        asked, found = Training(recipe, steps, 0, reported=(2,)), {}
        Trajectory(config, spec.initialize(config, seed=2), asked, Arithmetic()).run(found.__setitem__)
        return {name: array for name, array in found.items() if name.startswith("steps.2.clipped.")}

    whole = clipped_in(recipe.replace(accumulation=1), [[batch] for batch in batches])
    parted = clipped_in(recipe, [halves(batch) for batch in batches])
    assert len(whole) > 10
    assert max(np.abs(array - parted[name]).max() for name, array in whole.items()) < 1e-14
