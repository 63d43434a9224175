"""What a backend says of itself and of its runs is read with care: nonsense is refused, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from concord import spec
from concord.backends.wire import check_description, check_info, received


def described(**said: Any) -> str:
    return json.dumps({"version": "1", **said})


def deviation(**said: Any) -> dict[str, Any]:
    return {"deviations": [{"name": "softmax_floor", "value": -64, "reason": "clipped", **said}]}


NONSENSE: dict[str, tuple[str, Callable[[Any], None]]] = {
    '"text"': ("describe() returned a str but must return a dict", check_description),
    "17": ("describe() returned a int but must return a dict", check_description),
    described(licence="x" * (1 << 24)): (f"has {(1 << 24) + 31} characters but must have at most {1 << 24}", check_description),
    '{"a":' * 40 + "1" + "}" * 40: ("is nested deeper than 32 levels", check_description),
    "[" * 100_000 + "]" * 100_000: ("is nested deeper than 32 levels", check_description),
    described(deviations={"cpu": 3}): ("describe(): 'deviations' must be a list of dicts", check_description),
    described(implementation_deviations=[1]): ("describe(): 'implementation_deviations' is a list but must be a dict", check_description),
    described(**deviation(name=["softmax_floor"])): ("unknown deviation", check_description),
    described(**deviation(value=float("-inf"))): ("deviation 'softmax_floor' has value -inf but must have a number between -1e+06 and 1e+06", check_description),
    described(**deviation(value=10**400)): ("deviation 'softmax_floor' has value 1000", check_description),
    described(**deviation(value=True)): ("deviation 'softmax_floor' has value True", check_description),
    described(**deviation(reason="")): ("deviation 'softmax_floor' has no reason", check_description),
    "[]": ("'info' must be an object", check_info),
    json.dumps(deviation(value=None)): ("deviation 'softmax_floor' has value None", check_info),
    '{"precision_switches": "all off"}': ("'precision_switches' is 'all off' but must be an object", check_info),
    '{"undelivered_taps": [["*"]]}': ("'undelivered_taps' is [['*']] but must be a list of strings", check_info),
}


@pytest.mark.parametrize("told", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_that_a_backend_tells_is_refused_in_words(told: str) -> None:
    words, check = NONSENSE[told]
    with pytest.raises(spec.SpecError) as refused:
        check(received(told))
    assert refused.value.problems[0].startswith(words)
    assert len(refused.value.problems[0]) < 300
