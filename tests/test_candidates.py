"""Candidates as they run: what is judged is the user's program, and none passes by ending its process."""

import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import assert_same, compare, prepare
from concord.conformance.compare.candidates import SCOPES
from concord.conformance.compare.model_comparison import ModelComparison
from concord.spec.errors import SpecError
from concord.spec.precision import cut_to_bits, round_to_bits
from tests.toys import endings
from tests.toys.modules import TOKENS, Fused, activations, encoder, texts

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


# Ways to run a module.


@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_a_lower_precision_agrees_by_its_own_rules(way):
    assert 0 < compare(encoder(), inputs=texts(), way=way).worst <= 1


def test_a_compiled_module_agrees(monkeypatch):
    """Its compiler, which takes long, hands it on as it is."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    verdict = compare(encoder(), inputs=texts(), way="compile")
    assert verdict.passed
    assert not verdict.unchecked


class Shortened(nn.Linear):
    """Its factors have 11 bits, as in TF32."""

    shorten = staticmethod(round_to_bits)

    def forward(self, x):
        made = (self.shorten(y.detach().numpy(), 11) for y in (x, self.weight))
        return nn.functional.linear(*map(torch.from_numpy, made), self.bias)


class CutOff(Shortened):
    shorten = staticmethod(cut_to_bits)


@pytest.mark.parametrize("kind", [Shortened, CutOff])
def test_a_product_of_tf32_agrees_by_its_own_rules_alone(kind):
    right, port = (nn.Sequential(made(131, 17)).eval() for made in (nn.Linear, kind))
    port.load_state_dict(right.state_dict())

    def judged(**rules):
        made = prepare(right, port, torch.randn(5, 131))
        return ModelComparison(replace(made.reference, **rules), made.tensors).verdict()

    assert judged().first == judged().table[0].tensor
    assert judged(tf32=True).passed
    port[0].bias.data += 0.1
    assert not judged(tf32=True).passed


def test_weights_of_8_bits_are_judged_by_what_they_say():
    pytest.importorskip("torchao")
    made = prepare(encoder(), inputs=texts(), way="int8")
    assert made.verdict().passed
    assert re.search(r"has the 13 .* farthest off .* by 0\.\d\d% ", made.notes["weights of 8 bits"])
    assert compare(encoder(), made.theirs.model, texts()).first == "layers.0.attention.query"
    with pytest.raises(SpecError, match=r"ReLU has no nn\.Linear"):
        prepare(nn.ReLU().eval(), way="int8", inputs=X)


def test_a_way_whose_package_is_missing_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(SpecError, match=r"way 'int8' needs torchao.*, which is not installed"):
        prepare(encoder(), inputs=texts(), way="int8")


# Arrays, files, functions and graphs.


def test_arrays_a_file_and_functions_are_candidates(tmp_path):
    inputs = texts()
    arrays = activations(encoder(Fused), inputs)
    save_file(arrays, tmp_path / "made.safetensors")

    def function(**given):
        assert given["input_ids"].shape == (3, TOKENS)
        return {"layers.0.norm1": arrays["layers.0.norm1"]}

    for candidate in (arrays, tmp_path / "made.safetensors"):
        assert_same(encoder(), candidate, inputs)
    for candidate in (function, "tests.toys.modules:in_numpy"):
        assert_same(encoder(), candidate, inputs, declared=["output"])


GRAPH = """<ir_version: 10, opset_import: ["": 18]>
graph (float[7, 3] x, float[3, 5] weight) => (float[7, 5] y) {
    product = MatMul (x, weight)
    y = Tanh (product)
}"""


def test_a_graph_shows_what_modules_return_where_its_exporter_noted_them(tmp_path):
    onnx = pytest.importorskip("onnx")
    model, path = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh()).eval(), tmp_path / "graph.onnx"
    weight = model[0].weight.detach().numpy().T * np.float32(1.001)
    made = onnx.parser.parse_model(GRAPH)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    for place, node in enumerate(made.graph.node):
        node.metadata_props.add(key=SCOPES, value=f"['', '{place}']")
    onnx.save(made, path)
    table = compare(model, path, torch.linspace(-1, 1, 21).reshape(7, 3)).table
    assert {row.tensor: row.status for row in table} == {"0": "diverges", "1": "agrees", "output": "diverges"}
