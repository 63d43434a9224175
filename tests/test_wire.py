import json
import re

import numpy as np
import pytest
from ml_dtypes import bfloat16

from concord.backends import wire
from concord.backends.interface import Run
from concord.backends.wire import check_description, check_info, returned
from tests.toys.surroundings import refusal, toy


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name


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
    result = wire.decode(wire.encode(run))
    assert list(result.taps) == list(result.tap_gradients) == list(named)
    names = arrays_of(run)
    assert_same_bits(arrays_of(result), dict.fromkeys(names, np.array(array, dtype, order="C")))
    assert (result.backend, result.dtype, result.info) == ("toy", dtype, {"version": "1"})


def described(**fields):
    return json.dumps({"version": "1", **fields})


def deviation(**fields):
    return {"deviations": [{"name": "softmax_floor", "value": -64, "reason": "clipped", **fields}]}


NONSENSE = {
    described(**deviation(name=["softmax_floor"])): ("unknown deviation", check_description),
    described(**deviation(value=float("-inf"))): (
        "deviation 'softmax_floor' has value -inf but must have a number between -1e+06 and 1e+06",
        check_description,
    ),
    "[]": ("'info' is [] but must be an object", check_info),
    '{"not_exposed": [["*"]]}': ("'not_exposed' is [['*']] but must be a list of strings", check_info),
}


@pytest.mark.parametrize("told", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_that_a_backend_tells_is_refused_in_words(told):
    words, check = NONSENSE[told]
    refused = refusal(lambda: check(json.loads(told)))
    assert refused[0].startswith(words)
    assert len(refused[0]) < 300


ARRAY = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (None, "run() returned type NoneType but must return a Run"),
        (Run(ARRAY, None, [ARRAY]), "run().taps has type list but must be a dict of named arrays"),
        (
            Run(ARRAY, None, {}, {"x": [[1], [1, 2]]}),
            "run().gradients['x'] has type list but must be an array of numbers",
        ),
        (Run(None, None, {}), "run()['output'] has type NoneType but must be an array of numbers"),
        # Safetensors has this type, but NumPy does not.
        (Run(ARRAY.astype(bfloat16), None, {}), "dtype bfloat16 but must be an array of numbers"),
    ],
)
def test_a_run_that_is_none_is_refused_in_words(run, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        returned(run)


def test_a_plug_in_that_returns_none_by_name_is_judged_on_its_output(entered):
    check = ("check", "--case", "bert-single", "--dtype", "float32", "--backend")
    output, _ = entered(*check, toy("ReturnsNoneByName"), "--forward-only")
    assert "1 agrees" in output
    output, _ = entered(*check, toy("ReturnsNoneByName"), ends=1)
    assert "first at loss (SPEC LOS-2): missing" in output
