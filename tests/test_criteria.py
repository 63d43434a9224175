"""The field's usual criteria beside the judge: what each passes, and that the comparison counts right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from concord.backends.interface import Run
from concord.backends.worker import WorkerFailure
from concord.conformance.check import job_of
from concord.conformance.criteria import (
    CRITERIA,
    FAULTS,
    GROUPS,
    HALF,
    OURS,
    RIGHT,
    SINGLE,
    Amounts,
    Comparison,
    flags_of,
    markdown,
    passes,
    percent,
    random_jobs,
    vary,
)
from concord.conformance.variations.backend import run as run_variation
from concord.conformance.variations.catalogue import VARIATIONS
from concord.spec.cases import build_case
from tests.test_variations import request_of

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
def test_criterion_passes_what_is_near_and_flags_what_is_far(
    criterion: str, near: np.ndarray, far: np.ndarray
) -> None:
    assert passes(CRITERIA[criterion], LOGITS, LOGITS)
    assert passes(CRITERIA[criterion], near, LOGITS)
    assert not passes(CRITERIA[criterion], far, LOGITS)
    assert not passes(CRITERIA[criterion], np.where(LOGITS == 2, np.nan, LOGITS), LOGITS)
    assert not passes(CRITERIA[criterion], LOGITS[:1], LOGITS)
    assert not passes(CRITERIA[criterion], None, LOGITS)


def test_criteria_that_are_not_defined_pass_and_what_is_not_finite_in_the_oracle_is_left_out() -> None:
    constant = np.full(3, 2.0)
    assert passes(CRITERIA["PCC 0.99"], constant * 3, constant)
    assert passes(CRITERIA["cosine 0.999"], constant, constant * 0)
    assert passes(CRITERIA["allclose 1e-5"], np.array([1.0, 5.0]), np.array([1.0, np.inf]))
    assert not passes(CRITERIA["KL 1e-3"], np.array([[-2.0]]), np.array([[2.0]]))


def a_run() -> tuple[object, Run]:
    job = job_of(build_case("bert", "full"), "float32")
    return job, run_variation(VARIATIONS["softmax_running"], request_of(job))


def test_right_run_is_not_flagged_and_a_wrong_one_is_by_those_that_see_it() -> None:
    job, run = a_run()
    flags = flags_of(job, run)  # type: ignore[arg-type]
    assert flags[OURS] == (False, False)
    assert flags["allclose 1e-3"] == (False, False)
    assert flags["KL 1e-3"] == (False, None)
    taps = {
        **run.taps,
        "layers.0.attention.scores": run.taps["layers.0.attention.scores"] * np.float32(1.0001),
    }
    wrong = flags_of(job, dataclasses.replace(run, taps=taps))  # type: ignore[arg-type]
    assert wrong[OURS] == (False, True)
    assert wrong["allclose 1e-5"] == (flags["allclose 1e-5"][0], True)
    assert wrong["NMSE 1e-2"] == flags["NMSE 1e-2"]


def test_shares_exit_code_record_and_table_follow_from_the_flags() -> None:
    every = (*CRITERIA, OURS)
    none: dict = {name: (False, None if name == "KL 1e-3" else False) for name in every}
    found = {**none, OURS: (False, True), "PCC 0.99": (True, True)}
    result = Comparison(
        Amounts(),
        {
            FAULTS: {"a torch": found, "b torch": found},
            RIGHT: {"c": none},
            SINGLE: {"d": none},
            HALF: {"e": none},
        },
        versions={"torch": "2"},
    )
    assert result.exit_code == 0
    assert result.share(FAULTS, OURS, False) == (0, 2)
    assert result.share(FAULTS, OURS, True) == (2, 2)
    assert result.share(FAULTS, "KL 1e-3", True) is None
    table = markdown(result)
    assert f"| {OURS} | 0 % / 100 % | 0 % / 0 % | 0 % / 0 % | 0 % / 0 % |" in table
    assert "2 faults" in table
    assert json.loads(json.dumps(result.as_dict()))["flagged"]["PCC 0.99"][FAULTS] == {
        "outputs": [2, 2],
        "all": [2, 2],
    }
    result.flagged[RIGHT]["f"] = found
    assert (result.exit_code, result.exceptions["alarms"]) == (1, ["f"])
    result.failures["jax"] = WorkerFailure("absent", "jax is not installed")
    assert result.exit_code == 1
    result.asked = ("jax",)
    assert result.exit_code == 3


def test_percent_never_rounds_to_all_or_nothing() -> None:
    assert [percent(0, 9), percent(9, 9), percent(1, 500), percent(499, 500), percent(1, 3)] == [
        "0 %",
        "100 %",
        "0.2 %",
        "99.8 %",
        "33 %",
    ]
    assert percent(1, 10**6) == "< 0.1 %"
    assert percent(10**6 - 1, 10**6) == "> 99.9 %"


def test_right_variations_run_on_cases_that_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "concord.conformance.criteria.VARIATIONS", [VARIATIONS["norm_welford"], VARIATIONS["sums_pairwise"]]
    )
    monkeypatch.setattr("concord.conformance.criteria.flags_of", lambda job, run: {})
    first, again, other = (Comparison(Amounts(cases=2, seed=seed)) for seed in (3, 3, 4))
    for result in (first, again, other):
        vary(result, result.amounts)
    assert len(first.flagged[RIGHT]) == 8
    assert list(first.flagged[RIGHT]) == list(again.flagged[RIGHT]) != list(other.flagged[RIGHT])
    assert all(job.end_to_end for job in random_jobs("float32", 2, 0))


def test_record_names_every_criterion_and_the_readme_shows_it() -> None:
    root = Path(__file__).parent.parent
    record = json.loads((root / "conformance/results/criteria.json").read_text())
    table = (
        (root / "README.md")
        .read_text()
        .partition("<!-- begin criteria -->")[2]
        .partition("<!-- end criteria -->")[0]
    )
    assert list(record["flagged"]) == [*CRITERIA, OURS]
    for name, groups in record["flagged"].items():
        cells = (
            " / ".join("–" if share is None else percent(*share) for share in groups[group].values())
            for group in GROUPS
        )
        assert f"| {name} | {' | '.join(cells)} |" in table
