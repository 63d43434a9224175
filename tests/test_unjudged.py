"""What was judged nowhere never reads as a pass.

Through every command that judges, with runs of which nothing, or not every section, can be judged.
"""

import json

import numpy as np
import pytest

from concord.conformance.judging.verdict import Judgement, Row, Verdict
from concord.conformance.run.campaign import exit_code_of
from concord.speed import presets, truth
from tests.test_speed import small_preset
from tests.toys.dumps import answer, exported, leave
from tests.toys.surroundings import ROOT, suite, toy

NOTHING, A_SECTION = toy("SaysUnsupported"), toy("LeavesOutGradients")
"""A backend of which nothing can be judged; one of whose runs a section cannot."""

CASE = "keras-attention-single-attention"
ONE = f"--variant keras-attention --case {CASE} --part attention --dtype float64"


def of_dump(invoke, folder, backend):
    """Write a case and a run of it that has no gradients."""
    answer(exported(folder / "cases", CASE, dtypes=["float64"], part="attention"))
    (path,) = folder.rglob("run.safetensors")
    leave(path, "output", "loss")
    return f"check --from-dump {folder / 'cases'}"


def of_case(invoke, folder, backend):
    (path,) = exported(folder / "cases", CASE, dtypes=["float64"], part="attention").rglob("case.json")
    return f"case run {path.parent} --backend {backend}"


ELSEWISE = {
    ("check --from-dump", NOTHING): "no file is unsupported",
    ("golden", A_SECTION): "what lacks published gradients diverges",
}

PAGES = ("check", "golden", "fuzz")
"""Of the following, those that are asked for a page."""

GOLDEN = ROOT / "conformance" / "golden" / "keras-attention"

COMMANDS = {
    "check": lambda invoke, folder, backend: f"check --backend {backend} {ONE} --html {folder / 'page.html'}",
    "check --from-dump": of_dump,
    "golden": lambda invoke, folder, backend: (
        f"golden {GOLDEN} --backend {backend} --html {folder / 'page.html'}"
    ),
    "fuzz": lambda invoke, folder, backend: (
        f"fuzz --backend {backend} --cases 2 --part dot_product --out {folder / 'out'} "
        f"--html {folder / 'page.html'}"
    ),
    "case run": of_case,
}


@pytest.mark.parametrize("backend", [NOTHING, A_SECTION], ids=["nothing", "a section"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_not_pass_what_it_did_not_judge(command, backend, invoke, entered, tmp_path):
    if why := ELSEWISE.get((command, backend)):
        pytest.skip(why)
    output, lines = entered(COMMANDS[command](invoke, tmp_path, backend), ends=3)
    assert not ([line for line in lines if line.startswith("concord: ")])
    assert "✓" not in output
    assert any(words in output for words in ("unsupported", "undetermined", "nothing was judged"))
    page = tmp_path / "page.html"
    assert page.exists() == (command in PAGES)
    if page.exists():
        assert "Nothing was judged." in page.read_text()
        assert 'class="seal good"' not in page.read_text()


def test_a_suite_under_pytest_does_not_pass_what_it_did_not_judge(tmp_path):
    ran = suite(
        f"-k single --concord-backend {A_SECTION} --concord-part attention --concord-dtype float64 "
        "--concord-variant keras-attention --concord-golden off",
        tmp_path,
    )
    assert ran.returncode == 1, ran.stdout
    assert f"concord: {A_SECTION}: nothing was judged" in ran.stdout
    assert "gradients not judged" in ran.stdout


# The rule, where a command is more than a test should run.


def test_runs_pass_only_if_each_backend_that_is_there_was_judged():
    assert exit_code_of([("a", "agrees"), ("b", "absent")]) == 0
    assert exit_code_of([("a", "agrees"), ("a", "unsupported")]) == 0
    for statuses in (
        [],
        [("a", "unsupported")],
        [("a", "absent")],
        [("a", "agrees"), ("b", "unsupported")],
        [("a", "agrees"), ("a", "undetermined")],
        [("a", "agrees"), ("a", "not judged")],
    ):
        assert exit_code_of(statuses) == 3, statuses
    assert exit_code_of([("a", "diverges"), ("a", "unsupported")]) == 1


def unjudged():
    return Verdict(
        [
            Row("logits", "HED-3", "agrees", None, Judgement("agrees", 0.1, size=6), size=6),
            Row("gradients.x", "GRD-1", "undetermined", size=6),
        ]
    )


def test_speed_of_what_was_not_judged_is_not_measured(entered, monkeypatch, tmp_path):
    def undetermined(work, rules=None):
        return truth.expectation(work.dtype, derive(work, rules).values, {"logits": np.nan})

    derive = truth.derive
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})
    monkeypatch.setattr(truth, "expected", undetermined)
    output, _ = entered(
        "speed --preset nndl --implementation explicit --execution eager --quick --threads 1 "
        f"--backend {toy('Measurable', 'measurable')} --json {tmp_path / 'out.json'}",
        ends=3,
    )
    assert "undetermined: what it computed was not judged: float32 does not determine logits" in output
    assert {
        (entry["status"], entry["summary"])
        for entry in json.loads((tmp_path / "out.json").read_text())["entries"]
    } == {("undetermined", None)}
