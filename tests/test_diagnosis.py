"""What is said of mistakes that nobody foresaw: the tensor, the clause, and what is seen, but no cause that is not theirs."""

from __future__ import annotations

import re
from functools import cache

import pytest

from conformance.comparison import Verdict, judge
from spec.cases import build_case
from tests.toys.unseen import UNSEEN, run_of, said

UNSAID = {"residual halved"}
"""Those of which what an engineer would want to be told is not said."""


@cache
def verdict_of(name: str) -> Verdict:
    mistake = UNSEEN[name]
    case = build_case(mistake.home, mistake.scenario)
    return judge(case.config, case.weights, case.batch, run_of(case, mistake), case.part, arriving=False)


LATE = {"slope of quick gelu", "slope taken at the result", "slope without its second term"}
"""Those whose first gradient is only named where gradients stand in the order of the backward pass."""


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unforeseen_mistake_is_placed_and_described(name):
    mistake, verdict = UNSEEN[name], verdict_of(name)
    diagnosis = verdict.diagnosis
    assert re.fullmatch(mistake.first, diagnosis.tensor) or name in LATE
    if name not in UNSAID:
        assert diagnosis.clause in mistake.clauses.split(), diagnosis
        assert said(mistake, diagnosis.text), diagnosis.text
    assert not (diagnosis.cause and diagnosis.cause.confident) or said(mistake, diagnosis.cause.text), diagnosis.cause
    if diagnosis.description:
        assert diagnosis.as_dict()["description"]["text"] == diagnosis.description.text
        assert diagnosis.description.wrong <= diagnosis.description.size
