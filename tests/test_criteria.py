"""The field's usual criteria beside the judge: what each passes, and that the guide's table has them all."""

import dataclasses
import runpy

import numpy as np
import pytest

from concord.backends.interface import Request
from concord.conformance.bugs.catalogue import ALTERNATIVES
from concord.conformance.bugs.numpy_backend import run
from concord.conformance.check import job_of
from concord.spec.cases import build_case
from tests.toys.surroundings import ROOT

PROGRAM = runpy.run_path(str(ROOT / "examples/criteria.py"))
CRITERIA, OURS, passes = (PROGRAM[name] for name in ("CRITERIA", "OURS", "passes"))
LOGITS = np.array([[2.0, -1.0, 0.5], [0.1, 3.0, -2.0]])


@pytest.mark.parametrize(
    ("criterion", "near", "far"),
    [
        ("allclose 1e-5", LOGITS * (1 + 9e-6), LOGITS * (1 + 3e-5)),
        ("allclose 1e-4", LOGITS * (1 + 9e-5), LOGITS * (1 + 3e-4)),
        ("allclose 1e-3", LOGITS * (1 + 9e-4), LOGITS * (1 + 3e-3)),
        ("max-abs 1e-3", LOGITS + 9e-4, LOGITS + 1.1e-3),
        ("cosine 0.999", LOGITS * 7, LOGITS + 0.2),
        ("PCC 0.99", LOGITS * 7 + 3, LOGITS * [[1, 3, 1], [1, 1, 1]]),
        ("NMSE 1e-2", LOGITS * 1.09, LOGITS * 1.11),
        ("KL 1e-3", LOGITS + 5, LOGITS * 1.2),
    ],
)
def test_criterion_passes_what_is_near_and_flags_what_is_far(criterion, near, far):
    assert passes(CRITERIA[criterion], LOGITS, LOGITS)
    assert passes(CRITERIA[criterion], near, LOGITS)
    for wrong in (far, np.where(LOGITS == 2, np.nan, LOGITS), LOGITS[:1], None):
        assert not passes(CRITERIA[criterion], wrong, LOGITS)


def test_right_run_is_not_flagged_and_a_wrong_one_is_by_those_that_see_it():
    job = job_of(build_case("bert", "full"), "float32")
    request = Request(job.config, job.weights, job.batch, job.part, job.dtype)
    right = run(ALTERNATIVES["softmax_running"].change, request)
    flags = PROGRAM["flags_of"](job, right)
    assert flags[OURS] == (False, False)
    assert flags["KL 1e-3"] == (False, None)
    scores = right.taps["layers.0.attention.scores"] * np.float32(1.0001)
    wrong = dataclasses.replace(right, taps={**right.taps, "layers.0.attention.scores": scores})
    assert PROGRAM["flags_of"](job, wrong)[OURS] == (False, True)
    table = PROGRAM["table"]({group: {"run": flags} for group in PROGRAM["GROUPS"]})
    assert f"| {OURS} | 0 % / 0 % | 0 % / 0 % | 0 % / 0 % | 0 % / 0 % |" in table


def test_guide_has_every_criterion():
    table = (ROOT / "docs/guides/criteria.md").read_text().partition("<!-- begin criteria -->")[2]
    assert [line.split(" | ")[0][2:] for line in table.splitlines()[3 : 4 + len(CRITERIA)]] == [
        *CRITERIA,
        OURS,
    ]
