import pytest
import torch
from torch.nn import functional as F

from concord.conformance.compare import compare
from concord.conformance.judging.verdict import NO_ELEMENT
from tests.toys.kinds import Of, drawn, parameter


def judged(right, port, x, dtype):
    modules = (Of(lambda m, x, f=f: f(x), {"w": parameter(3)}).to(dtype) for f in (right, port))
    return compare(*modules, {"x": x.to(dtype)})


def of_rows(x):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def of_channels(x):
    return torch.rsqrt(x.var((0, 2), keepdim=True) + 1e-3)


def scaled(root, wide=torch.float32, rounded=False):
    # If rounded, the inverse root is first rounded to the dtype of the input.
    def function(x):
        factor = root(x.to(wide))
        return (x.to(wide) * (factor.to(x.dtype).to(wide) if rounded else factor)).to(x.dtype)

    return function


@pytest.mark.parametrize(
    ("root", "dtype", "shape"),
    [(of_rows, torch.bfloat16, (61, 1021)), (of_channels, torch.float16, (3, 37, 509))],
)
def test_a_scale_of_few_digits_is_found_though_no_element_shows_it(root, dtype, shape):
    x = drawn(*shape) * (1 + drawn(*shape[:-1], 1, seed=9).abs())
    wrong = judged(scaled(root), scaled(root, rounded=True), x, dtype)
    assert wrong.first == "output"
    assert NO_ELEMENT in str(wrong)
    assert not wrong.explained().cause, "each hypothesis would explain elements that nothing is wrong with"
    right = judged(scaled(root), scaled(root, torch.float64), x, dtype)
    assert right.status == "agrees"
    assert right.worst < 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_constant_may_be_rounded_to_the_dtype_of_its_operation(dtype):
    def rounded(x):
        return (x.float() * float(torch.tensor(0.3535533905932738).to(x.dtype))).to(x.dtype)

    assert judged(lambda x: x * 0.3535533905932738, rounded, drawn(61, 1021), dtype).status == "agrees"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_program_that_rounds_less_often_agrees(dtype):
    # As a program with fused steps does.
    def function(x):
        return {
            "gelu": F.gelu(x),
            "softmax": torch.softmax(x, -1),
            "norm": F.layer_norm(x, x.shape[-1:]),
            "mean": x.mean(-1, keepdim=True) + x * x,
            "sigmoid": torch.exp(x) / (1 + torch.exp(x)),
        }

    x = drawn(37, 509)
    x[5:31] = x[5]  # equal rows, as in padding, are rounded alike
    right = judged(function, lambda x: {k: y.to(dtype) for k, y in function(x.double()).items()}, x, dtype)
    assert right.status == "agrees"
    assert right.worst < 0.6


def test_a_run_that_overflows_bounds_no_mean():
    # Scores beyond float16 become NaN here, but not where the queries were scaled before.
    def right(x):
        return (x @ x.mT / 64).float().softmax(-1).to(x.dtype) @ x

    def port(x):
        return ((x / 64) @ x.mT).float().softmax(-1).to(x.dtype) @ x

    x = torch.where(torch.arange(17)[:, None] < 5, 251, 1) * drawn(3, 17, 23)
    assert judged(right, port, x, torch.float16).passed
