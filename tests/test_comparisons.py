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

INPUTS = (torch.randn(3, 7, generator=torch.Generator().manual_seed(0)),)


def model(form="none"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(form), nn.Linear(13, 5)).eval()


def double(x):
    return {"output": model().double()(torch.from_numpy(x).double()).detach().numpy().astype("float32")}


def test_a_table_tells_which_candidates_agree_why_others_do_not_and_how_long_a_pass_takes():
    comparisons = compare(
        model(),
        {
            **{"port": model("tanh"), "half": "bfloat16", "away": "cuda", "f64": double},
            **{"raising": called.raises, "dying": "tests.toys.called:dies"},
        },
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
    with pytest.raises(SpecError, match="away: way is 'cuda' but PyTorch sees no CUDA device"):
        comparisons["away"]
    statuses = {result.backend: result.status for result in comparisons.results()}
    assert (statuses["away"], statuses["raising"], statuses["dying"]) == ("missing", "error", "crashed")
    assert "KeyError: 'no such layer'" in comparisons.failures["raising"].detail
    rows = {line.split("│")[1].strip(): line for line in str(comparisons).splitlines() if "│" in line}
    assert re.search("diverges .* `1` is explained by", rows["port"])
    assert "tanh instead of none" in str(comparisons)
    assert {"the reference", "port", "half", "f64", "away"} <= {*rows}


def test_what_is_wrong_with_the_reference_is_said_once_and_of_no_candidate():
    with pytest.raises(SpecError, match="inputs are missing") as refused:
        compare(model(), {"half": "bfloat16", "port": model()})
    assert len(refused.value.problems) == 1


def test_arrays_by_name_are_one_candidate():
    assert compare(model(), {"output": double(INPUTS[0].numpy())["output"]}, INPUTS).passed


def test_a_verdict_tells_how_far_both_sides_lie_off_the_truth():
    right, wrong = (compare(model(), model(form), INPUTS) for form in ("none", "tanh"))
    pattern = (
        r"largest error of output against exact values: candidate (\S+), the reference itself ([^;]+)"
        r"; tolerance ÷ error: median (\S+), smallest (\S+)"
    )
    assert not re.search(pattern, str(right)), "its bits are the reference's"
    candidate, own, median, least = map(float, re.search(pattern, str(wrong)).groups())
    assert candidate > 100 * own > 0
    assert least < 1, "it diverges"
    assert least < median


def test_the_list_of_activations_is_a_function_that_a_port_can_fill():
    text = stub(prepare(model(), inputs=INPUTS).reference)
    assert "# (3, 13) float32, GELU (activation.py:" in text
    exec(text, namespace := {})
    assert list(namespace["port"](None)) == ["0", "1", "2", "output"]


# The code of a model and of a library, whose mask and kernel it calls and whose wrapper it has.
FILES = {
    "library.py": """
import functools, torch

def wrapper(forward):
    @functools.wraps(forward)
    def wrapped(*arguments):
        return forward(*arguments)
    return wrapped

def mask_of(x):
    return torch.ones_like(x).tril()

def kernel(q, mask, scale):
    return (q * scale * mask).softmax(-1)
""",
    "masked.py": """
from torch import nn
from library import kernel, mask_of, wrapper

class Attention(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.q, self.scale = nn.Linear(7, 7), scale

    @wrapper
    def forward(self, x, mask):
        q = self.q(x)
        return kernel(q, mask, self.scale)

class Model(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.attention = Attention(scale)

    def forward(self, x):
        return self.attention(x, mask_of(x))
""",
}


def test_a_source_line_is_of_the_model_and_not_of_a_library_that_it_calls(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    masked = importlib.import_module("masked")
    right, port = masked.Model().eval(), masked.Model(1.01).eval()
    port.load_state_dict(right.state_dict())
    assert "\n  the reference computes it at masked.py:13\n" in str(compare(right, port, INPUTS))
    assert "Attention (masked.py:10)" in stub(prepare(right, inputs=INPUTS).reference)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_what_a_pass_changes_of_a_module_is_put_back_after_it_was_timed():
    torch.manual_seed(0)
    right, port = Counting().eval(), Counting().eval()
    port.load_state_dict(right.state_dict())
    assert compare(right, {"port": port, "half": "bfloat16"}, INPUTS).milliseconds.keys() >= {"port", "half"}
    assert (float(right.calls), float(port.calls)) == (0, 0)
