from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear
from tests.toys.modules import activations

X = drawn(3, 7, 12)
torch.manual_seed(1)
MODEL = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)).eval()
ARRAYS = activations(MODEL, {"input": X})


def test_names_are_mapped_by_patterns():
    foreign = {f"blocks/{i}/{name}": ARRAYS[i] for i, name in (("0", "in"), ("2", "in"), ("3", "act"))}
    names = {"blocks/{i}/in": "{i}", "blocks/{i}/act": "{i}"}
    verdict = compare(MODEL, foreign, X, names=names, declared=["output"])
    assert verdict.passed
    assert [row.tensor for row in verdict.table if row.status == "agrees"] == ["0", "2", "3"]


def test_names_are_proposed_by_what_tensors_hold():
    # The candidate splits off the heads, which are joined first. A bug does not keep a tensor from its name.
    split = ARRAYS["0"].reshape(3, 7, 2, 6).transpose(0, 2, 1, 3)
    foreign = {"last": ARRAYS["4"] + 0.01, "q": split}
    comparison = prepare(MODEL, foreign, X)
    assert [*comparison.proposed.items()] == [("q", "0 : 0 2 1 3"), ("last", "4")]  # in order of computation
    with pytest.raises(SpecError, match=r"such as q = 0 : 0 2 1 3, last = 4"):
        comparison.verdict()
    assert compare(MODEL, foreign, X, names=comparison.proposed).first == "4"
    with pytest.raises(
        SpecError, match=r"'q' has shape .* which axis order '0 1' does not turn into \(3, 7, 12\)"
    ):
        prepare(MODEL, foreign, X, names={"q": "0 : 0 1"})


def attention(weights):
    def forward(m, x):
        y = m.layer(x) if weights else m.layer.double()(x.double()).float()
        return y, (y.softmax(-1) if weights else None)

    return nn.Sequential(Of(forward, {"layer": linear(12, 12)})).eval()


@pytest.mark.parametrize("weights", [True, False])
def test_a_pair_has_the_names_of_a_pair_whose_second_is_none(weights):
    verdict = compare(
        attention(weights), attention(not weights), X, declared=["output[1]"] if weights else []
    )
    assert verdict.row("output[0]" if weights else "output").status == "agrees"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_layer_is_told_with_its_names(dtype):
    def layers(*norms):
        torch.manual_seed(1)
        a, b, c = nn.Conv1d(7, 12, 3), nn.Conv1d(12, 7, 3), nn.Conv1d(7, 5, 3)
        return nn.Sequential(OrderedDict(a=a, norm=norms[0], act=nn.Tanh(), b=b, other=norms[1], c=c)).eval()

    norms = nn.BatchNorm1d(12), nn.BatchNorm1d(7)
    for norm in norms:
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
    model = layers(*norms)
    merged = layers(nn.Identity(), nn.Identity())
    merged.a, merged.b = fuse_conv_bn_eval(model.a, norms[0]), fuse_conv_bn_eval(model.b, norms[1])
    model, merged = model.to(dtype), merged.to(dtype)
    x = X.to(dtype)
    verdict = compare(model, merged, x)
    assert verdict.first == "a"
    assert "`a` holds the values of `norm`" in str(verdict)
    assert "a = norm, b = other" in str(verdict)
    named = compare(model, merged, x, names={"a": "norm", "b": "other"})
    assert named.passed or dtype is torch.bfloat16  # which rounds the merged weights
