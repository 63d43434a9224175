"""What was judged nowhere never passes, in any command."""

import json

import numpy as np
import pytest

from concord.speed import presets, truth
from tests.test_speed import small_preset
from tests.toys.dumps import answer, exported, leave
from tests.toys.surroundings import ROOT, suite, toy

# The first backend leaves nothing to judge; runs of the second lack one section.
NOTHING, A_SECTION = toy("SaysUnsupported"), toy("LeavesOutGradients")

CASE = "keras-attention-single-attention"
ONE = f"--variant keras-attention --case {CASE} --part attention --dtype float64"
GOLDEN = ROOT / "conformance" / "golden" / "keras-attention"


@pytest.fixture
def case(tmp_path):
    # With a run that has no gradients.
    answer(exported(tmp_path / "cases", CASE, dtypes=["float64"], part="attention"))
    (path,) = tmp_path.rglob("run.safetensors")
    leave(path, "output", "loss")
    return path.parent


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (f"check --backend {{backend}} {ONE} --html {{page}}", A_SECTION),
        ("check --from-dump {case} --html {page}", A_SECTION),
        (f"golden {GOLDEN} --backend {{backend}} --html {{page}}", NOTHING),
        ("fuzz --backend {backend} --cases 2 --part dot_product --out {out} --html {page}", A_SECTION),
        ("case run {case} --backend {backend}", A_SECTION),
    ],
)
def test_a_command_does_not_pass_what_it_did_not_judge(line, backend, entered, tmp_path, case):
    page = tmp_path / "page.html"
    words = line.format(backend=backend, case=case, out=tmp_path / "out", page=page)
    output, lines = entered(words, ends=3)
    assert not ([line for line in lines if line.startswith("concord: ")])
    assert "✓" not in output
    assert any(words in output for words in ("unsupported", "undetermined", "nothing was judged"))
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


def test_speed_of_what_was_not_judged_is_not_measured(entered, monkeypatch, tmp_path):
    def undetermined(work):
        return truth.expectation(work, derive(work).values, {"logits": np.nan})

    derive = truth.derive
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})
    monkeypatch.setattr(truth, "expected", undetermined)
    output, _ = entered(
        "speed --preset nndl --implementation explicit --execution eager --quick --threads 1 "
        f"--backend {toy('Measurable', 'measurable')} --json {tmp_path / 'out.json'}",
        ends=3,
    )
    assert "undetermined: its results were not judged: float32 does not determine logits" in output
    (entry,) = json.loads((tmp_path / "out.json").read_text())["entries"]
    assert (entry["status"], entry["summary"]) == ("undetermined", None)
