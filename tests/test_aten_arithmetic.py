import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from concord.conformance.compare import assert_same, aten_arithmetic, compare, prepare
from concord.conformance.compare.aten_arithmetic import ExactMode, Perturbed, Rounded, computed, value_of
from concord.conformance.compare.module_reference import ModuleReference
from concord.conformance.judging.expectation import is_gradient
from tests.toys.kinds import Of, conv, drawn, linear, parameter, reordered


def one_by_one(terms):
    return torch.from_numpy(np.add.accumulate(terms.detach().numpy(), -1)[..., -1].copy())


class Efficient(torch.autograd.Function):
    """Causal attention whose backward pass uses row sums of outputs times gradients."""

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
        gradient = one_by_one(back[..., :, None, :] * v[..., None, :, :])
        total = one_by_one((back * out).flip(-1))[..., None] * (1 + 2**-12 * Efficient.wrong)
        scores = weights * (gradient - total) / q.shape[-1] ** 0.5
        return scores @ k, scores.mT @ q, weights.mT @ back


def attention(function):
    def forward(m, x):
        q, k, v = (layer(x).unflatten(-1, (3, 61)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        return function(q, k, v).transpose(1, 2).flatten(2)

    return Of(forward, dict.fromkeys("qkv", linear(7, 183)))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("wrong", [False, True])
def test_where_a_query_sees_one_key_what_cancels_is_the_measure(wrong, monkeypatch):
    monkeypatch.setattr(Efficient, "wrong", wrong)
    verdict = compare(attention(causal), attention(Efficient.apply), {"x": drawn(41, 1, 7)}, gradients=True)
    assert (verdict.status == "agrees") is not wrong
    assert wrong or verdict.worst < 0.6


class Rows(torch.autograd.Function):
    """Accumulates the gradient of its weights row by row."""

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


def projected(product):
    layers = {"norm": lambda: nn.LayerNorm(11), "weight": parameter(11, 13)}
    return Of(lambda m, x: product(m.norm(x), m.weight).sum(1), layers)


def test_equal_rows_are_rounded_alike():
    # Rows of padding are equal, so their terms drift in a sequential sum.
    x = drawn(1, 509, 11)
    x[:, 31:] = x[0, 31]
    verdict = compare(projected(torch.matmul), projected(Rows.apply), {"x": x}, gradients=True)
    assert verdict.status == "agrees"
    assert verdict.worst < 0.6


# Largest errors of CUDA 13.0's float32 functions, in unit roundoffs, measured on an H200.
MEASURED = {
    **{"tanh": 3.2, "sigmoid": 2.9, "exp": 2.5, "erf": 1.3, "sin": 1.9, "cos": 1.9},
    **{"rsqrt": 2.1, "log1p": 1.3, "softplus": 3.1, "silu": 3.3},
}


@pytest.mark.parametrize("name", MEASURED)
def test_functions_may_err_by_what_a_gpu_makes_of_them(name):
    function = getattr(torch, name, None) or getattr(F, name)
    x = 3 * drawn(3, 1009)
    x = x.abs() if name in ("rsqrt", "log1p") else x

    def port(x, units=MEASURED[name]):
        return (function(torch.from_numpy(x).double()) * (1 + units * 2**-24)).float().numpy()

    model = Of(lambda m, x: function(x), {})
    verdict = compare(model, port, {"x": x})
    assert verdict.status == "agrees"
    assert verdict.worst < 0.6
    assert compare(model, lambda x: port(x, 2.0**11), {"x": x}).status == "diverges"


@pytest.mark.parametrize(
    ("name", "root", "term"), [("lgamma", 1.0, torch.log), ("digamma", 1.4616321, torch.reciprocal)]
)
def test_a_function_errs_by_its_terms_where_it_is_zero(name, root, term):
    function = getattr(torch, name)

    def port(m, x, by=0.0):
        return function(x + 3) - term(x) - term(x + 1) - term(x + 2) + by

    right = Of(lambda m, x: function(x), {})
    x = (root + drawn(3, 37) / 2**12,)
    assert compare(right, Of(port, {}), x).status == "agrees"
    assert compare(right, Of(partial(port, by=1e-4), {}), x).status == "diverges"


# Noise.


@pytest.mark.parametrize(("units", "agrees"), [(6, True), (30, False)])
def test_an_error_that_all_elements_share_is_one_error(units, agrees):
    # A mean may err by one rounding for every two terms. Here all 1009 elements share that error, each well
    # within its own tolerance.
    x = drawn(2, 1009) / 8 + 3

    def port(x):
        wide = x.astype(np.float64)
        mean = wide.mean(1, keepdims=True) * (1 + units * 2.0**-24 * math.sqrt(1009 / 9))
        return {"output": (wide - mean).astype(np.float32)}

    verdict = compare(Of(lambda m, x: x - x.mean(1, keepdim=True), {}), port, {"x": x})
    assert (verdict.status == "agrees") is agrees
    assert verdict.table[0].local.rms > 4


def own_errors(row, function, *x, **layers):
    """Errors of a module's own run in a row of the verdict, as a multiple of sigma."""
    model = Of(function, layers)
    comparison = prepare(model, model, x, gradients=is_gradient(row))
    comparison.allow_same_bits = False
    return comparison.verdict().row(row).deciding.rms


def counts(x):
    return torch.cumsum(torch.histc((x[:, 0] > 0).float(), 2, 0, 1), 0).to(torch.int32)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x @ x.T,
        lambda m, x: F.layer_norm(x, (x.shape[-1],)),
        lambda m, x: F.conv1d(x[None], torch.ones(3, len(x), 2)),
        lambda m, x: torch.cumsum(torch.exp(x), 0),
        lambda m, x: (x > 0) + ~(x > 0) * torch.exp(x),
        lambda m, x: F.grouped_mm(x[:, 1:].contiguous(), torch.ones(2, 12, 8), offs=counts(x)),
        lambda m, x: torch.view_as_real(torch.fft.fft(x).conj() * (1 + 0.5j)),
    ],
)
def test_sigma_is_as_large_as_what_float32_does(function):
    assert 0.05 < own_errors("output", function, drawn(11, 13, seed=1)) < 2.0


