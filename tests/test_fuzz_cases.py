"""Random cases: what is drawn."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from concord import spec
from concord.conformance.fuzz.cases import KEY_MASKS, PADDINGS, FuzzCase
from concord.conformance.fuzz.plan import MASK_VALUES, Plan, sample
from concord.spec.batch import validate_batch
from concord.spec.config import CHOICES
from concord.spec.files import typed
from concord.spec.parameters import validate_weights


@functools.cache
def drawn_cases():
    return tuple(sample(Plan(names=(), dtypes=tuple(spec.PRECISIONS)), range(300)))


def test_every_case_is_one_that_the_specification_takes():
    drawn = drawn_cases()
    for case in drawn:
        config, weights, batch = case.build()
        validate_weights(config, weights, case.part)
        validate_batch(config, batch, case.part)
        for array in [*weights.values(), *batch.arrays().values()]:
            assert array.dtype.kind != "f" or (array == array.astype(np.float32)).all()
    assert len(set(drawn)) == len(drawn)


def test_the_whole_option_space_is_drawn():
    drawn = drawn_cases()
    configs = [case.config for case in drawn]
    for name, values in CHOICES.items():
        assert set(values) <= {getattr(config, name) for config in configs}, name
    for name in spec.FIELDS:
        assert len({getattr(config, name) for config in configs}) > 1, name
    assert {config.num_layers for config in configs} == {1, 2, 3}
    assert set(MASK_VALUES) < {config.mask_value for config in configs}
    epsilons = sorted(config.norm_epsilon for config in configs)
    assert epsilons[0] < 1e-11 < 1e-4 < epsilons[-1]
    for name, known in (
        ("part", spec.PARTS),
        ("profile", spec.PROFILES),
        ("padding", PADDINGS),
        ("key_mask", KEY_MASKS),
        ("dtype", spec.PRECISIONS),
    ):
        assert {getattr(case, name) for case in drawn} == set(known), name
    attending = [case for case in drawn if case.part == "attention"]
    assert {case.queries > case.tokens for case in attending} == {True, False}
    scales = {case.scale for case in drawn}
    assert (min(scales), max(scales), max(case.offset for case in drawn)) == (0.25, 3, 512)


PLAIN = {
    "pad_id": 3,
    "num_segments": 0,
    "segment_padding_row": None,
    "token_padding_row": None,
    "token_padding_forward": "stored",
    "position_padding_row": None,
    "position_of_padding": "counted",
    "position_start": 0,
}
"""Fields that let a text of any length and vocabulary in."""


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_is_what_it_is_called(padding):
    usual = sample(Plan(names=(), parts=("encoder",)), [0])[0]
    config = usual.config.replace(vocab_size=19, max_positions=40, **PLAIN)
    case = dataclasses.replace(usual, config=config, batch=512, tokens=9, padding=padding)
    real = case.build()[2].required("input_ids") != 3
    assert {row.all() for row in real} == {"none": {True}, "all": {False}}.get(padding, {True, False})
    assert {row.any() for row in real} >= {"rows": {True, False}, "all": {False}}.get(padding, {True})
    gaps = [np.flatnonzero(row) for row in real]
    inside = [g for g in gaps if len(g) and g[-1] - g[0] >= len(g)]
    assert bool(inside) == (padding == "inside")
    assert any(len(g) and g[0] > 0 for g in gaps) == (padding in ("front", "inside", "left"))
    if padding == "left":
        assert sum(not row[0] for row in real) == 1


def test_a_case_follows_from_seed_and_number_alone():
    plan = Plan(names=(), seed=4)
    several = sample(plan, range(6))
    assert sample(plan, [5, 2]) == [several[5], several[2]]
    assert sample(dataclasses.replace(plan, chunk=3, cases=7, names=("x",)), [5]) == [several[5]]
    assert sample(dataclasses.replace(plan, seed=5), [5]) != [several[5]]
    first, again = (case.build() for case in (several[3], typed(FuzzCase, json.dumps(several[3].as_dict()))))
    for name, array in first[1].items():
        np.testing.assert_array_equal(array, again[1][name])
    for name, array in first[2].arrays().items():
        np.testing.assert_array_equal(array, again[2].arrays()[name])


def test_a_large_table_is_used_to_its_end_and_often():
    usual = sample(Plan(names=(), parts=("encoder",)), [0])[0]
    config = usual.config.replace(vocab_size=70_001, max_positions=300, **PLAIN)
    ids = (
        dataclasses.replace(usual, config=config, batch=2, tokens=290, padding="none")
        .build()[2]
        .required("input_ids")
    )
    assert {255, 256, 257, 65_535, 65_536, 65_537, 70_000} <= set(ids.ravel().tolist())
    assert np.unique(ids, return_counts=True)[1].max() > 9
