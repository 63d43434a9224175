import itertools
import re
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from concord.backends.wire import WorkerFailure
from concord.conformance.compare import assert_same, compare, prepare
from concord.conformance.compare.candidates import SCOPES, load, loaded
from concord.conformance.run import record
from concord.spec.errors import SpecError
from concord.spec.precision import cut_to_bits, round_to_bits
from tests.toys import called
from tests.toys.kinds import Of, linear
from tests.toys.modules import activations
from tests.toys.surroundings import sample_of

X = torch.linspace(-1, 1, 35).reshape(7, 5)


class Leaving(nn.Linear):
    def __init__(self, time):
        super().__init__(5, 3)
        calls = itertools.count(1)  # not state of the module, which is reset for each run
        self.leaves = lambda: next(calls) == time

    def forward(self, input):
        if self.leaves():
            sys.exit(0)
        return super().forward(input)


def cancelled(m, input):
    raise GeneratorExit  # no Exception


def net():
    return nn.Linear(5, 3).eval()


def against(candidate, reference=None, **options):
    return lambda: compare(reference or net(), candidate, {"input": X}, **options)


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        # At its first call, when it runs again, and when its tolerances are derived.
        *(
            (against({"output": np.zeros((7, 3))}, Leaving(time).eval()), "the reference .* SystemExit: 0")
            for time in (1, 2, 5)
        ),
        (lambda: load("tests.toys.called:leaves"), "called:leaves gave no result: SystemExit: 0"),
        (lambda: load("tests.toys.called:nothing"), "called:nothing gave no result: AttributeError: "),
        (against("tests.toys.called:nothing"), "called:nothing gave no result: AttributeError: "),
        (against(Leaving(1).eval()), "the candidate .*: SystemExit: 0"),
        (against(Of(cancelled, {})), "the candidate .*: GeneratorExit "),
        (against(str(Path(__file__).parent)), "(tests cannot be loaded by|needs) transformers"),
        (against(called.raises), "the candidate .*: KeyError: "),
        (against("tests.toys.called:leaves"), "called:leaves gave no result: SystemExit: 0"),
        (against("tests.toys.called:raises"), "called:raises gave no result: KeyError: 'no such layer'"),
        (against("tests.toys.called:dies_without_a_word"), "word gave no result: exit code 0"),
        (against("toy:port", python="/missing"), "--python is '/missing' but must be a Python interpreter"),
    ],
)
def test_what_fails_or_ends_its_process_is_refused_with_the_reason(compared, words):
    with pytest.raises((SpecError, WorkerFailure), match=words):
        compared()


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("dies", "crashed", "tests.toys.called:dies gave no result: killed by SIGKILL"),
        ("raises", "error", "tests.toys.called:raises gave no result: KeyError: 'no such layer'"),
        ("misshapen", "broken", "'output' has shape (7, 5) but must be (7, 3)"),
    ],
)
def test_a_candidate_that_fails_has_a_row_and_a_record_like_any_other(entered, tmp_path, name, status, words):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    line = f"compare tests.test_candidates:net tests.toys.called:{name} --inputs"
    files = tmp_path / "out.json", tmp_path / "out.html"
    output, errors = entered(
        line, tmp_path / "inputs.safetensors", "--json", files[0], "--html", files[1], ends=3
    )
    assert not errors
    (result,) = record.read(files[0]).outcome.results
    assert (result.status, result.detail) == (status, words)
    assert output.count(words) == 1, "the table says it, and nothing repeats it"
    assert files[1].exists()


def test_an_interrupt_keeps_the_candidates_that_were_judged(entered, tmp_path, monkeypatch):
    turns = itertools.count()

    def interrupted(*arguments, **options):
        if next(turns):
            signal.raise_signal(signal.SIGINT)
        return prepare(*arguments, **options)

    monkeypatch.setattr("concord.conformance.compare.comparisons.prepare", interrupted)
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    words = "compare tests.test_candidates:net --as bfloat16 --as float16 --inputs"
    page = tmp_path / "page.html"
    _, errors = entered(
        words, tmp_path / "inputs.safetensors", "--json", tmp_path / "out.json", "--html", page, ends=130
    )
    assert errors == ["concord: interrupted"]
    assert 'class="growth"' not in page.read_text(), "one tensor has no line"
    outcome = record.read(tmp_path / "out.json").outcome
    assert ([result.backend for result in outcome.results], outcome.unfinished) == (["bfloat16"], 1)


