"""Modules of the kinds that people have: computed in another order they agree, with a bug they diverge."""

import copy
import io

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("name", each(11))
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


@pytest.mark.parametrize("name", each(31))
def test_a_parameter_that_is_off_is_found(name):
    model, inputs = KINDS[name]()
    wrong = copy.deepcopy(model)
    with torch.no_grad():  # every other element: norms hide a factor of all
        [*wrong.parameters()][-1].view(-1)[::2] *= 1.5 if name == "autocast" else 1.001
    verdict = compare(model, reordered(wrong), inputs)
    assert verdict.first, str(verdict)


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
    with pytest.raises(SpecError, match="hands a tensor to NumPy in its forward pass"):
        compare(model, {"output": np.zeros((3, 5), np.float32)}, drawn(3, 7))
