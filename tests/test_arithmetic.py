"""What rounding may do in ATen operations: sums of equal terms, and gradients in which all cancels."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from concord.conformance.compare import compare

HEADS, WIDTH = 3, 61


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(terms):
    """Return sums over the last axis, each term added to those before."""
    return torch.from_numpy(np.add.accumulate(terms.detach().numpy(), -1)[..., -1].copy())


class Efficient(torch.autograd.Function):
    """Causal attention whose backward takes row sums of outputs and their gradients."""

    wrong = False

    @staticmethod
    def forward(ctx, q, k, v):
        scores = (q / q.shape[-1] ** 0.5) @ k.mT
        weights = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf).softmax(-1)
        out = weights @ v
        ctx.save_for_backward(q, k, v, weights, out)
        return out

    @staticmethod
    def backward(ctx, back):
        q, k, v, weights, out = ctx.saved_tensors
        given = one_by_one(back[..., :, None, :] * v[..., None, :, :])
        total = one_by_one((back * out).flip(-1))[..., None] * (1 + 2**-12 * Efficient.wrong)
        scores = weights * (given - total) / q.shape[-1] ** 0.5
        return scores @ k, scores.mT @ q, weights.mT @ back


class Attention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(1)
        self.attention = attention
        self.q, self.k, self.v = (nn.Linear(7, HEADS * WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.attention(q, k, v).transpose(1, 2).flatten(2)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("wrong", [False, True])
def test_where_a_query_sees_one_key_what_cancels_is_the_measure(seed, wrong, monkeypatch):
    monkeypatch.setattr(Efficient, "wrong", wrong)
    right, port = (Attention(one).eval() for one in (causal, Efficient.apply))
    verdict = compare(right, port, {"x": drawn(41, 1, 7, seed=seed)}, gradients=True)
    assert (verdict.status == "agrees") is not wrong
    assert wrong or verdict.worst < 0.6


class Rows(torch.autograd.Function):
    """A product whose weights' gradient is added up row by row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, back):
        x, weight = ctx.saved_tensors
        return back @ weight.mT, one_by_one(
            (x.flatten(0, 1)[:, :, None] * back.flatten(0, 1)[:, None]).permute(1, 2, 0)
        )


class Projected(nn.Module):
    def __init__(self, product):
        super().__init__()
        torch.manual_seed(1)
        self.product, self.weight = product, nn.Parameter(torch.randn(11, 13))
        self.norm = nn.LayerNorm(11)

    def forward(self, x):
        return self.product(self.norm(x), self.weight).sum(1)


@pytest.mark.parametrize("seed", range(3))
def test_equal_rows_are_rounded_alike(seed):
    """Rows of padding are equal: their terms drift in a sum that is added up one by one."""
    x = drawn(1, 509, 11, seed=seed)
    x[:, 31:] = x[0, 31]
    verdict = compare(Projected(torch.matmul).eval(), Projected(Rows.apply).eval(), {"x": x}, gradients=True)
    assert verdict.status == "agrees"
    assert verdict.worst < 0.6


MEASURED = {
    "tanh": 3.2,
    "sigmoid": 2.9,
    "exp": 2.5,
    "erf": 1.3,
    "sin": 1.9,
    "cos": 1.9,
    "rsqrt": 2.1,
    "log1p": 1.3,
    "softplus": 3.1,
    "silu": 3.3,
}
"""Unit roundoffs by which functions of CUDA 13.0 err at most in float32, measured on an H200."""


class Elementwise(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", MEASURED)
def test_functions_may_err_by_what_a_gpu_makes_of_them(name):
    function = getattr(torch, name, None) or getattr(F, name)
    x = 3 * drawn(3, 1009)
    x = x.abs() if name in ("rsqrt", "log1p") else x

    def port(x, units=MEASURED[name]):
        return (function(torch.from_numpy(x).double()) * (1 + units * 2**-24)).float().numpy()

    model = Elementwise(function).eval()
    verdict = compare(model, port, {"x": x})
    assert verdict.status == "agrees"
    assert verdict.worst < 0.6
    assert compare(model, lambda x: port(x, 2.0**11), {"x": x}).status == "diverges"