def test_whether_a_function_builds_a_module_is_read_and_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "ports").mkdir()
    (tmp_path / "ports/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "ports/arrays.py").write_text("def port(x):\n    return x\n")
    (tmp_path / "ports/broken.py").write_text("def port(:\n")
    monkeypatch.chdir(tmp_path)
    for name in ("ports.arrays:port", "ports.broken:port", "ports.missing:port", "ports.onnx"):
        assert loaded(name) == name
    (tmp_path / "ports/modules.py").write_text("def port():\n    return None\n")
    with pytest.raises(SpecError, match="SystemExit: imported"):
        loaded("ports.modules:port")


# Compiled candidates.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 3)
        self.eval()

    def body(self, x):
        return self.outer(F.gelu(self.norm(self.inner(x))))

    def forward(self, x):
        return self.body(x)


def right(graph, _):
    return graph


def wrong_where_it_fuses(graph, _):
    # Wrong only if a norm and an activation are in one graph.
    called = [str(node.target) for node in graph.graph.nodes]
    factor = 1.01 if all(any(name in target for target in called) for name in ("layer_norm", "gelu")) else 1.0
    return lambda *arguments: [
        factor * result if isinstance(result, torch.Tensor) and result.is_floating_point() else result
        for result in graph(*arguments)
    ]


def in_place(net, **options):
    net.compile(**options)
    return net


COMPILED = {
    "module": torch.compile,
    "in place": in_place,
    "part": lambda net, **options: nn.Sequential(torch.compile(net, **options)),
    "part in place": lambda net, **options: nn.Sequential(in_place(net, **options)),
}


@pytest.mark.parametrize("way", sample_of(COMPILED, lambda place, _: place in (0, 3)))
def test_a_program_is_judged_as_its_compiler_made_it(way):
    reference, inputs = nn.Sequential(Net()).eval() if "part" in way else Net(), {"x": X}
    if "part" in way:
        inputs = {"input": X}
    agrees = compare(reference, COMPILED[way](Net(), backend=right).eval(), inputs, gradients=True)
    assert agrees.passed
    assert not agrees.unchecked
    wrong = COMPILED[way](Net(), backend=wrong_where_it_fuses).eval()
    comparison = prepare(reference, wrong, inputs, gradients=True)
    verdict = comparison.verdict()
    assert (verdict.status, verdict.first) == ("diverges", "output")
    assert not any("_orig_mod" in name for name in comparison.tensors)
    assert {row.status for row in verdict.table if row.tensor.endswith("norm")} <= {"agrees"}
    assert "no activation diverges" in str(verdict)
    # Graphs compiled while one comparison recorded activations are not those that the next one judges.
    assert compare(reference, wrong, inputs).first == "output"
    assert compare(wrong, reference, inputs).passed  # a reference is its source, compiled or not


def scripted_part():
    net = Net()
    net.norm = torch.jit.script(net.norm)
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [lambda: torch.jit.trace(Net(), X), scripted_part])
def test_a_scripted_module_is_judged_as_it_is(make):
    assert compare(Net(), make(), {"x": X}).passed
    wrong = make()
    with torch.no_grad():
        wrong.outer.bias += 0.01
    assert compare(Net(), wrong, {"x": X}).first in ("outer", "output")


class Shy(Net):
    """Computes something else while hooks are registered."""

    def body(self, x):
        return super().body(x) * (1.0 if self.norm._forward_hooks else 1.01)


class Branching(Net):
    """Computes something else when compiled."""

    def body(self, x):
        return super().body(x) * (1.01 if torch.compiler.is_compiling() else 1.0)


def test_a_module_that_computes_otherwise_under_hooks_or_compiled_is_judged_as_it_runs(monkeypatch):
    assert compare(Net(), Shy(), {"x": X}).first == "output"
    # The default compiler takes long; this one returns the graph unchanged.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert compare(Branching(), way="compile", inputs={"x": X}).first == "output"
    assert compare(Net(), way="compile", inputs={"x": X}).passed


# What PyTorch does outside of modules.


class CutOff(Net):
    """The gradient may be cut off in one of two branches with the same weights."""

    cut_off = False

    def body(self, x):
        norm = self.norm(self.inner(x))
        return self.outer(norm.detach() if self.cut_off else norm) + self.outer(x.new_ones(11))


