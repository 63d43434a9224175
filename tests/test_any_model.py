"""A verdict on any model agrees only if each output was judged, in something that there is to judge."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.conformance.judging.exemptions import ABSENT, CONSTANT
from concord.spec.errors import SpecError


class Table(nn.Module):
    """Returns a parameter, a table that depends on no input, and what it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scale, self.inner = nn.Parameter(torch.randn(5)), nn.Linear(3, 5)
        self.position, self.act = nn.Embedding(7, 5), nn.ReLU()

    def forward(self, x):
        inner = self.inner(x)
        places = self.position(torch.arange(len(x)))
        return {"scale": self.scale * 1.0, "y": self.act(inner) + 0.1 * places}


X = torch.linspace(-1, 1, 21).reshape(7, 3)


def arrays(names, factor=1.0, model=None, inputs=X):
    """Return activations of a run, each element a rounding off."""
    found = prepare(model or Table().eval(), None, inputs).tensors
    return {name: found[name] * np.float32(factor) for name in names}


def verdict(names, *declared, factor=1 + 2**-23):
    return compare(Table().eval(), arrays(names, factor), X, declared=declared)


# Which outputs are judged.


def test_a_verdict_agrees_if_every_output_was_judged():
    assert verdict(["output[scale]", "output[y]"]).passed
    assert verdict(["inner", "act", "output[scale]", "output[y]"]).passed


@pytest.mark.parametrize(
    "names", [["output[scale]"], ["output[y]"], ["inner"], ["position"], ["inner", "act", "output[y]"]]
)
def test_an_output_that_is_not_delivered_is_not_judged_and_may_be_declared(names):
    found = verdict(names)
    lacking = {"output[scale]", "output[y]"} - {*names}
    assert (found.status, {*found.unjudged}) == ("undetermined", lacking)
    assert all(f"{name} not judged (not delivered): deliver it; if" in str(found) for name in lacking)
    depending = {"inner", "act", "output[y]"} & {*names}
    assert verdict(names, *lacking).status == verdict(names, "output").status
    assert verdict(names, *lacking).passed == bool(depending)
    assert {row.note for row in verdict(names, *lacking).table if row.tensor in lacking} == {ABSENT}
    assert verdict(names, *lacking, factor=1.01).status == "diverges"


def test_what_depends_on_no_input_says_nothing_of_the_forward_pass():
    said = str(verdict(["position", "output[scale]"], "output"))
    assert said.startswith("undetermined")
    assert f"forward not judged: {CONSTANT}" in said


def table():
    return Table().eval()


def test_the_command_takes_outputs_that_are_absent(entered, tmp_path):
    save_file({"x": X.numpy()}, tmp_path / "inputs.safetensors")
    save_file(arrays(["inner"], 1 + 2**-23), tmp_path / "found.safetensors")
    words = "compare tests.test_any_model:table", tmp_path / "found.safetensors"
    given = "--inputs", tmp_path / "inputs.safetensors", "--seed", "3"
    assert "output[y] not judged (not delivered)" in entered(*words, *given, ends=3)[0]
    declared = "--declare", "output[y]", "--declare", "output[scale]"
    entered(*words, *given, *declared, ends=0)


def test_an_unknown_output_is_refused():
    with pytest.raises(SpecError, match=r"unknown output 'output\[z\]'"):
        verdict(["inner"], "output[z]")


class Chosen(nn.Module):
    """Returns numbers of each kind beside what it computes, and has a layer that is called output."""

    def __init__(self, **off):
        super().__init__()
        torch.manual_seed(1)
        self.output, self.last, self.off = nn.Linear(3, 5), nn.Linear(5, 5), off

    def forward(self, x):
        y = self.last(torch.relu(self.output(x)))
        found = {"y": y, "ids": y.argmax(-1), "mask": y > 0, "sum": y.sum().item(), "count": len(x)}
        return {name: entry + self.off.get(name, 0) for name, entry in found.items()}


@pytest.mark.parametrize("wrong", ["y", "ids", "mask", "sum", "count"])
def test_outputs_of_whole_numbers_truth_values_and_numbers_of_python_are_judged(wrong):
    right, port = Chosen().eval(), Chosen().eval()
    with torch.no_grad():
        port.output.bias += 1e-8  # other bits
    comparison = prepare(right, port, X)
    assert comparison.verdict().passed
    name = "output" if wrong == "y" else f"output[{wrong}]"  # it alone is a tensor of floating-point numbers
    assert compare(right, Chosen(**{wrong: 1}).eval(), X).first == name
    lacking = {other: array for other, array in comparison.tensors.items() if other != name}
    assert compare(right, lacking, X).unjudged == (name,)
    by_place = {
        str(place): right(X)[name].detach().numpy() for place, name in enumerate(("y", "ids", "mask"))
    }
    assert {*prepare(right, by_place, X).tensors} == {"output", "output[ids]", "output[mask]"}


# What there is to be judged in them.


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def spoilt(name, value):
    model = Masked().eval()
    with torch.no_grad():
        model.get_parameter(name).fill_(value)
    return model


VOID = {
    "an empty batch": (Masked().eval(), X[:0], "it has no elements"),
    "inputs that are infinite": (Masked().eval(), X / 0, "the inputs are not finite"),
    "weights that are NaN": (spoilt("first.weight", torch.nan), X, "where first is the first that is not"),
}


@pytest.mark.parametrize("kind", VOID)
def test_where_nothing_is_to_be_judged_no_port_agrees(kind):
    model, inputs, words = VOID[kind]
    ports = (arrays(["output"], factor, model, inputs) for factor in (1.0, 3.0))
    for found in (compare(model, candidate, inputs) for candidate in (model, *ports)):
        assert found.status == "undetermined"
        assert "output not judged: " in str(found)
        assert words in str(found)


def test_a_tensor_that_is_partly_finite_is_judged_where_it_is():
    inputs = X.clone()
    inputs[2] = torch.nan
    assert compare(Masked().eval(), Masked().eval(), inputs).passed
    assert compare(Masked().eval(), spoilt("second.bias", 0.01), inputs).status == "diverges"


@pytest.mark.parametrize("place", ["output", "first"])
def test_numbers_where_the_reference_has_none_diverge(place):
    model = spoilt("first.weight", torch.nan)
    port = {name: np.nan_to_num(array) for name, array in arrays(["first", "output"], 1, model).items()}
    assert compare(model, {place: port[place]}, X, declared=["output"]).first == place


class Spectrum(nn.Module):
    def __init__(self, conjugate):
        super().__init__()
        self.conjugate = conjugate

    def forward(self, x):
        found = torch.fft.rfft(x)
        return found.conj() if self.conjugate else found


def test_complex_numbers_that_are_conjugated_are_judged():
    right, other = Spectrum(False).eval(), Spectrum(True).eval()
    assert compare(right, other, X).first == compare(other, right, X).first == "output"
