from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord import compare
from tests.toys.architectures import architecture, inputs_of


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.joined, self.out = nn.Linear(10, 30), nn.Linear(10, 3)

    def forward(self, x):
        query, key, value = self.joined(x).unflatten(-1, (3, 2, 5)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def attending():
    torch.manual_seed(0)
    return Attending().eval(), (torch.randn(3, 7, 10),)


@pytest.mark.parametrize("way", ["math", "flash", "math+bfloat16"])
def test_attention_by_another_kernel_agrees(way):
    model, inputs = attending()
    assert compare(model, inputs=inputs, way=way).passed


@pytest.mark.parametrize(("engine", "needs"), [("onnx", "onnxscript"), ("openvino", "openvino")])
def test_an_engine_runs_what_is_exported(engine, needs):
    pytest.importorskip(needs)
    model, inputs = attending()
    verdict = compare(model, inputs=inputs, way=engine)
    assert verdict.passed, verdict
    assert verdict.row("output").ratio > 0


def test_more_padding_agrees_where_it_moves_no_position():
    # Of a decoder, test_log_probabilities.py judges each way to hand over its tokens.
    pytest.importorskip("transformers")
    right, moved = (
        compare(architecture("bert"), inputs=inputs_of("bert"), way=way) for way in ("padded", "padded-left")
    )
    assert right.passed, right
    assert moved.first == "output[last_hidden_state]"


def test_a_module_that_keeps_a_computed_tensor_is_copied():
    # PyTorch copies no tensor with a history, such as the weight that this computes before each call.
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = torch.nn.utils.weight_norm(nn.Linear(7, 5))
    model = nn.Sequential(layer, nn.Linear(5, 3)).eval()
    layer.seen = [layer(torch.randn(2, 7))]
    assert compare(model, inputs=torch.randn(3, 7), way="bfloat16").passed


class Undisturbed(nn.Linear):
    """Is never compiled."""

    forward = torch.compiler.disable(nn.Linear.forward)


@pytest.mark.parametrize(
    ("way", "layer"), [("math", nn.Linear), ("flash", nn.Linear), ("compile", Undisturbed)]
)
def test_a_way_that_changes_no_kernel_proves_nothing(way, layer, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    verdict = compare(layer(7, 5).eval(), inputs=torch.randn(3, 7), way=way)
    assert verdict.status == "undetermined"
    assert f"the way {way} changes nothing" in str(verdict)
