"""Modules of the kinds that people have: computed in another order they agree, with a bug they diverge."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare, prepare
from tests.toys.kinds import KINDS, Of, bits, drawn, reordered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of these modules


def each(quick):
    """Return all kinds; one of so many is quick."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (i % quick > 0)) for i, name in enumerate(KINDS)]


@pytest.mark.parametrize("name", each(8))
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


@pytest.mark.parametrize("name", each(16))
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