def test_sigma_of_gradients_is_as_large_as_what_fused_attention_does_with_sharp_weights():
    def attention(m, query, key):
        return F.scaled_dot_product_attention(query, key, m.value)

    query, key, value = (drawn(2, 3, 61, 31, seed=seed) * by for seed, by in enumerate((3, 3, 1)))
    errors = own_errors("gradients.value", attention, query, key, value=lambda: nn.Parameter(value))
    assert 0.05 < errors < 2.0


def test_what_a_half_precision_delivered_may_have_been_used_before_it_was_rounded():
    reference = ModuleReference(nn.Sequential(nn.ReLU(), nn.ReLU()), args=(torch.ones(11).bfloat16(),))

    def apart(arithmetic):
        results = {}
        reference.compute(arithmetic, results.__setitem__, {"0": np.ones(11)}.get)
        return abs(results["1"] - 1).max()

    assert apart(ExactMode()) == 0 < 2**-10 < apart(Perturbed(0)) <= 2**-8


def test_what_is_changed_in_place_keeps_its_dtype_whoever_holds_it():
    outside = torch.zeros(7)
    with Rounded():
        outside.copy_(computed(torch.ones(7).bfloat16()).add_(torch.tensor([2.0**-9])))
    assert (outside == 1).all()


# In-place changes, also through views.

