"""Inputs, positions and masks as tables: INP, POS, MSK-1, MSK-7, PRT."""

import dataclasses
import math

import numpy as np
import pytest

from concord import spec
from concord.spec.errors import BatchError
from concord.spec.masks import real_tokens, visible_keys
from concord.spec.positions import position_ids, sinusoid


def refused(config, part="model", **arrays):
    batch = dataclasses.replace(spec.example_batch(config, 7, 11, part=part), **arrays)
    with pytest.raises(BatchError) as caught:
        spec.validate_batch(config, batch, part)
    return str(caught.value)


@pytest.mark.clause("INP-1", "INP-3", "EMB-5")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", -1, "'input_ids' is -1 at (2, 3) but must lie in [0, 23) [clause=INP-1]"),
        ("input_ids", 23, "'input_ids' is 23 at (2, 3) but must lie in [0, 23) [clause=INP-1]"),
        ("segment_ids", 2, "'segment_ids' is 2 at (2, 3) but must lie in [0, 2) [clause=EMB-5]"),
    ],
)
def test_ids_out_of_range_are_refused(small, name, value, message):
    ids = np.ones((7, 11), np.int64)
    ids[2, 3] = value
    assert refused(small(), **{name: ids}) == message


@pytest.mark.clause("INP-3")
def test_labels_out_of_range_are_refused(small):
    assert "'labels' is 3 at (1,) but must lie in [0, 3)" in refused(
        small(), labels=np.array([0, 3, 0, 0, 0, 0, 0])
    )
    assert "'labels' is 2 at (0,) but must lie in [0, 2)" in refused(
        small(num_classes=1), labels=np.array([2, 0, 0, 0, 0, 0, 0])
    )


@pytest.mark.clause("INP-1")
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((7, 11)), "'input_ids' has dtype float64 but must be an integer type"),
        (
            np.ones((7, 11, 1), int),
            "'input_ids' has rank 3, shape (7, 11, 1), but must have axes (batch, tokens)",
        ),
        (np.ones((7, 0), int), "no axis may be empty"),
    ],
)
def test_ids_of_wrong_kind_are_refused(small, array, message):
    assert message in refused(small(), input_ids=array)


@pytest.mark.clause("INP-1", "PRT-1")
def test_batch_problems_are_all_listed(small):
    message = refused(small(), segment_ids=np.ones((7, 5), int), labels=None, cotangent=np.ones(3))
    assert len(message.splitlines()) == 3
    assert "'labels' is missing" in message
    assert "'cotangent' is unexpected" in message
    assert "'segment_ids' has shape (7, 5) but must be (7, 11)" in message


@pytest.mark.clause("INP-2")
def test_batch_wider_than_the_position_table_is_refused(small):
    with pytest.raises(BatchError, match="14 tokens but at most 13 fit"):
        spec.example_batch(small(), 7, 14)
    with pytest.raises(BatchError, match="13 tokens but at most 12 fit"):
        spec.example_batch(small("keras-attention"), 7, 13)


@pytest.mark.clause("INP-4")
def test_given_tensors_must_be_finite(small):
    message = refused(small(), part="stack", embeddings=np.full((7, 11, 10), np.inf))
    assert "'embeddings' is inf at (0, 0, 0) but must be finite" in message


@pytest.mark.clause("INP-5")
def test_flatten_head_takes_exactly_its_tokens(small):
    with pytest.raises(BatchError, match="has 5 tokens but must have 11"):
        spec.example_batch(small("tf1-text-classifier"), 7, 5)


@pytest.mark.clause("INP-6", "MSK-1")
def test_example_batch_has_every_awkward_row(variant_config):
    batch = spec.example_batch(variant_config, 7, 11)
    real = real_tokens(variant_config, batch.input_ids)
    assert [int(row.sum()) for row in real[:4]] == [11, 1, 6, 0]
    assert (np.diff(real[4].astype(int)) > 0).any(), "padding inside the text"


def test_example_batch_is_the_same_for_the_same_seed(small):
    first, second, other = (spec.example_batch(small(), 7, 11, seed=seed) for seed in (3, 3, 4))
    assert (first.input_ids == second.input_ids).all()
    assert (first.input_ids != other.input_ids).any()


