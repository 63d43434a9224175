import dataclasses
import runpy

import numpy as np

from concord.conformance.run.standard_jobs import job_of
from concord.spec.cases import build_case
from tests.toys.alternatives import ALTERNATIVES, run
from tests.toys.surroundings import ROOT

PROGRAM = runpy.run_path(str(ROOT / "examples/criteria.py"))
CRITERIA, OURS = PROGRAM["CRITERIA"], PROGRAM["OURS"]


def test_right_run_is_not_flagged_and_a_wrong_one_is_by_those_that_see_it():
    job = job_of(build_case("bert", "full"), "float32")
    right = run(ALTERNATIVES["softmax_running"].change, job)
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
