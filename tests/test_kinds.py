"""Modules of the kinds that people have: computed in another order they agree, with a bug they diverge."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.conformance.compare.module_reference import ModuleReference, is_output
from tests.toys.kinds import KINDS, Of, bits, drawn, reordered
from tests.toys.surroundings import sample_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what PyTorch says of these modules

WITHOUT_TOKENS = {f"{of}experts.{number}" for of in ("", "gradients.taps.") for number in (1, 4)}
"""Of experts to which no token goes: there is nothing in them to be judged."""


@pytest.mark.parametrize("name", sample_of(KINDS, lambda place, _: place % 5 == 4))
def test_another_order_agrees_and_weights_that_are_off_diverge_in_every_output(name):
    model, inputs = KINDS[name]()
    comparison = prepare(model, reordered(model), inputs, gradients=True)
    comparison.allow_same_bits = False  # the same bits are judged too
    held = bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)])
    verdict = comparison.verdict()
    assert verdict.status == "agrees", str(verdict)
    assert bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)]) == held
    assert {row.tensor for row in verdict.table if row.status == "undetermined"} <= WITHOUT_TOKENS
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        for one in wrong.parameters():  # every other element: norms hide a factor of all
            one.view(-1)[::2] *= 1.5 if name == "mixed_precision" else 1.001
    arrays = ModuleReference(reordered(wrong), args=inputs).arrays
    outputs = {own: array for own, array in arrays.items() if is_output(own)}
    assert {row.status for row in compare(model, outputs, inputs).table if row.tensor in outputs} == {
        "diverges"
    }


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
    comparison.allow_same_bits = False
    verdict = comparison.verdict()
    assert verdict.passed, str(verdict)
    assert max(row.ratio for row in verdict.table) <= 0.6
    with torch.no_grad():
        comparison.tensors["output[bicubic0]"][0, 0, 7, 11] += 1e-3
    assert comparison.verdict().first == "output[bicubic0]"
