"""Messages: what goes to a worker and comes back is the same bit for bit.

What is wrong is refused before it is computed.
"""

import dataclasses

import numpy as np
import pytest

from concord import backends, spec
from concord.backends import wire
from concord.backends.interface import Run, Unsupported
from concord.spec.batch import round_inputs
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import toy

MIB = 2**20


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


# Arrays.

VIEWS = {
    "whole": lambda a: a,
    "rank 0": lambda a: a[1, 2, 3],
    "empty": lambda a: a[:, :0],
    "transposed": lambda a: a.T,
    "strided": lambda a: a[::2, 1:, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "Fortran order": np.asfortranarray,
    "the other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
}


def arrays_of(run):
    return {
        f"{kind}/{name}": array
        for kind in ("taps", "gradients", "tap_gradients", "steps")
        for name, array in (*getattr(run, kind).items(), ("output", run.output), ("loss", run.loss))
        if array is not None
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"])
def test_arrays_of_any_bits_pass_through_messages_bit_for_bit(dtype, view):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (3, 5, 7, 8), np.uint8)
    array = np.asarray(VIEWS[view](bits.view(dtype)[..., 0]))
    named = {"b": array, "a": array}
    run = Run(array, array, named, {"g": array}, "toy", dtype, {"version": "1"}, tap_gradients=named)
    found = wire.decode(wire.encode(run))
    assert list(found.taps) == list(found.tap_gradients) == list(named)
    names = arrays_of(run)
    assert_same_bits(arrays_of(found), dict.fromkeys(names, np.array(array, dtype, order="C")))
    assert (found.backend, found.dtype, found.info) == ("toy", dtype, {"version": "1"})


def awkward(config, dtype):
    """Return weights with the numbers of a precision that are lost most easily.

    -0, subnormals, the largest.
    """
    target = spec.precision(dtype)
    least = target.smallest_normal * (2 * target.unit_roundoff)
    numbers = [-0.0, least, -3 * least, target.largest, -target.largest, 1 + 2 * target.unit_roundoff]
    weights = spec.initialize(config)
    for array in weights.values():
        array.reshape(-1)[: len(numbers)] = numbers[: array.size]
    return weights


def test_a_run_says_who_made_it_whatever_the_backend_says(small):
    with backends.open(toy("NumpyBackend"), threads=1) as worker:
        run = run_of(worker, request_for(small(), dtype="bfloat16"))
    assert (run.backend, run.dtype, run.requested) == (toy("NumpyBackend"), "bfloat16", ("taps", "gradients"))
    assert run.loss.shape == ()
    assert list(run.taps) == list(spec.taps(small()))
    assert run.info["peak_memory_bytes"] > MIB


# What is refused.


@pytest.mark.clause("INP-1", "WGT-1")
def test_bad_input_is_refused_and_the_worker_lives_on(worker, small):
    request, bias = request_for(small("vanilla-encoder")), "layers.1.feed_forward.inner.bias"
    ids = request.batch.input_ids.copy()
    ids[2, 4] = 23
    weights = {name: array for name, array in request.weights.items() if name != bias}
    for change, message in (
        (
            {"batch": dataclasses.replace(request.batch, input_ids=ids)},
            "'input_ids' is 23 at (2, 4) but must",
        ),
        ({"weights": weights}, f"'{bias}' is missing but is required"),
    ):
        with pytest.raises(spec.SpecError) as refused:
            run_of(worker, dataclasses.replace(request, **change))
        assert message in str(refused.value)
        assert f"backend={worker.name}" in str(refused.value)
    assert run_of(worker, request).output.shape == (3, 3)


# The four frameworks.


@pytest.mark.in_turn(2)
@pytest.mark.clause("WGT-4")
def test_weights_that_go_into_a_model_come_back_bit_for_bit(worker, variant_config):
    batch = request_for(variant_config).batch
    for dtype in spec.PRECISIONS:
        weights = awkward(variant_config, dtype)
        try:
            found = worker.round_trip(variant_config, weights, batch, dtype=dtype)
        except Unsupported:
            assert (worker.name, dtype) in (("paddle", "bfloat16"), ("paddle", "float16"))
            continue
        expected = round_inputs(weights, batch, dtype)[0]
        assert_same_bits(found, expected)


@pytest.mark.clause("DRP-1")
@pytest.mark.parametrize(("part", "dtype"), [("model", "float32"), ("attention", "float64")])
def test_a_run_repeated_is_the_same_bit_for_bit(worker, small, part, dtype):
    request = request_for(small("vanilla-encoder"), part, dtype=dtype)
    first, second = (arrays_of(run_of(worker, request)) for _ in range(2))
    assert_same_bits(second, first)


def test_a_device_that_is_not_there_is_unsupported(worker, small, monkeypatch):
    monkeypatch.setattr(worker, "device", "cuda:7")
    with pytest.raises(Unsupported, match=r"(?i)cuda|gpu"):
        run_of(worker, request_for(small()))
