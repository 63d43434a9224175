"""What a backend says of itself and of its runs is read with care: nonsense is refused, in words."""

import json

import numpy as np
import pytest

from concord import backends
from concord.backends.bootstrap import READY, SIZE
from concord.backends.interface import Run
from concord.backends.wire import WorkerFailure, check_description, check_info, received, returned
from tests.toys.surroundings import refusal, script, toy


def described(**said):
    return json.dumps({"version": "1", **said})


def deviation(**said):
    return {"deviations": [{"name": "softmax_floor", "value": -64, "reason": "clipped", **said}]}


NONSENSE = {
    described(licence="x" * (1 << 24)): (
        f"has {(1 << 24) + 31} characters but must have at most {1 << 24}",
        check_description,
    ),
    "[" * 100_000 + "]" * 100_000: ("is nested deeper than 32 levels", check_description),
    described(**deviation(name=["softmax_floor"])): ("unknown deviation", check_description),
    described(**deviation(value=float("-inf"))): (
        "deviation 'softmax_floor' has value -inf but must have a number between -1e+06 and 1e+06",
        check_description,
    ),
    "[]": ("'info' is [] but must be an object", check_info),
    json.dumps(deviation(value=None)): ("deviation 'softmax_floor' has value None", check_info),
    '{"precision_switches": "all off"}': (
        "'precision_switches' is 'all off' but must be an object",
        check_info,
    ),
    '{"not_exposed": [["*"]]}': ("'not_exposed' is [['*']] but must be a list of strings", check_info),
}


@pytest.mark.parametrize("told", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_that_a_backend_tells_is_refused_in_words(told):
    words, check = NONSENSE[told]
    refused = refusal(lambda: check(received(told)))
    assert refused[0].startswith(words)
    assert len(refused[0]) < 300


ARRAY = np.ones((2, 3), np.float32)


WRONG = {
    "a list of taps": (
        Run(ARRAY, None, [ARRAY]),
        "run().taps is a list but must be a dict of arrays by name",
    ),
    "a ragged gradient": (
        Run(ARRAY, None, {}, {"x": [[1], [1, 2]]}),
        "run().gradients['x'] is a list but must be an array of numbers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_is_none_is_refused_in_words(name):
    run, words = WRONG[name]
    with pytest.raises(TypeError) as refused:
        returned(run)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bytes_in_the_pipe_that_are_no_message_are_those_of_a_worker_that_is_gone(tmp_path):
    ready = len(READY).to_bytes(SIZE, "little") + READY
    (tmp_path / "answers").write_bytes(ready + b"\xff" * 100)
    python = script(tmp_path / "python", f"cat {tmp_path / 'answers'}; exec cat > /dev/null")
    with pytest.raises(WorkerFailure) as failed:
        backends.open(toy("NumpyBackend"), python=str(python), threads=1)
    assert (failed.value.status, failed.value.detail) == ("crashed", "its process ended")


def test_a_plug_in_that_returns_none_by_name_is_judged_on_its_output(entered):
    check = ("check", "--case", "bert-single", "--dtype", "float32", "--backend")
    output, _ = entered(*check, toy("ReturnsNoneByName"), "--forward-only")
    assert "1 agrees" in output
    output, _ = entered(*check, toy("ReturnsNoneByName"), ends=1)
    assert "first at loss (SPEC LOS-2): missing" in output
    output, _ = entered(*check, toy("ReturnsNoOutput"), "--forward-only", ends=3)
    assert "run()['output'] is a NoneType but must be an array of numbers" in output
