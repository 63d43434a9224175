"""Candidates as they run: what is judged is the user's program, and none passes by ending its process."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys import endings

X = torch.linspace(-1, 1, 35).reshape(7, 5)


def some_of(every, *quick):
    """Return all of several, as parameters of a test; all but a few are slow."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in every]


@pytest.mark.parametrize("time", [1, 2, 5])
def test_a_reference_that_ends_the_process_is_refused_whenever_it_does(time):
    other = {"output": np.zeros((7, 3), np.float32)}
    with pytest.raises(SpecError, match=r"the reference .* SystemExit: 0"):
        compare(endings.Leaving(time).eval(), other, X)


@pytest.mark.parametrize("candidate", [endings.leaving(), lambda *x: endings.leaves(), endings.raises])
def test_a_candidate_that_ends_the_process_is_refused(candidate):
    with pytest.raises(SpecError, match=r"the candidate .*: (SystemExit: 0|\w+Error: )"):
        compare(endings.linear(), candidate, {"input": X})


ENDS = {
    "leaves": (2, "endings:leaves gave no result: SystemExit: 0"),
    "leaves_with_words": (2, "endings:leaves_with_words gave no result: SystemExit: enough"),
    "raises": (2, "endings:raises gave no result: KeyError: 'no such layer'"),
    "dies": (3, "endings:dies gave no result: killed by SIGKILL"),
    "dies_without_a_word": (3, "endings:dies_without_a_word gave no result: exit code 0"),
}


@pytest.mark.parametrize("end", some_of(ENDS, "leaves", "dies"))
def test_the_command_ends_as_its_candidate_does(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(
        f"compare tests.toys.endings:linear tests.toys.endings:{end}",
        *("--inputs", tmp_path / "inputs.safetensors"),
    )
    expected, words = ENDS[end]
    assert (code, len(lines)) == (expected, 1)
    assert words in lines[0]


@pytest.mark.parametrize("end", ["leaving", "leaves_where_it_is_built", "linears"])
def test_the_command_refuses_a_reference_that_ends_it_or_cannot_be_built(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(f"compare tests.toys.endings:{end}", "--inputs", tmp_path / "inputs.safetensors")
    assert (code, len(lines)) == (2, 1)
    assert any(words in lines[0] for words in ("SystemExit: 0", "AttributeError: "))


# What is compiled.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 3)

    def body(self, x):
        return self.outer(F.gelu(self.norm(self.inner(x))))

    def forward(self, x):
        return self.body(x)


class Within(nn.Module):
    """A network with another in it."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        torch.manual_seed(2)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.net(x))


def right(graph, _):
    return graph


def wrong_where_it_fuses(graph, _):
    """Return a program that is wrong if a norm and an activation stand in one graph."""
    called = [str(node.target) for node in graph.graph.nodes]
    factor = 1.01 if all(any(name in one for one in called) for name in ("layer_norm", "gelu")) else 1.0
    return lambda *given: [
        factor * one if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in graph(*given)
    ]


def in_place(net, **options):
    net.compile(**options)
    return net


def method(net, **options):
    net.body = torch.compile(net.body, **options)
    return net


COMPILED = {
    "module": torch.compile,
    "in one graph": partial(torch.compile, fullgraph=True),
    "in place": in_place,
    "method": method,
    "part": lambda net, **options: Within(torch.compile(net, **options)),
    "part in place": lambda net, **options: Within(in_place(net, **options)),
}


def compiled(way, backend):
    return COMPILED[way](Net().eval(), backend=backend).eval()


@pytest.mark.parametrize("gradients", some_of([False, True], True))
@pytest.mark.parametrize("way", some_of(COMPILED, "module", "part in place"))
def test_a_program_is_judged_as_its_compiler_made_it(way, gradients):
    reference = Within(Net()).eval() if "part" in way else Net().eval()
    agrees = compare(reference, compiled(way, right), {"x": X}, gradients=gradients)
    assert agrees.passed
    wrong = compiled(way, wrong_where_it_fuses)
    comparison = prepare(reference, wrong, {"x": X}, gradients=gradients)
    verdict = comparison.verdict()
    assert (verdict.status, verdict.first) == ("diverges", "output")
    assert not any("_orig_mod" in name for name in comparison.tensors)
    if way != "in one graph":
        assert not agrees.unchecked
        assert {row.status for row in verdict.table if row.tensor.endswith("norm")} <= {"agrees"}
        assert "no activation diverges" in str(verdict)
    # What was compiled for the activations of one comparison is not what the next one judges.
    assert compare(reference, wrong, {"x": X}).first == "output"
    assert compare(wrong, reference, {"x": X}, gradients=gradients).passed  # what is right is what it says


def scripted_part():
    net = Net().eval()
    net.norm = torch.jit.script(net.norm)
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "make", [lambda: torch.jit.script(Net().eval()), lambda: torch.jit.trace(Net().eval(), X), scripted_part]
)
def test_a_scripted_module_is_judged_as_it_is(make):
    assert compare(Net().eval(), make(), {"x": X}).passed
    wrong = make()
    with torch.no_grad():
        wrong.outer.bias += 0.01
    assert compare(Net().eval(), wrong, {"x": X}).first in ("outer", "output")


class Shy(Net):
    """Computes otherwise where somebody looks at it."""

    def body(self, x):
        return super().body(x) * (1.0 if self.norm._forward_hooks else 1.01)


def test_a_module_that_computes_otherwise_under_hooks_is_judged_without():
    assert compare(Net().eval(), Shy().eval(), {"x": X}).first == "output"


class Branching(Net):
    """Computes otherwise where it is compiled."""

    def body(self, x):
        return super().body(x) * (1.01 if torch.compiler.is_compiling() else 1.0)


def test_a_way_that_compiles_to_something_else_diverges(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert compare(Branching().eval(), way="compile", inputs={"x": X}).first == "output"


# What PyTorch does beside its modules.


@pytest.mark.parametrize("cut_off", ["reference", "candidate"])
def test_a_branch_whose_gradient_is_cut_off_diverges(cut_off):
    class Branching(Net):
        def body(self, x):
            norm = self.norm(self.inner(x))
            return self.outer(norm.detach() if self.cut_off else norm) + self.outer(x.new_ones(11))

    right, port = Branching().eval(), Branching().eval()
    right.cut_off, port.cut_off = cut_off == "reference", cut_off == "candidate"
    verdict = compare(right, port, {"x": X}, gradients=True)
    assert verdict.first.startswith("gradients.")
    assert verdict.row("gradients.inner.weight").status == "diverges"


class Padded(nn.Module):
    """PyTorch's encoder, whose fast path returns zeros for padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(12, 2, 19, batch_first=True)
        self.encoder, self.outer = nn.TransformerEncoder(layer, 1), nn.Linear(12, 3)

    def forward(self, x, padding):
        return self.outer(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_an_encoder_is_judged_where_it_is_taken():
    inputs = {"x": torch.randn(3, 7, 12), "padding": torch.arange(7) >= torch.tensor([[7], [3], [5]])}
    right, port = Padded().eval(), Padded().eval()
    with torch.no_grad():
        port.encoder.layers[0].linear1.bias += 1e-8  # other bits
    comparison = prepare(right, port, inputs)
    assert comparison.verdict().passed
    assert comparison.whole == {"output"}
    comparison.tensors["output"][1, 4] += 1e-3  # in padding
    assert comparison.verdict().first == "output"
