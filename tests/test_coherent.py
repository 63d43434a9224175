"""What no element shows in a half precision, the mean of a row or a channel does."""

import pytest
import torch
from torch import nn

from concord.conformance.compare import compare
from concord.conformance.compare.coherent import groups
from concord.conformance.verdict import NO_ELEMENT
from tests.test_arithmetic import drawn


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.function(x)


def judged(right, port, x, dtype):
    modules = (Function(function).eval().to(dtype) for function in (right, port))
    return compare(*modules, {"x": x.to(dtype)})


def root(x, dim=-1):
    return torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)


def normalized(x):
    return (x.float() * root(x.float())).to(x.dtype)


def channels(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.var((0, 2), keepdim=True) + 1e-3)).to(x.dtype)


def in_low_precision(function):
    """Return the function with its inverse root, or its constant, in the precision of its input."""

    def port(x):
        wide = x.float()
        if function is normalized:
            scale = root(wide)
        elif function is channels:
            scale = torch.rsqrt(wide.var((0, 2), keepdim=True) + 1e-3)
        return (wide * scale.to(x.dtype).float()).to(x.dtype)

    return port


def otherwise(function):
    """Return the function computed in another way, which is right."""

    def port(x):
        wide = x.double()
        if function is normalized:
            return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)).to(x.dtype)
        return (wide / torch.sqrt(wide.var((0, 2), keepdim=True) + 1e-3)).to(x.dtype)

    return port


INPUTS = {normalized: (61, 1021), channels: (3, 37, 509)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("function", "dtype"), [(normalized, torch.bfloat16), (channels, torch.float16)])
def test_a_scale_of_few_digits_is_found_though_no_element_shows_it(function, dtype, seed):
    x = drawn(*INPUTS[function], seed=seed) * (1 + drawn(*INPUTS[function][:-1], 1, seed=9).abs())
    wrong = judged(function, in_low_precision(function), x, dtype)
    assert wrong.first == "output"
    assert NO_ELEMENT in str(wrong)
    assert not wrong.explained().cause, "each hypothesis would explain elements that nothing is wrong with"
    right = judged(function, otherwise(function), x, dtype)
    assert right.status == "agrees"
    assert right.worst < 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_constant_may_be_rounded_to_the_dtype_of_its_operation(dtype):
    def rounded(x):
        return (x.float() * float(torch.tensor(0.3535533905932738).to(x.dtype))).to(x.dtype)

    assert judged(lambda x: x * 0.3535533905932738, rounded, drawn(61, 1021), dtype).status == "agrees"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "function",
    [
        nn.functional.gelu,
        nn.functional.silu,
        lambda x: torch.softmax(x, -1),
        lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: x.mean(-1, keepdim=True) + x * x,
        lambda x: torch.exp(x) / (1 + torch.exp(x)),
    ],
)
def test_a_program_that_rounds_less_often_agrees(function, dtype):
    """As one does whose steps are fused."""
    x = drawn(37, 509)
    x[5:31] = x[5]  # rows of padding are rounded alike
    right = judged(function, lambda x: function(x.double()).to(x.dtype), x, dtype)
    assert right.status == "agrees"
    assert right.worst < 0.6


def test_groups_are_rows_channels_and_images():
    assert [*groups((2, 3, 5, 17))] == [(3,), (2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]
    assert not any([*groups(shape)] for shape in ((3, 5), (17,), ()))
