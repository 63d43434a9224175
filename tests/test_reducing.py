"""Cases that are made small: what is wrong stays, and the rest goes."""

import pytest

from concord import spec
from concord.conformance.campaign import Job, Setup
from concord.conformance.dump import export_cases, read_job
from concord.conformance.reducing import SIZES, cut, reduce, sizes_of
from tests.conftest import small_config
from tests.toys.surroundings import toy

BATCH, TOKENS = 5, 11


def job(variant="bert", part="model", **changes):
    config = small_config(variant, **changes)
    weights = spec.initialize(config, 3, part=part)
    return Job(
        variant,
        "made",
        "float64",
        part,
        config,
        weights,
        spec.example_batch(config, BATCH, TOKENS, 3, "ragged", part=part),
    )


def test_what_a_fault_needs_is_left():
    small_one = reduce(job(num_layers=3), toy("WrongAfterTheFirstLayer"), Setup(threads=1))
    assert small_one.result.first_divergence.tensor == "layers.1.attention.scores"
    assert (small_one.failed, small_one.job.case) == (True, "made-reduced")
    left = {"num_layers": 2, "vocab_size": small_one.after["vocab_size"]}
    assert small_one.after == dict.fromkeys(SIZES, 1) | left
    assert small_one.after["vocab_size"] <= 2, "the token, and padding"
    whole, name = job(num_layers=3), "layers.1.feed_forward.inner.weight"
    assert small_one.before == sizes_of(whole)
    assert small_one.job.weights[name] == whole.weights[name][:1, :1], "numbers are those of the case"


def test_case_that_agrees_stays_as_it_is():
    found = reduce(job(), toy("NumpyBackend"), Setup(threads=1))
    assert (found.failed, found.tried, found.result.status) == (False, 0, "agrees")
    assert found.after == found.before


@pytest.mark.parametrize("variant", spec.variants())
@pytest.mark.parametrize("size", SIZES)
def test_smaller_case_is_a_case(variant, size):
    whole = job(variant)
    length = max(sizes_of(whole)[size] - 1, 1)
    smaller = cut(whole, size, length)
    if (
        smaller is None
        # positions that tokens need, tokens that occur, odd widths, tokens whose places a classifier knows
    ):
        flat = ("tokens",) if whole.config.pooling == "flatten" else ()
        assert size in ("max_positions", "vocab_size", "head_dim", "num_heads", *flat)
    else:
        assert sizes_of(smaller)[size] == length
        spec.reference(smaller.config, smaller.weights, smaller.batch)


@pytest.mark.parametrize("part", ["encoder", "attention", "dot_product"])
def test_parts_get_smaller_too(part):
    whole = job(part=part)
    for size in ("batch", "tokens", "num_heads"):
        smaller = cut(whole, size, 1)
        assert smaller is not None
        assert sizes_of(smaller)[size] == 1
        spec.reference(smaller.config, smaller.weights, smaller.batch, part=part)


def test_command_writes_the_smallest_case(entered, tmp_path):
    (folder,) = export_cases(tmp_path / "cases", [job()])
    printed, errors = entered(
        f"case reduce {folder} --backend {toy('WrongAfterTheFirstLayer')} --threads 1 -o",
        tmp_path / "small",
        ends=1,
    )
    assert not ([line for line in errors if "cases" not in line])
    assert "layers.1.attention.scores" in printed
    request = read_job(tmp_path / "small" / "made-reduced-float64")
    assert (request.config.num_layers, request.config.d_model) == (2, 1)
