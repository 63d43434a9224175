"""State: every run starts from what was given."""

import pytest
import torch

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, bits, drawn, linear, reordered


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
    model, box, x = Of(function, {"a": linear(7, 5)}).eval(), Box(), drawn(3, 7)
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
    model, x = Of(kept_in_attributes, {"a": linear(7, 5)}).eval(), drawn(3, 7)
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
