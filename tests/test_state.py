from types import SimpleNamespace

import pytest
import torch

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, bits, drawn, linear, reordered


def stateful(m, x, box):
    # Keeps state in inputs, in attributes and in parameters.
    x -= x.mean(0)
    box.held.append(m.a(x))
    m.calls, m.seen[:, :5] = getattr(m, "calls", 0) + 1, m.a(x)
    m.list.append(m.a(x))
    if box.trains:
        with torch.no_grad():
            m.a.weight.clamp_(-0.1, 0.1)
            m.a.bias.data.mul_(2)
    return m.seen * m.calls + sum(m.list).sum() + sum(box.held).sum()


def prepared(trains):
    model = Of(stateful, {"a": linear(7, 5)})
    model.seen, model.list = torch.zeros(3, 6), []
    inputs = {"x": drawn(3, 7), "box": SimpleNamespace(held=[], trains=trains)}
    return model, inputs, lambda: bits([*model.parameters()], inputs["x"], model.seen)


@pytest.mark.parametrize("trains", [False, True])
def test_state_is_said_and_put_back(trains):
    model, inputs, snapshot = prepared(trains)
    before = snapshot()
    comparison = prepare(model, reordered(model), inputs)
    comparison.allow_same_bits = False
    assert comparison.verdict().passed
    assert comparison.reference.state == ["calls", "list", "seen", *["a.weight", "a.bias"] * trains]
    assert "state of the reference" in comparison.notes
    assert snapshot() == before
    assert not inputs["box"].held + model.list
    assert not hasattr(model, "calls")


def test_a_function_that_changes_what_it_is_given_changes_nothing():
    model, inputs, snapshot = prepared(trains=False)

    def candidate(x):
        with torch.no_grad():
            output = model(torch.from_numpy(x), SimpleNamespace(held=[], trains=False)).numpy()
        x[:] = 0
        return output

    before = snapshot()
    assert compare(model, candidate, inputs).passed
    assert snapshot() == before
    model.a.register_forward_hook(lambda module, args, output: module.bias.data.add_(1))
    with pytest.raises(SpecError, match=r"the candidate changes the reference's a\.bias"):
        compare(model, candidate, inputs)
    assert snapshot() == before
