"""Modules of the kinds that people have: computed in another order they agree, with a bug they diverge."""

import copy
import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.conformance.compare.arithmetic import ExactMode, Perturbed, Rounded, computed, value_of
from concord.spec.errors import SpecError
from tests.toys.kinds import KINDS, Of, drawn, reordered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of these modules


def each(quick):
    """Return all kinds; one of so many is quick."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (i % quick > 0)) for i, name in enumerate(KINDS)]


def bits(*held):
    """Return everything that modules and inputs hold, bit for bit."""
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


@pytest.mark.parametrize("name", each(9))
def test_another_order_agrees_and_leaves_all_as_it_was(name):
    model, inputs = KINDS[name]()
    comparison = prepare(model, reordered(model), inputs, gradients=True)
    comparison.again = False  # the same bits are judged too
    held = bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)])
    verdict = comparison.verdict()
    assert verdict.status == "agrees", str(verdict)
    assert bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)]) == held
    left = {row.tensor for row in verdict.table if row.status == "undetermined"}
    assert left <= set(UNDETERMINED.get(name, ()))


UNDETERMINED = {"mixture_of_experts": ["experts.1", "experts.4", "gradients.taps.experts.4"]}
"""Experts without a token."""


@pytest.mark.parametrize("name", each(23))
def test_a_parameter_that_is_off_is_found(name):
    model, inputs = KINDS[name]()
    wrong = copy.deepcopy(model)
    with torch.no_grad():  # every other element: norms hide a factor of all
        [*wrong.parameters()][-1].view(-1)[::2] *= 1.5 if name == "autocast" else 1.001
    verdict = compare(model, reordered(wrong), inputs)
    assert verdict.first, str(verdict)


def resampled(m, x):
    y = m.a(x)
    grid = F.affine_grid(torch.tensor([[[0.9, 0.1, 0.03], [-0.1, 0.8, 0.02]]]), y.shape, align_corners=False)
    made = {
        f"{mode}{i}": F.interpolate(y, (31, 61), mode=mode, **how)
        for mode in ("bilinear", "bicubic")
        for i, how in enumerate(({}, {"align_corners": True}, {"antialias": True}))
    }
    return made | {"grid": F.grid_sample(y, grid, align_corners=False)}


def test_resampling_errs_by_the_rounding_of_coordinates():
    model = Of(resampled, {"a": lambda: nn.Conv2d(1, 1, 1)}).eval()
    comparison = prepare(model, model, drawn(1, 1, 23, 41), gradients=True)
    comparison.again = False
    verdict = comparison.verdict()
    assert verdict.passed, str(verdict)
    assert {row.tensor for row in verdict.table if row.ratio > 0.6} == set()
    with torch.no_grad():
        comparison.tensors["output[bicubic0]"][0, 0, 7, 11] += 1e-3
    assert comparison.verdict().first == "output[bicubic0]"


# In place, into views.

CHANGES = {
    "fill a slice": lambda y, z: y[:, 1:3].fill_(0.5),
    "a number": lambda y, z: y.__setitem__((slice(None), slice(1, 3)), 0.5),
    "a tensor": lambda y, z: y.__setitem__((slice(None), 2), z[:, 0]),
    "a mask": lambda y, z: y.__setitem__(y > 0, 0),
    "a mask of rows": lambda y, z: y.__setitem__(z[:, 0] > 0, z[0]),
    "by a mask": lambda y, z: y.__setitem__(z > 0, z[z > 0]),
    "by an index": lambda y, z: y.__setitem__(torch.tensor([0, 2]), z[:2]),
    "index_put_": lambda y, z: y.index_put_((torch.tensor([0, 0]),), z[:2], accumulate=True),
    "index_fill_": lambda y, z: y.index_fill_(1, torch.tensor([3]), z[0, 0]),
    "masked_fill_": lambda y, z: y[1:].masked_fill_(z[1:] > 0, -1.5),
    "masked_fill_ a tensor": lambda y, z: y.masked_fill_(z > 0, z.sum()),
    "masked_scatter_": lambda y, z: y.masked_scatter_(z > 0, z),
    "index_copy_": lambda y, z: y.index_copy_(0, torch.tensor([1, 3]), z[:2]),
    "index_add_": lambda y, z: y.index_add_(0, torch.tensor([1, 1]), z[:2], alpha=2),
    "scatter_": lambda y, z: y.scatter_(1, torch.tensor([[0], [3]]), 7.0),
    "scatter_add_": lambda y, z: y.scatter_add_(1, torch.tensor([[0, 0], [3, 3]]), z[:2]),
    "scatter_reduce_": lambda y, z: y.scatter_reduce_(1, torch.tensor([[0, 0]]), z[:1], "amax"),
    "put_": lambda y, z: y.put_(torch.tensor([3, 8]), z[0, :2]),
    "copy_ into a view": lambda y, z: y.narrow(1, 2, 3).copy_(z[:, :3]),
    "copy_ of one": lambda y, z: y.t()[1:3].copy_(z[0, 0]),
    "copy_ of whole numbers": lambda y, z: y[0].copy_(torch.arange(7)),
    "add_": lambda y, z: y[1:].add_(z[1:], alpha=0.5),
    "mul_": lambda y, z: y[:, ::2].mul_(z[:, ::2]),
    "addcmul_": lambda y, z: y.addcmul_(z, z, value=0.3),
    "lerp_": lambda y, z: y.lerp_(z, 0.3),
    "activations": lambda y, z: torch.nn.functional.elu(y[0].tanh_(), inplace=True),
    "addmm_": lambda y, z: y.addmm_(z[:, :3], z[:3]),
    "cumsum_": lambda y, z: y.cumsum_(0),
    "other axes": lambda y, z: y.unsqueeze_(0).squeeze_(0).t_(),
    "diagonal": lambda y, z: y.diagonal().add_(1),
    "unbind": lambda y, z: y.unbind(0)[2].add_(1),
    "chunk": lambda y, z: y.chunk(2, 1)[0].zero_(),
    "view": lambda y, z: y.view(7, 5)[1].add_(z.reshape(7, 5)[0]),
    "unfold": lambda y, z: y.unfold(1, 3, 3)[:, 0].mul_(2),
    "as_strided": lambda y, z: y.as_strided((3,), (8,)).fill_(1),
    "rows in turn": lambda y, z: [row.add_(1) for row in y],
    "add out": lambda y, z: torch.add(z, z, out=y),
    "mm out": lambda y, z: torch.mm(z[:, :5], z, out=y),
    "max out": lambda y, z: torch.max(z, 0, out=(y[0], torch.empty(7, dtype=torch.long))),
    "cat out": lambda y, z: torch.cat([z[:2], z[:3]], out=y),
    "data": lambda y, z: y.data.mul_(2),
    "other data": lambda y, z: setattr(y, "data", z),
    "item": lambda y, z: y.mul_(z[0, 0].item()),
    "tolist": lambda y, z: y.mul_(z.tolist()[0][0]),
    "a text": lambda y, z: y.mul_(len(f"{z[0, 0]:.3f}") if repr(z) else 0),
    "whole numbers": lambda y, z: y.mul_(torch.arange(7).unsqueeze_(0).add_(1)),
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


def test_what_leaves_pytorch_is_refused():
    def function(m, x):
        return m.a(torch.from_numpy(np.sin(x.numpy())))

    model = Of(function, {"a": lambda: nn.Linear(7, 5)}).eval()
    with pytest.raises(SpecError, match=r"handed to NumPy, .* \(test_kinds\.py:\d+\)$"):
        compare(model, {"output": np.zeros((3, 5), np.float32)}, drawn(3, 7))


# What is said of what cannot be judged, and whom it blames.


def layer(function, **layers):
    return Of(function, {"a": lambda: nn.Linear(7, 5), **layers}).eval()


def linear(**changes):
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
    "float8": (
        lambda: layer(lambda m, x: m.a(x).to(torch.float8_e4m3fn)),
        "output is of torch.float8_e4m3fn",
    ),
    "float8 weights": (
        lambda: linear(dtype=torch.float8_e4m3fn),
        "a.weight of the reference is of torch.float8",
    ),
    "nested": (
        lambda: layer(lambda m, x: torch.nested.as_nested_tensor([m.a(x)[:2], m.a(x)[2:]])),
        "is a nested tensor but",
    ),
    "meta": (lambda: linear(device="meta"), "a.weight of the reference lies on the meta device"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5)).eval(), "0.weight of the reference is lazy"),
    "scripted": (lambda: torch.jit.trace(nn.Linear(7, 5).eval(), drawn(3, 7)), "is scripted or traced"),
    "8 bits": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(7, 5)).eval(), {nn.Linear}),
        "0 of the reference is a Linear of 8 bits",
    ),
    "raises": (
        lambda: layer(lambda m, x: m.a(x[:, ["\x1b[31m" + 9000 * "n"]])),
        r"the reference cannot be run .{,700} \(test_kinds\.py:\d+\)$",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(name):
    make, message = REFUSED[name]
    with pytest.raises(SpecError, match=message) as caught:
        compare(make(), {"output": np.zeros((3, 5), np.float32)}, drawn(3, 7))
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
    model = Of(
        RETURNED[name], {"a": lambda: nn.Linear(7, 5), "inner": lambda: nn.Linear(7, 5), "pair": Pairs}
    )
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


# State: every run starts from what was given.


class Box:
    def __init__(self):
        self.held = []


def kept_in_an_input(m, x, box):
    box.held.append(m.a(x))
    return sum(box.held)


def kept_in_attributes(m, x, box):
    m.calls, m.seen[:, :5] = getattr(m, "calls", 0) + 1, m.a(x)
    m.list.append(m.a(x))
    return m.seen * m.calls + sum(m.list).sum()


def parameter_changed(m, x, box):
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
        m.a.bias.data.mul_(2)
    return m.a(x)


STATES = {
    kept_in_an_input: [],
    kept_in_attributes: ["calls", "list", "seen"],
    parameter_changed: ["a.weight", "a.bias"],
}


@pytest.mark.parametrize("function", STATES, ids=lambda function: function.__name__)
def test_state_is_said_and_put_back(function):
    model, box, x = layer(function), Box(), drawn(3, 7)
    model.seen, model.list = torch.zeros(3, 6), []
    held = bits([*model.parameters()], x, model.seen)
    comparison = prepare(model, reordered(model), {"x": x, "box": box})
    comparison.again = False
    assert comparison.verdict().passed
    assert (comparison.reference.state, bits([*model.parameters()], x, model.seen)) == (
        STATES[function],
        held,
    )
    assert not box.held + model.list
    assert not hasattr(model, "calls")
    assert ("state of the reference" in comparison.notes) == bool(STATES[function])


def test_a_function_that_changes_what_it_is_given_changes_nothing():
    model, x = layer(kept_in_attributes), drawn(3, 7)
    model.seen, model.list = torch.zeros(3, 6), []

    def candidate(x):
        with torch.no_grad():
            made = model(torch.from_numpy(x), None).numpy()
        x[:] = 0
        return made

    before = bits([*model.parameters()], x, model.seen)
    assert compare(model, candidate, {"x": x, "box": None}).passed
    assert bits([*model.parameters()], x, model.seen) == before
    model.a.register_forward_hook(lambda module, given, made: module.bias.data.add_(1))
    with pytest.raises(SpecError, match=r"the candidate changes the reference's a\.bias"):
        compare(model, candidate, {"x": x, "box": None})
    assert bits([*model.parameters()], x, model.seen) == before


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