CHANGES = {
    "a number": lambda y, z: y.__setitem__((slice(None), slice(1, 3)), 0.5),
    "a mask": lambda y, z: y.__setitem__(y > 0, 0),
    "index_put_": lambda y, z: y.index_put_((torch.tensor([0, 0]),), z[:2], accumulate=True),
    "scatter_reduce_": lambda y, z: y.scatter_reduce_(1, torch.tensor([[0, 0]]), z[:1], "amax"),
    "copy_ into a view": lambda y, z: y.narrow(1, 2, 3).copy_(z[:, :3]),
    "activations": lambda y, z: F.elu(y[0].tanh_(), inplace=True),
    "diagonal": lambda y, z: y.diagonal().add_(1),
    "as_strided": lambda y, z: y.as_strided((3,), (8,)).fill_(1),
    "max out": lambda y, z: torch.max(z, 0, out=(y[0], torch.empty(7, dtype=torch.long))),
    "data": lambda y, z: y.data.mul_(2),
    "other data": lambda y, z: setattr(y, "data", z),
    "item": lambda y, z: y.mul_(z[0, 0].item()),
    "a text": lambda y, z: y.mul_(len(f"{z[0, 0]:.3f}") if repr(z) else 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_place_changes_in_every_arithmetic(change):
    x, z = drawn(5, 7), drawn(5, 7, seed=1)
    expected = x.double()
    CHANGES[change](expected, z.double())
    for arithmetic in (ExactMode(), Rounded(), Perturbed(0)):
        with arithmetic:
            y = computed(x).clone()
            CHANGES[change](y, computed(z))
            after = y * 1.0
        assert float((value_of(after) - expected).abs().max()) < 2**-16


@pytest.mark.parametrize("followed", [True, False])
def test_a_long_sum_may_be_added_up_in_the_order_of_its_terms(monkeypatch, followed):
    # Partial sums grow large where terms of one sign stand together, although everything cancels in the end.
    if not followed:
        monkeypatch.setattr(aten_arithmetic, "LONG", math.inf)
    x = 1 + drawn(7, 509) / 8
    signs = torch.where(torch.arange(509) < 254, 1.0, -1.0)
    right = linear(509, 13)().eval()
    right.weight.data = (1 + drawn(13, 509) / 8) * signs
    port = Of(lambda m, x: one_by_one(x[:, None] * m.a.weight) + m.a.bias, {"a": lambda: right})
    verdict = compare(right, {"output": port(x).detach().numpy()}, x)
    assert verdict.passed == followed, str(verdict)


def test_samples_share_the_deviations_of_sums(monkeypatch):
    # Deviations take as long as the sums themselves, and sixteen samples would each derive them.
    calls, deviation = [], aten_arithmetic._deviation
    monkeypatch.setattr(aten_arithmetic, "_deviation", lambda *sums: calls.append(sums) or deviation(*sums))
    own_errors("gradients.a.weight", lambda m, x: m.a(x), drawn(3, 67), a=linear(67, 5))
    assert len(calls) == 6, "of a product and two gradients, end to end and from the candidate's own tensors"


MASKED = {
    "baddbmm": lambda q, k, mask: torch.baddbmm(mask, q, k.mT),
    "div": lambda q, k, mask: (q @ k.mT + mask) / 1.7,
    "log": lambda q, k, mask: q @ k.mT + mask.exp().log(),
}


@pytest.mark.parametrize("scores", MASKED.values(), ids=MASKED)
def test_rounding_leaves_an_infinite_score_infinite(scores):
    # Otherwise no row with a hidden key is judged, and a port without the mask agrees.
    def attending(m, x, mask):
        return scores(m.a(x), x, mask).softmax(-1) @ x

    def blind(m, x, mask):
        return attending(m, x, torch.zeros_like(mask))

    mask = torch.zeros(3, 7, 7).masked_fill(torch.arange(7) > 4, -math.inf)
    inputs = {"x": drawn(3, 7, 5), "mask": mask}
    right, wrong = (Of(forward, {"a": linear(5, 5)}) for forward in (attending, blind))
    assert_same(right, reordered(right), inputs)
    assert compare(right, wrong, inputs).first == "output"


REDUCED = {
    "mean": lambda rows: np.add.accumulate(rows)[-1] / np.float32(len(rows)),
    "prod": lambda rows: np.multiply.accumulate(rows)[-1],
    "amax": lambda rows: -(-rows).min(0),
}


@pytest.mark.parametrize("kind", REDUCED)
def test_scattered_terms_are_reduced_in_any_order(kind):
    # Counted as a sum of ones, a mean had a single term, and a maximum of -inf and terms was not judged.
    x, start = 1 + drawn(1009, 5) / 53, -math.inf if kind == "amax" else 1.0
    index = (torch.arange(1009) % 3)[:, None].expand(1009, 5)

    def reduced(m, x):
        target = torch.full((3, 5), start)
        return target.scatter_reduce(0, index, x, kind, include_self=kind == "amax") * m.gain

    def port(x, sign=1):
        return {"output": np.stack([REDUCED[kind](sign * x[group::3][::-1]) for group in range(3)])}

    model = Of(reduced, {"gain": lambda: nn.Parameter(torch.ones(()))})
    model.gain.data.fill_(1)
    assert_same(model, port, x)
    assert compare(model, lambda x: port(x, -1), x).first == "output"


def test_a_module_may_copy_a_tensor_deeply():
    model = Of(lambda m, x: m.a(copy.deepcopy({"cache": [x]})["cache"][0]), {"a": linear(7, 5)})
    assert_same(model, reordered(model), drawn(3, 7), gradients=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # raised within PyTorch
@pytest.mark.parametrize("derivative", [torch.func.jacfwd, torch.func.hessian])
def test_a_module_may_differentiate_forwards(derivative):
    model = Of(lambda m, x: derivative(lambda row: m.a(row).tanh().sum())(x[0]), {"a": linear(7, 5)})
    assert_same(model, reordered(model), drawn(3, 7))


def branched(limit, count=3):
    def function(m, x):
        y = m.a(x)
        y = torch.cond(y.sum() < limit, torch.tanh, torch.exp, (y,))
        if not count:  # PyTorch computes no gradient of a loop
            return y
        return torch.while_loop(lambda n, y: n < count, lambda n, y: (n + 1, m.a(y)), (torch.tensor(0), y))[1]

    return Of(function, {"a": linear(7, 7)}).eval()


@pytest.mark.parametrize("count", [0, 3])
def test_control_flow_as_operations_runs_the_branch_that_is_taken(count):
    def by_python(m, x):
        y = m.a(x).tanh()
        for _ in range(count):
            y = m.a(y)
        return y

    right, port = branched(1e3, count), Of(by_python, {"a": linear(7, 7)}).eval()
    verdict = compare(right, port, drawn(3, 7), gradients=not count)
    assert verdict.passed, verdict
    text = str(compare(right, branched(-1e3, count), drawn(3, 7)))
    assert "first at output" in text
    assert ("hooks: the candidate cannot run with them" in text) == bool(count)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_is_computed_step_by_step():
    def attending(slope):
        places = torch.arange(7)

        def function(q, k, v):
            return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + slope * (i - j))

        def by_hand(q, k, v):
            scores = q @ k.mT / 61**0.5 + slope * (places[:, None] - places)
            return scores.softmax(-1) @ v

        return function, by_hand

    (right, by_hand), (wrong, _) = attending(0.5), attending(0.25)
    assert_same(attention(right), attention(by_hand), drawn(5, 7, 7))
    assert compare(attention(right), attention(wrong), drawn(5, 7, 7)).first == "output"


def sampled_by_hand(m, x, grid):
    y = m.a(x)
    rows, columns = y.shape[2:]
    across, down = ((grid[..., axis] + 1) * size / 2 - 0.5 for axis, size in ((0, columns), (1, rows)))
    weights = torch.relu(1 - abs(down[..., None] - torch.arange(rows)))[..., None]
    weights = weights * torch.relu(1 - abs(across[..., None] - torch.arange(columns)))[..., None, :]
    return torch.einsum("bijhw,bchw->bcij", weights, y)


def test_places_just_beyond_the_border_are_rounded_too():
    layers, grid = {"a": conv(2, 3, 1)}, 1.3 * torch.tanh(drawn(2, 17, 19, 2))
    right = Of(lambda m, x, grid: F.grid_sample(m.a(x), grid, align_corners=False), layers)
    corners = Of(lambda m, x, grid: F.grid_sample(m.a(x), grid, align_corners=True), layers)
    inputs = drawn(2, 2, 11, 13), grid
    assert compare(right, Of(sampled_by_hand, layers), inputs).passed
    assert compare(right, corners, inputs).first == "output"