@pytest.mark.parametrize("turn", [1, -1])
def test_a_branch_whose_gradient_is_cut_off_diverges(turn):
    intact, cut = CutOff(), CutOff()
    cut.cut_off = True
    verdict = compare(*(intact, cut)[::turn], {"x": X}, gradients=True)
    assert verdict.first.startswith("gradients.")
    assert verdict.row("gradients.inner.weight").status == "diverges"


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(12, 2, 19, batch_first=True)
        self.encoder, self.outer = nn.TransformerEncoder(layer, 1), nn.Linear(12, 3)
        self.eval()

    def forward(self, x, padding):
        return self.outer(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_an_encoder_is_judged_where_it_is_taken():
    inputs = {"x": torch.randn(3, 7, 12), "padding": torch.arange(7) >= torch.tensor([[7], [3], [5]])}
    right, port = Padded(), Padded()
    with torch.no_grad():
        port.encoder.layers[0].linear1.bias += 1e-8  # changes the bits
    comparison = prepare(right, port, inputs)
    assert comparison.verdict().passed
    assert comparison.whole == {"output"}
    comparison.tensors["output"][1, 4] += 1e-3  # in padding
    assert comparison.verdict().first == "output"


# Ways to run a module.


@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_a_lower_precision_agrees_by_its_own_rules(way):
    assert 0 < compare(Net(), inputs={"x": X}, way=way).worst <= 1


def normed(m, x):
    # A norm may stay in float32, whatever the precision of the product after it.
    return m.product(m.norm(x.to(m.norm.weight.dtype)).to(m.product.weight.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_is_judged_in_the_precision_of_most_of_its_parameters(dtype):
    layers = {"norm": lambda: nn.LayerNorm(5), "product": linear(5, 3)}
    right, port = (Of(normed, layers) for _ in range(2))
    port.product.to(dtype)
    comparison = prepare(right, port, X)
    assert comparison.verdict().passed
    assert (comparison.reference.precision == "bfloat16") == (dtype == torch.bfloat16)
    assert compare(nn.Linear(5, 3).eval(), nn.Linear(5, 3).to(dtype).eval(), X).first == "output"


class Shortened(nn.Linear):
    """Rounds its factors to 11 bits, as TF32 does, or cuts them off."""

    def __init__(self, shorten):
        super().__init__(131, 17)
        self.shorten = shorten

    def forward(self, x):
        operands = (self.shorten(y.detach().numpy(), 11) for y in (x, self.weight))
        return F.linear(*map(torch.from_numpy, operands), self.bias)


@pytest.mark.parametrize("shorten", [round_to_bits, cut_to_bits])
def test_a_product_of_tf32_agrees_by_its_own_rules_alone(shorten):
    right, port = (nn.Sequential(layer).eval() for layer in (nn.Linear(131, 17), Shortened(shorten)))
    port.load_state_dict(right.state_dict())
    x = torch.randn(5, 131)
    assert compare(right, port, x).first == "0"
    assert compare(right, port, x, declared=["tf32"]).passed
    port[0].bias.data += 0.1
    assert compare(right, port, x, declared=["tf32"]).first == "0"


def test_weights_of_8_bits_are_judged_by_what_they_say():
    pytest.importorskip("torchao")
    comparison = prepare(Net(), inputs={"x": X}, way="int8")
    assert comparison.verdict().passed
    assert re.search(r"uses the 2 .* differs most from .* by 0\.\d\d% ", comparison.notes["8-bit weights"])
    assert compare(Net(), comparison.theirs.model, {"x": X}).first == "inner"
    with pytest.raises(SpecError, match=r"ReLU has no nn\.Linear"):
        prepare(nn.ReLU().eval(), way="int8", inputs=X)


# Arrays, files, functions and graphs.


def test_arrays_a_file_and_functions_are_candidates(tmp_path):
    model, arrays = Net(), activations(Net(), {"x": X})
    arrays["inner"] *= np.float32(1 + 2**-23)
    save_file(arrays, tmp_path / "made.safetensors")
    assert_same(model, tmp_path / "made.safetensors", {"x": X})

    def function(**inputs):
        assert inputs["x"].shape == (7, 5)
        return {"norm": arrays["norm"]}

    assert_same(model, function, {"x": X}, declared=["output"])
    # Another process returns its three results by position, in an order that no name has.
    model = Of(lambda m, input: [input * place for place in (2, 0, 1)], {})
    assert_same(model, "tests.toys.called:backwards", X)


def test_outputs_of_a_function_are_matched_by_their_keys_in_any_order():
    model = Of(lambda m, x: {"y": m.a(x), "z": m.a(x).tanh()}, {"a": linear(5, 5)})

    def port(x):
        y = model.a(torch.from_numpy(x)).detach().numpy() * np.float32(1 + 2**-23)
        return {"z": np.tanh(y), "y": y}

    assert_same(model, port, X)
    assert_same(model, port, X, names={"y": "output[y]"})
    assert compare(model, port, X, names={"y": "output[z]", "z": "output[y]"}).status == "diverges"


def stepped(m, x, steps, others, unused=None):
    for _ in range(steps):
        x = m.a(x) * sum(others)
    return torch.complex(x, -x), x


def test_a_function_gets_what_it_takes_and_may_return_a_tuple_and_complex_numbers():
    model = Of(stepped, {"a": linear(5, 5)})

    def port(x, steps, others):
        results = stepped(model, torch.tensor(x), steps, [torch.tensor(array) for array in others])
        return tuple(result.detach().numpy() for result in results)

    others = [X[0], X[1]]
    assert_same(model, port, (X, 3, others))
    assert_same(model, port, {"x": X, "steps": 3, "others": others, "unused": 1})


def test_a_function_gets_more_than_ten_inputs_in_their_order():
    model = Of(lambda m, *inputs: torch.stack(inputs), {})
    assert_same(model, lambda *inputs: np.stack(inputs), tuple(X[:1] * place for place in range(11)))


GRAPH = """<ir_version: 10, opset_import: ["": 18]>
graph (float[7, 3] x, float[3, 5] weight) => (float[7, 5] y) {
    product = MatMul (x, weight)
    y = Tanh (product)
}"""


def test_a_graph_shows_what_modules_return_where_its_exporter_noted_them(tmp_path):
    onnx = pytest.importorskip("onnx")
    model, path = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh()).eval(), tmp_path / "graph.onnx"
    weight = model[0].weight.detach().numpy().T * np.float32(1.001)
    graph = onnx.parser.parse_model(GRAPH)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    for place, node in enumerate(graph.graph.node):
        node.metadata_props.add(key=SCOPES, value=f"['', '{place}']")
    onnx.save(graph, path)
    model.activations, model.input_names = ["tanh"], ["z"]  # the model's own, not a graph's
    table = compare(model, path, torch.linspace(-1, 1, 21).reshape(7, 3)).table
    assert {row.tensor: row.status for row in table} == {"0": "diverges", "1": "agrees", "output": "diverges"}


NORMED = """<ir_version: 10, opset_import: ["": 18]>
graph (float[7, 3, 5] x, float[3] scale, float[3] bias, float[5] width, int64[2] flat) => (float[7, 15] y) {
    normed = InstanceNormalization <epsilon = 1e-5> (x, scale, bias)
    layer = LayerNormalization (normed, width)
    shown = Sigmoid (layer)
    y = Reshape (shown, flat)
}"""


@pytest.fixture
def graphs(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("concord.conformance.compare.onnx_reference", exc_type=ModuleNotFoundError)

    def write(name, scale):
        graph, path = onnx.parser.parse_model(NORMED), tmp_path / f"{name}.onnx"
        constants = {"scale": np.float32([1, 2, 3]) * np.float32(scale), "bias": np.float32([0, 1, -1])}
        constants["width"] = np.linspace(1, 2, 5, dtype=np.float32)
        for key, array in (constants | {"flat": np.int64([7, -1])}).items():
            graph.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
        del graph.graph.input[1:]
        onnx.save(graph, path)
        return str(path)

    return write("right", 1.0), write("wrong", 1.0001)


def test_a_graph_is_a_reference_whose_nodes_are_activations(graphs):
    right, wrong = graphs
    x = np.random.default_rng(3).normal(2.0, 3.0, (7, 3, 5)).astype(np.float32)
    verdict = compare(right, right, {"x": x})
    assert verdict.passed, verdict
    assert verdict.row("LayerNormalization_layer[0]").ratio > 0
    assert verdict.row("Sigmoid_shown").ratio > 0
    verdict = compare(right, wrong, x)
    assert verdict.first == "InstanceNormalization_normed"
    with pytest.raises(SpecError, match=r"inputs are missing but required: x of .*\.onnx"):
        compare(right, right)


def test_a_graph_that_is_converted_wrongly_is_refused(graphs):
    right, wrong = graphs
    reference = load(right)
    reference.path = Path(wrong)
    with pytest.raises(SpecError, match="onnx2pytorch converts InstanceNormalization_normed incorrectly"):
        compare(reference, right, {"x": np.linspace(-1, 1, 105, dtype=np.float32).reshape(7, 3, 5)})
