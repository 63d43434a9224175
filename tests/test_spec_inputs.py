"""Inputs, positions and masks as tables: INP, POS, MSK-1, MSK-7, PRT."""

import dataclasses
import math

import numpy as np
import pytest

from concord import spec
from concord.spec.errors import BatchError
from concord.spec.masks import real_tokens
from concord.spec.positions import sinusoid


def refused(config, part="model", **arrays):
    batch = dataclasses.replace(spec.example_batch(config, 7, 11, part=part), **arrays)
    with pytest.raises(BatchError) as caught:
        spec.validate_batch(config, batch, part)
    return str(caught.value)


def with_one(value):
    ids = np.ones((7, 11), np.int64)
    ids[2, 3] = value
    return ids


@pytest.mark.clause("INP-1", "INP-3", "INP-4", "EMB-5")
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("input_ids", with_one(23), "is 23 at (2, 3) but must lie in [0, 23) [clause=INP-1]"),
        ("segment_ids", with_one(2), "is 2 at (2, 3) but must lie in [0, 2) [clause=EMB-5]"),
        ("labels", np.arange(7) % 4, "is 3 at (3,) but must lie in [0, 3) [clause=INP-3]"),
        (
            "input_ids",
            np.ones((7, 11, 1), int),
            "has rank 3, shape (7, 11, 1), but must have axes (batch, tokens) [clause=INP-1]",
        ),
        ("input_ids", np.ones((7, 0), int), "has shape (7, 0) but no axis may be empty [clause=INP-1]"),
        ("embeddings", np.full((7, 11, 10), np.inf), "is inf at (0, 0, 0) but must be finite [clause=INP-4]"),
    ],
)
def test_what_does_not_fit_is_refused(small, name, array, message):
    part = "stack" if name == "embeddings" else "model"
    assert refused(small(), part, **{name: array}).startswith(f"{name!r} {message}")


@pytest.mark.clause("INP-1", "PRT-1")
def test_batch_problems_are_all_listed(small):
    message = refused(small(), segment_ids=np.ones((7, 5), int), labels=None, cotangent=np.ones(3))
    assert len(message.splitlines()) == 3
    assert "'labels' is missing" in message
    assert "'cotangent' is unexpected" in message
    assert "'segment_ids' has shape (7, 5) but must be (7, 11)" in message


@pytest.mark.clause("LOS-3")
def test_labels_that_are_all_ignored_are_refused(small):
    assert "at least one must count" in refused(small(ignore_label=0), labels=np.zeros(7, int))


@pytest.mark.clause("INP-2")
def test_batch_wider_than_the_position_table_is_refused(small):
    with pytest.raises(BatchError, match="13 tokens but at most 12 fit"):
        spec.example_batch(small("keras-attention"), 7, 13)


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


@pytest.mark.clause("POS-2", "POS-3", "POS-4")
def test_sinusoid_follows_the_formula(small):
    pair = sinusoid(small())
    column = sinusoid(small("tf1-text-classifier"))
    halves = sinusoid(small(position_layout="halves"))
    assert (sinusoid(small("keras-attention"))[0] == 0).all()
    assert sinusoid(small(position_base=100.0))[3, 2] == pytest.approx(math.sin(3 / 100 ** (2 / 10)))
    for p in (0, 1, 7):
        for j in range(10):
            wave = math.sin if j % 2 == 0 else math.cos
            assert pair[p, j] == pytest.approx(wave(p / 10000 ** (2 * (j // 2) / 10)), abs=1e-15)
            assert column[p, j] == pytest.approx(wave(p / 10000 ** (j / 10)), abs=1e-15)
            assert halves[p, j // 2 + 5 * (j % 2)] == pair[p, j]
