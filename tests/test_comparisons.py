import importlib
import re

import pytest
import torch
from torch import nn

from concord import compare
from concord.conformance.compare import prepare
from concord.conformance.compare.candidates import stub
from concord.spec.errors import SpecError
from tests.toys import called
from tests.toys.kinds import Of, linear

INPUTS = (torch.randn(3, 7, generator=torch.Generator().manual_seed(0)),)


def model(form="none"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(form), nn.Linear(13, 5)).eval()


def double(x):
    return {"output": model().double()(torch.from_numpy(x).double()).detach().numpy().astype("float32")}


def test_a_table_tells_which_candidates_agree_why_others_do_not_and_how_long_a_pass_takes():
    comparisons = compare(
        model(),
        {"port": model("tanh"), "half": "bfloat16", "away": "cuda", "f64": double, "broken": called.raises},
        INPUTS,
    )
    assert {name: verdict.status for name, verdict in comparisons.items()} == {
        "port": "diverges",
        "half": "agrees",
        "f64": "agrees",
    }
    assert comparisons["half"].table[0].tensor == "0"
    assert comparisons.milliseconds.keys() == {"reference", "half", "f64"}
    assert not comparisons.passed
    assert {result.status for result in comparisons.results()} == {"diverges", "agrees", "missing", "error"}
    with pytest.raises(SpecError, match=r"broken: .* KeyError: 'no such layer'"):
        comparisons["broken"]
    rows = {line.split("│")[1].strip(): line for line in str(comparisons).splitlines() if "│" in line}
    assert re.search("diverges .* `1` is explained by", rows["port"])
    assert "tanh instead of none" in str(comparisons)
    assert {"the reference", "port", "half", "f64", "away"} <= {*rows}


def test_what_is_wrong_with_the_reference_is_said_once_and_of_no_candidate():
    with pytest.raises(SpecError, match="inputs are missing") as refused:
        compare(model(), {"half": "bfloat16", "port": model()})
    assert len(refused.value.problems) == 1


def test_a_verdict_tells_how_far_both_sides_lie_off_the_truth():
    right, wrong = (compare(model(), model(form), INPUTS) for form in ("none", "tanh"))
    pattern = r"largest error of output against exact values: candidate (\S+), the reference itself (\S+)"
    assert not re.search(pattern, str(right)), "its bits are the reference's"
    candidate, own = map(float, re.search(pattern, str(wrong)).groups())
    assert candidate > 100 * own > 0


def test_the_list_of_activations_is_a_function_that_a_port_can_fill():
    text = stub(prepare(model(), inputs=INPUTS).reference)
    assert "# (3, 13) float32, GELU (activation.py:" in text
    exec(text, namespace := {})
    assert list(namespace["port"](None)) == ["0", "1", "2", "output"]


# A model with a wrapper and a kernel of other files, and with a mask.
MASKED = """import torch
from tests.toys.called import halved

class Attention(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x, mask, scale):
        scaled = x * scale
        return halved(scaled * mask)["output"]

class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.attention, self.scale = Attention(), scale

    def forward(self, x):
        return self.attention(x, torch.ones_like(x).tril(), self.scale)
"""


def test_a_source_line_is_of_the_forward_and_not_of_what_it_calls(tmp_path, monkeypatch):
    (tmp_path / "masked.py").write_text(MASKED)
    monkeypatch.syspath_prepend(tmp_path)
    right, wrong = map(importlib.import_module("masked").Model, (1.0, 1.01))
    assert "the reference computes it at masked.py:7-8\n" in str(compare(right.eval(), wrong.eval(), INPUTS))
    assert "Attention (masked.py:5)" in stub(prepare(right, inputs=INPUTS).reference)


def counting(m, x):
    m.calls += 1
    return m.layer(x)


def test_what_a_pass_changes_of_a_module_is_put_back_after_it_was_timed():
    layers = {"layer": linear(7, 3), "calls": lambda: nn.Buffer(torch.zeros(()))}
    right, port = Of(counting, layers), Of(counting, layers)
    assert compare(right, {"port": port, "half": "bfloat16"}, INPUTS).milliseconds.keys() >= {"port", "half"}
    assert (float(right.calls), float(port.calls)) == (0, 0)


def test_a_candidate_that_fails_when_it_is_timed_keeps_its_verdict():
    calls = iter([double])

    def once(x):
        return next(calls, called.raises)(x)

    comparisons = compare(model(), {"once": once}, INPUTS)
    assert comparisons.passed
    assert comparisons.notes["times"].startswith("not measured: KeyError: 'no such layer' ")