@pytest.mark.clause("PRT-1")
@pytest.mark.parametrize("part", spec.PARTS)
def test_parts_take_exactly_their_inputs_and_parameters(variant_config, part):
    batch = spec.example_batch(variant_config, 7, 11, part=part)
    truth = spec.reference(
        variant_config, spec.initialize(variant_config, part=part), batch, gradients=True, part=part
    )
    assert list(truth.taps) == list(spec.taps(variant_config, part, batch.arrays()))
    assert sorted(truth.gradients) == sorted(spec.trainable(variant_config, part))
    assert truth.output is truth.taps[spec.output_name(variant_config, part)]


@pytest.mark.clause("PRT-1")
def test_taps_have_the_shapes_that_the_table_states(variant_config):
    batch = spec.example_batch(variant_config, 7, 11)
    sizes = spec.tensors.axis_sizes(variant_config, batch=7, tokens=11)
    for name, array in spec.reference(variant_config, spec.initialize(variant_config), batch).taps.items():
        assert array.shape == spec.tensors.resolve(spec.taps(variant_config)[name].shape, sizes), name


@pytest.mark.clause("POS-2", "POS-3", "POS-4")
def test_sinusoid_follows_the_formula(small):
    pair = sinusoid(small())
    column = sinusoid(small("tf1-text-classifier"))
    halves = sinusoid(small(position_layout="halves"))
    for p in (0, 1, 7):
        for j in range(10):
            wave = math.sin if j % 2 == 0 else math.cos
            assert pair[p, j] == pytest.approx(wave(p / 10000 ** (2 * (j // 2) / 10)), abs=1e-15)
            assert column[p, j] == pytest.approx(wave(p / 10000 ** (j / 10)), abs=1e-15)
            assert halves[p, j // 2 + 5 * (j % 2)] == pair[p, j]


@pytest.mark.clause("POS-4")
def test_sinusoid_base_is_an_option(small):
    assert sinusoid(small(position_base=100.0))[3, 2] == pytest.approx(math.sin(3 / 100 ** (2 / 10)))


@pytest.mark.clause("POS-5", "POS-6")
def test_position_ids_count_from_the_start_and_over_padding(small):
    real = np.array([[True, False, True, True], [True, True, False, False]])
    assert position_ids(small(), real).tolist() == [[0, 1, 2, 3]] * 2
    assert position_ids(small(position_start=1), real).tolist() == [[1, 2, 3, 4]] * 2
    assert position_ids(small("keras-attention"), real).tolist() == [[1, 0, 3, 4], [1, 2, 0, 0]]
    assert (sinusoid(small("keras-attention"))[0] == 0).all()


@pytest.mark.clause("POS-6")
def test_position_ids_count_real_tokens_from_the_id_of_padding(small):
    real = np.array([[True, False, True, True], [False, True, True, False], [False] * 4])
    assert position_ids(small("roberta"), real).tolist() == [[2, 1, 3, 4], [1, 2, 3, 1], [1] * 4]
    assert position_ids(small("roberta", pad_id=5, position_start=6), real).tolist() == [
        [6, 5, 7, 8],
        [5, 6, 7, 5],
        [5] * 4,
    ]


@pytest.mark.clause("MSK-7")
def test_batch_major_gives_slots_the_wrong_sample(small):
    config = small("keras-attention", num_heads=5, d_model=10)
    mask = np.random.default_rng(0).random((3, 11)) > 0.5
    visible = visible_keys(config, mask, 5)
    assert visible.shape == (3, 5, 1, 11)
    for sample in range(3):
        for head in range(5):
            assert (visible[sample, head, 0] == mask[(head * 3 + sample) // 5]).all()
    right = visible_keys(config.replace(mask_assignment="per_sample"), mask, 5)
    assert (right[:, 0, 0] == mask).all()


@pytest.mark.clause("MSK-4")
def test_three_dimensional_masks_are_per_query(small):
    mask = np.random.default_rng(0).random((3, 5, 11)) > 0.5
    assert (visible_keys(small(), mask, 2)[:, 0] == mask).all()
