import importlib.metadata
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file
from torch import nn

from concord import compare
from concord.comparison_file import AcceptedFinding, accept, read_comparison_file, unneeded
from concord.conformance.judging.verdict import Result
from concord.conformance.run.campaign import exit_code_of
from tests.toys.surroundings import refusal

MODULE = """
import torch
from torch import nn

def build(form="none"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(form), nn.Linear(13, 5)).eval()

def port(input):
    return {"output": build("tanh")(torch.from_numpy(input)).detach().numpy()}

def tanh():
    return build("tanh")

def rounded(input):
    return {"output": build().bfloat16()(torch.from_numpy(input).bfloat16()).float().detach().numpy()}

def absent():
    import no_such_package
"""

COMPARISONS = """
[tool.concord]
reference = "kept_in_git:build"
inputs = "inputs.safetensors"

[tool.concord.candidates.half]
as = "bfloat16"

[tool.concord.candidates.known]
candidate = "kept_in_git:port"

[[tool.concord.candidates.known.accepted]]
tensor = "*"
reason = "the app ships tanh"

[tool.concord.candidates.rounded]
candidate = "kept_in_git:rounded"
dtype = "bfloat16"

[tool.concord.candidates.absent]
candidate = "kept_in_git:absent"

[tool.concord.candidates.unknown]
candidate = "kept_in_git:tanh"
"""


def test_a_command_without_arguments_judges_what_is_kept_in_git_and_reports_to_ci(
    entered, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (tmp_path / "kept_in_git.py").write_text(MODULE)
    (tmp_path / "pyproject.toml").write_text(COMPARISONS)
    x = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    save_file({"input": x}, tmp_path / "inputs.safetensors")
    output, _ = entered("compare --junit junit.xml --json all.json", ends=3)
    assert "2 agree, 1 accepted, 1 missing, 1 diverges" in output
    assert "the app ships tanh" in output
    assert "approximate` is tanh instead of none" in output, "a function without parameters is a module"
    annotation, _ = (line for line in output.splitlines() if line.startswith("::error"))
    assert "title=concord unknown" in annotation
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    outcomes = {test.get("classname"): [child.tag for child in test] for test in suite}
    assert outcomes == {
        "kept_in_git:build.half": [],
        "kept_in_git:build.known": ["skipped"],
        "kept_in_git:build.rounded": [],
        "kept_in_git:build.absent": ["error"],
        "kept_in_git:build.unknown": ["failure"],
    }
    assert {test.get("time") for test in suite} == {None}, "nobody measured it"
    assert re.match(
        "diverges at .* by .* tolerances: .*approximate` is tanh instead of none",
        suite.find(".//failure").get("message"),
    )
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["5", "1", "1", "1"]
    (tmp_path / "page.md").write_text("<!-- begin compare -->\n<!-- end compare -->\n")
    entered("show report all.json --runs runs.tsv --markdown page.md", ends=3)
    assert "\n| half | agrees | 0." in (tmp_path / "page.md").read_text()


@pytest.fixture(scope="module")
def result():
    """A candidate whose activation is another, and whose last layer is wrong too."""
    namespace = {}
    exec(MODULE, namespace)
    right, wrong = namespace["build"](), namespace["build"]("tanh")
    nn.init.zeros_(wrong[2].bias)
    verdict = compare(right, wrong, (np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32),))
    return Result("port", "model", "inputs", "float32", verdict.status, verdict=verdict)


def test_a_divergence_is_accepted_if_every_tensor_that_diverges_is_named(result):
    wrong = [row.tensor for row in result.table if row.status == "diverges"]
    assert wrong[0] == "1"
    findings = [AcceptedFinding(tensor=name, reason=f"reason {name}") for name in wrong]
    accepted = accept(result, findings)
    assert (accepted.status, exit_code_of([("port", accepted.status)])) == ("accepted", 0)
    assert "reason 1; reason 2" in accepted.attribution
    partly = accept(result, findings[:1])
    assert (partly.status, partly.attribution) == ("diverges", "`2` diverges too, and is not accepted")
    assert (
        accept(result, [AcceptedFinding(tensor="0", reason="why")]).attribution
        == "`1` diverges and is not accepted"
    )
    assert accept(result, []) == result


def test_a_finding_holds_for_its_version_alone(result):
    installed = importlib.metadata.version("numpy")
    accepted, other, absent = (
        accept(result, [AcceptedFinding(tensor="*", reason="why", version=version)])
        for version in (f"numpy {installed}", "numpy 0.1", "no-such-package 1.0")
    )
    assert accepted.status == "accepted"
    assert (other.status, absent.status) == ("diverges", "diverges")
    assert other.attribution == f"numpy 0.1 was the accepted version, but numpy {installed} is installed"
    assert absent.attribution.endswith("but no-such-package none is installed")


def test_brackets_of_a_finding_belong_to_the_name():
    assert AcceptedFinding(tensor="layers.*.attention[0]", reason="why").named(
        ["layers.1.attention[0]", "layers.1.attention0"]
    ) == ["layers.1.attention[0]"]


def test_a_finding_that_is_gone_is_named(result):
    there, gone = AcceptedFinding(tensor="1", reason="why"), AcceptedFinding(tensor="0", reason="why")
    assert unneeded(result, [there, gone]) == "accepted, but no longer diverging: 0"
    assert not unneeded(result, [there])


def test_everything_that_is_wrong_in_a_file_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = refusal(read_comparison_file)
    assert "concord.toml" in problem
    (tmp_path / "concord.toml").write_text(
        'refrence = "a:b"\n[candidates.x]\nas = "onnx"\n'
        '[[candidates.x.accepted]]\ntensor = "y"\nversion = "1"\n'
    )
    problems = "\n".join(refusal(read_comparison_file))
    for words in ("unknown key 'refrence'", "reference", "reason", "version"):
        assert words in problems
    (tmp_path / "concord.toml").write_text('reference = "a:b"\n[candidates.x]\n[candidates.y]\nas = "onnx"\n')
    assert refusal(read_comparison_file) == [
        "concord.toml: 'candidates.x' must have either 'candidate' or 'as'"
    ]
