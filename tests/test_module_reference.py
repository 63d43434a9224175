"""A reference: what it may hold, take and return, and how it is refused."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import KINDS, Of, drawn, linear, reordered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of these modules

FLOAT8 = torch.float8_e4m3fn
ZEROS = {"output": np.zeros((3, 5), np.float32)}


def test_what_leaves_pytorch_is_refused():
    def function(m, x):
        return m.a(torch.from_numpy(np.sin(x.numpy())))

    with pytest.raises(SpecError, match=r"handed to NumPy, .* \(test_module_reference\.py:\d+\)$"):
        compare(layer(function), ZEROS, drawn(3, 7))


# What is said of what cannot be judged, and whom it blames.


def layer(function):
    return Of(function, {"a": linear(7, 5)}).eval()


def weight(**changes):
    """Return a linear layer with other attributes of its weight."""
    model = layer(lambda m, x: m.a(x))
    model.a.weight = nn.Parameter(model.a.weight.to(**changes), requires_grad=False)
    return model


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("a lock")


REFUSED = {
    "whole numbers": (
        lambda: layer(lambda m, x: m.a(x).argmax(-1)),
        "returns a tensor of torch.int64 but must",
    ),
    "nothing": (lambda: layer(lambda m, x: None), "returns a NoneType but must"),
    "float8": (lambda: layer(lambda m, x: m.a(x).to(FLOAT8)), "output is of torch.float8_e4m3fn"),
    "float8 weights": (lambda: weight(dtype=FLOAT8), "a.weight of the reference is of torch.float8"),
    "nested": (
        lambda: layer(lambda m, x: torch.nested.as_nested_tensor([m.a(x)[:2], m.a(x)[2:]])),
        "is a nested tensor but",
    ),
    "meta": (lambda: weight(device="meta"), "a.weight of the reference lies on the meta device"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5)).eval(), "0.weight of the reference is lazy"),
    "scripted": (lambda: torch.jit.trace(nn.Linear(7, 5).eval(), drawn(3, 7)), "is scripted or traced"),
    "8 bits": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(7, 5)).eval(), {nn.Linear}),
        "0 of the reference is a Linear of 8 bits",
    ),
    "raises": (
        lambda: layer(lambda m, x: m.a(x[:, ["\x1b[31m" + 9000 * "n"]])),
        r"the reference cannot be run .{,700} \(test_module_reference\.py:\d+\)$",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(name):
    make, message = REFUSED[name]
    with pytest.raises(SpecError, match=message) as caught:
        compare(make(), ZEROS, drawn(3, 7))
    (line,) = caught.value.problems
    assert line.isprintable()


def test_a_way_of_what_cannot_be_copied_is_refused():
    with pytest.raises(SpecError, match="the reference cannot be copied, as way 'bfloat16' needs it"):
        compare(Uncopyable(7, 5).eval(), way="bfloat16", inputs=drawn(3, 7))


class Pair(torch.autograd.Function):
    """Two results, of which one may be without a gradient, as of a kernel of cuDNN."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx, first, second):
        return 2 * first if second is None else 2 * first + 3 * second


class Pairs(nn.Module):
    def forward(self, x):
        return Pair.apply(x)


@dataclass
class Result:
    hidden: torch.Tensor
    rest: object = None


RETURNED = {
    "a result without a gradient": lambda m, x: m.pair(m.a(x))[0],
    "dataclass": lambda m, x: Result(m.a(x), [{1: x * 2, "1": x * 3, (1, 2): None}]),
    "complex": lambda m, x: torch.complex(m.a(x), m.a(x) * 2),
    "sparse": lambda m, x: m.a(x).to_sparse(),
    "vmap": lambda m, x: torch.func.vmap(m.a)(x),
    "a forward that differentiates": KINDS["forces_by_autograd"]()[0].function,
}


@pytest.mark.parametrize("name", RETURNED)
def test_whatever_holds_the_results_they_are_judged(name):
    model = Of(RETURNED[name], {"a": linear(7, 5), "inner": linear(7, 5), "pair": Pairs})
    inputs = drawn(3, 7)
    verdict = compare(model.eval(), reordered(model), inputs, gradients=True)
    assert verdict.passed, str(verdict)
    wrong = copy.deepcopy(model)
    for one in wrong.parameters():
        one.data *= 1.001
    assert compare(model, reordered(wrong), inputs, gradients=True).first


def test_what_torch_export_gives_is_a_reference_and_a_candidate():
    model = nn.Sequential(nn.Linear(7, 5), nn.GELU()).eval()
    exported = torch.export.export(model, (drawn(3, 7),)).module()
    assert compare(exported, reordered(model), drawn(3, 7)).passed
    assert compare(model, exported, drawn(3, 7)).passed


# Shapes and names.


class Positions(nn.Module):
    def __init__(self, wide):
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.place, self.head = wide, nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(x + self.place(torch.arange(7).expand(len(x) if self.wide else 1, 7)))


@pytest.mark.parametrize("gradients", [False, True])
def test_an_activation_of_another_shape_is_left_out_and_said(gradients):
    right, other = Positions(True).eval(), Positions(False).eval()
    verdict = compare(right, other, drawn(2, 7, 5), gradients=gradients)
    assert verdict.passed
    assert "left out: 'place' has shape (1, 7, 5) but must be (2, 7, 5)" in str(verdict)
    other.head.bias.data += 0.1
    assert compare(right, other, drawn(2, 7, 5)).first == "head"


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(SpecError, match=r"'output' has shape \(3, 4\) but must be \(3, 5\)"):
        compare(layer(lambda m, x: m.a(x)), layer(lambda m, x: m.a(x)[:, 1:]), drawn(3, 7))


def test_names_are_legible_and_short_in_a_verdict():
    key = "\x1b[31m" + 9000 * "n"

    def of(factor):
        model = layer(lambda m, x: {key: getattr(m, "\x1b[2J")(m.a(x)) * factor, "k" * 9000: x * factor})
        model.add_module("\x1b[2J", nn.Identity())
        return model

    said = str(compare(of(1.0), of(1.1), drawn(3, 7)))
    assert all(line.isprintable() and len(line) < 1100 for line in said.splitlines())
    assert not any(len(word) > 200 for word in said.split())


# Inputs, and shapes that rounding decides.


class Scaled(nn.Module):
    config = SimpleNamespace(image_size=5, vocab_size=7, vision_config=SimpleNamespace(num_channels=2))

    def forward(self, pixel_values, input_values=None, input_ids=None):
        return 2.5 * pixel_values


def test_standard_inputs_follow_what_a_module_takes_and_states():
    inputs = prepare(Scaled().eval()).reference.inputs
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert shapes == {"input_ids": (3, 11), "pixel_values": (3, 2, 5, 5), "input_values": (3, 5003)}


class Chosen(nn.ReLU):
    """Which elements are kept is decided by rounding."""

    def forward(self, x):
        return super().forward(x[torch.exp(x) >= torch.exp(x)])


def test_an_activation_whose_shape_rounding_decides_is_undetermined():
    model, zeros = nn.Sequential(Chosen()).eval(), np.zeros(13, np.float32)
    assert compare(model, {"0": zeros}, torch.ones(13)).status == "undetermined"
