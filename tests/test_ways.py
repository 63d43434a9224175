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


@pytest.mark.parametrize(
    ("name", "way"), [("bert", "padded"), ("llama", "padded"), ("llama", "padded-left"), ("llama", "cached")]
)
def test_tokens_may_come_with_more_padding_or_one_by_one(name, way):
    pytest.importorskip("transformers")
    verdict = compare(architecture(name), inputs=inputs_of(name), way=way)
    assert verdict.passed, verdict


def test_a_position_that_padding_moves_is_found():
    pytest.importorskip("transformers")
    verdict = compare(architecture("bert"), inputs=inputs_of("bert"), way="padded-left")
    assert (verdict.status, verdict.first) == ("diverges", "output[last_hidden_state]")
