import copy

import pytest
import torch

from concord.conformance.compare import compare, prepare
from concord.conformance.compare.module_reference import ModuleReference, is_output
from tests.toys.kinds import KINDS, bits, reordered
from tests.toys.surroundings import sample_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns about some of these modules

QUICK = ("convolutions", "sampling", "linear_attention", "derivatives")


@pytest.mark.parametrize("name", sample_of(KINDS, lambda _, name: name in QUICK))
def test_another_order_agrees_and_weights_that_are_off_diverge_in_every_output(name):
    model, inputs = KINDS[name]()
    comparison = prepare(model, reordered(model), inputs, gradients=True)
    comparison.allow_same_bits = False  # equal bits are judged too
    before = bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)])
    verdict = comparison.verdict()
    assert verdict.status == "agrees", str(verdict)
    assert verdict.worst < 0.7
    assert bits([*model.named_parameters()], [*model.named_buffers()], inputs, [*vars(model)]) == before
    assert all(row.status != "undetermined" for row in verdict.table)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in wrong.parameters():  # every other element, since norms hide a common factor
            parameter.view(-1)[::2] *= 1.5 if name == "mixed_precision" else 1.001
    arrays = ModuleReference(reordered(wrong), args=inputs).arrays
    outputs = {own: array for own, array in arrays.items() if is_output(own)}
    assert {row.status for row in compare(model, outputs, inputs).table if row.tensor in outputs} == {
        "diverges"
    }
