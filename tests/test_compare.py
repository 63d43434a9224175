"""Any model: right candidates agree, wrong ones diverge where they are wrong, and nonsense is refused."""

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import assert_same, compare, prepare
from concord.conformance.compare.candidates import SCOPES
from concord.conformance.compare.comparison import ModelComparison
from concord.conformance.compare.proof import batched, prove
from concord.conformance.compare.reference import ModuleReference
from concord.spec.errors import SpecError
from concord.spec.precision import cut_to_bits, round_to_bits
from tests.toys.modules import TOKENS, WIDTH, Fused, encoder, texts


def activations(model, inputs):
    """Return what submodules return, as a user would note it."""
    return ModuleReference(model, kwargs=inputs).arrays


# Right candidates.


@pytest.mark.parametrize("gradients", [False, True])
def test_another_form_of_attention_agrees(gradients):
    verdict = compare(encoder(), encoder(Fused), texts(), gradients=gradients)
    assert verdict.status == "agrees"
    judged = {row.tensor for row in verdict.table if row.status == "agrees"}
    assert {"layers.1.attention.output", "output[logits]"} <= judged
    assert ("gradients.layers.0.attention.query.weight" in judged) == gradients
    assert ("gradients.taps.layers.0.norm2" in judged) == gradients


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
    """They are cut off."""

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
    with pytest.raises(SpecError, match=r"Scaled has no nn\.Linear"):
        prepare(Scaled().eval(), way="int8")


def test_a_way_whose_package_is_missing_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(SpecError, match=r"way 'int8' needs torchao.*, which is not installed"):
        prepare(encoder(), inputs=texts(), way="int8")


def test_a_model_beside_itself_has_the_same_bits_at_once():
    verdict = compare(encoder(), encoder(), texts())
    assert {row.note for row in verdict.table} == {"the same bits as the reference's own run"}


def test_an_operand_that_changes_its_shape_in_place_has_a_gradient():
    model = nn.Sequential(nn.GRU(14, 5, batch_first=True)).eval()
    comparison = prepare(model, model, torch.randn(3, 11, 14), gradients=True)
    comparison.again = False  # the same bits are judged all the same
    assert comparison.verdict().passed


# Wrong ones.


def epsilon(model):
    model.layers[1].norm1.eps = 1e-3


def tanh(model):
    model.layers[0].act = nn.GELU(approximate="tanh")


def transposed(model):
    weight = model.layers[1].attention.value.weight.data
    weight.copy_(weight.T.clone())


def unscaled(model):
    model.layers[1].attention.scaling = 1.0


def mixed(model):
    weight = model.layers[0].attention.key.weight.data
    weight.copy_(weight.roll(1, 0))


BUGS = {
    epsilon: ("layers.1.norm1", "norm_epsilon", "`layers.1.norm1.eps` is 0.001 instead of 1e-05"),
    tanh: ("layers.0.act", "activation", "`layers.0.act.approximate` is tanh instead of none"),
    transposed: ("layers.1.attention.value", "transposed_weight", "` is transposed"),
    unscaled: (
        "layers.1.attention.output",
        "score_scale_missing",
        "`layers.1.attention.scaling` is 1 instead of 0.5",
    ),
    mixed: ("layers.0.attention.key", "elements_reordered", "` has its rows in another order: 0 is 11"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_found_where_it_is_and_named(bug):
    wrong, inputs = encoder(), texts()
    bug(wrong)
    first, named, words = BUGS[bug]
    verdict = compare(encoder(), wrong, inputs).explained()
    assert (verdict.first, verdict.cause.hypothesis) == (first, "modules_differ")
    assert words in verdict.cause.text
    verdict = compare(encoder(), activations(wrong, inputs), inputs).explained()
    assert (verdict.first, verdict.cause.hypothesis) == (first, named)


def computing(function):
    module = nn.Module()
    module.forward = function
    return module.eval()


def test_where_operations_part_is_said_from_right_numbers_to_wrong_ones():
    right = computing(lambda x: torch.softmax(x @ x.T, -1) @ x)
    wrong = computing(lambda x: (powers := torch.exp(x @ x.T)) / powers.sum(0) @ x)
    said = str(compare(right, wrong, torch.randn(5, 3)))
    assert re.search(
        r"part: _softmax \(.*\) in the reference, exp \(.*\) to mm \(.*\) in the candidate", said
    )
    wrong = computing(lambda x: torch.softmax(1.01 * x @ x.T, -1) @ x)
    said = str(compare(right, wrong, torch.randn(5, 3)))
    assert "mul" in said


class Named(nn.Module):
    """Its last layer has the name of what the whole returns."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.output, self.factor = nn.Linear(3, 5), nn.Linear(5, 2), factor

    def forward(self, x):
        return self.output(self.inner(x) * self.factor)


def test_a_submodule_called_output_does_not_stand_for_the_output():
    verdict = compare(Named(1.0).eval(), Named(1.1).eval(), torch.ones(7, 3)).explained()
    assert verdict.first == "output"
    assert "`factor` is 1.1 instead of 1" in verdict.cause.text


def test_a_wrong_derivative_is_said_to_be_one_alone():
    wrong = encoder()
    wrong.layers[1].norm2.register_full_backward_hook(lambda norm, given, taken: (given[0] * 1.01,))
    verdict = compare(encoder(), wrong, texts(), gradients=True)
    assert verdict.first.startswith("gradients.")
    assert "only gradients diverge" in str(verdict)


def test_rows_that_see_no_key_are_recognised_and_may_be_declared():
    inputs = texts()
    inputs["attention_mask"][1] = 0
    assert compare(encoder(), encoder(Fused), inputs).explained().undeclared == "blind_rows_zero"
    assert compare(encoder(), encoder(Fused), inputs, declared=["blind_rows_zero"]).passed


def test_rows_of_padding_need_not_be_computed_where_that_is_declared():
    inputs = texts()
    found = activations(encoder(), inputs)
    padded = inputs["attention_mask"].numpy() == 0
    for array in found.values():
        if array.shape[:2] == padded.shape:
            array[padded] = 1e6
    assert compare(encoder(), found, inputs).explained().undeclared == "uncomputed_padding"
    assert compare(encoder(), found, inputs, declared=["uncomputed_padding"]).passed


def test_assert_same_fails_with_the_first_divergence():
    with pytest.raises(AssertionError, match=r"first at output"):
        assert_same(nn.Linear(5, 3).eval(), nn.Linear(5, 3).eval(), torch.ones(7, 5))


# Kinds of candidates.


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


def test_names_are_mapped_by_patterns():
    inputs = texts()
    arrays = activations(encoder(Fused), inputs)
    foreign = {
        f"blocks/{i}/{own}": arrays[f"layers.{i}.{theirs}"]
        for i in range(2)
        for own, theirs in (("ln_1", "norm1"), ("attn", "attention.output"))
    }
    names = {"blocks/{i}/ln_1": "layers.{i}.norm1", "blocks/{i}/attn": "layers.{i}.attention.output"}
    verdict = compare(encoder(), foreign, inputs, names=names, declared=["output"])
    assert verdict.passed
    assert sum(row.status == "agrees" for row in verdict.table) == 4


def test_names_are_proposed_by_what_tensors_hold():
    """Heads that the candidate splits off are joined, and a bug keeps no tensor from its name."""
    inputs, query = texts(), "layers.0.attention.query"
    arrays = activations(encoder(), inputs)
    split = arrays[query].reshape(3, 7, 2, 6).transpose(0, 2, 1, 3)
    foreign = {"last": arrays["layers.1"] + 0.01, "q": split}
    made = prepare(encoder(), foreign, inputs)
    assert made.proposed == {"last": "layers.1", "q": f"{query} : 0 2 1 3"}
    with pytest.raises(SpecError, match=r"such as last = layers\.1, q = "):
        made.verdict()
    assert compare(encoder(), foreign, inputs, names=made.proposed).first == "layers.1"
    with pytest.raises(SpecError, match=r"'q' has shape .* of which '0 1' makes no \(3, 7, 12\)"):
        prepare(encoder(), foreign, inputs, names={"q": f"{query} : 0 1"})


# What the inputs could have shown.


def test_a_proof_says_which_bugs_a_comparison_would_have_found():
    proof = prove(prepare(encoder(), encoder(Fused), texts()))
    (masked,) = (of for bug, of in proof.items() if bug.name == "mask_missing")
    assert masked["found"] == masked["tried"] > 0
    came = sum(proof.values(), Counter())
    assert came["found"] >= 0.9 * (came["tried"] - came["silent"])


class Leaking(nn.Module):
    """Takes a share of the mean of all samples."""

    def __init__(self, share):
        super().__init__()
        self.token, self.share = nn.Embedding(31, 5), share

    def forward(self, input_ids, attention_mask):
        pooled = (self.token(input_ids) * attention_mask[..., None]).sum(1)
        return pooled + self.share * pooled.mean(0)


def test_a_model_that_looks_at_other_samples_is_found():
    right, wrong = (
        [verdict for _, verdict in batched(prepare(Leaking(share).eval(), None, texts()).reference)]
        for share in (0.0, 1e-3)
    )
    assert [verdict.status for verdict in right] == ["agrees"] * 3
    assert {verdict.first for verdict in wrong} == {"output"}


# Nonsense.


def smaller():
    made = encoder()
    made.token = nn.Embedding(7, WIDTH)
    return made


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise TypeError("no float64")
    return 2 * x


class Custom(nn.Module):
    def forward(self, x):
        return twice(x)


class Scaled(nn.Module):
    config = SimpleNamespace(image_size=5, vocab_size=7, vision_config=SimpleNamespace(num_channels=2))

    def forward(self, pixel_values, input_values=None, input_ids=None):
        return 2.5 * pixel_values


def test_standard_inputs_follow_what_a_module_takes_and_states():
    inputs = prepare(Scaled().eval()).reference.inputs
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert shapes == {"input_ids": (3, 11), "pixel_values": (3, 2, 5, 5), "input_values": (3, 5003)}


class Chosen(nn.ReLU):
    """Which elements are kept is decided by rounding."""

    def forward(self, x):
        return super().forward(x[torch.exp(x) >= torch.exp(x)])


def test_an_activation_whose_shape_rounding_decides_is_undetermined():
    model, zeros = nn.Sequential(Chosen()).eval(), np.zeros(13, np.float32)
    assert compare(model, {"0": zeros}, torch.ones(13)).status == "undetermined"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compare(3), "the reference is a int but must be a torch.nn.Module"),
        (lambda: compare(encoder(), way="fast"), "unknown way 'fast'"),
        (lambda: compare(encoder().train(), inputs=texts(), way="bfloat16"), "must be in evaluation mode"),
        (lambda: compare(encoder().double(), encoder(), texts()), "must be in float32"),
        (lambda: compare(nn.Linear(2, 3).eval()), "inputs are missing but required: input of Linear"),
        (lambda: compare(encoder(), encoder(), texts()["input_ids"]), "reference cannot .* 'attention_mask'"),
        (lambda: compare(Custom().eval(), Scaled().eval(), torch.ones(3)), "twice.* in float64: no float64"),
    ],
)
def test_nonsense_is_refused_in_one_line(make, message):
    with pytest.raises(SpecError, match=message) as caught:
        make()
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("candidate", "message", "options"),
    [
        (encoder(), "a candidate is given too", {"way": "sdpa"}),
        (encoder(), "unknown declaration 'speed'", {"declared": ["speed"]}),
        (smaller(), "the candidate cannot .* index out of range", {}),
        ({"token": np.zeros((2, 3))}, r"has shape \(2, 3\) but must be", {}),
        ({"nothing": np.zeros(7)}, "no activation by a name", {}),
        (lambda x: x, "the candidate cannot .* unexpected keyword", {}),
        ("nowhere.onnx", "in ONNX Runtime cannot be run", {}),
        ("no.such.module:f", "gave no result: ModuleNotFoundError", {}),
    ],
)
def test_a_candidate_that_is_nonsense_is_refused_in_one_line(candidate, message, options):
    test_nonsense_is_refused_in_one_line(lambda: compare(encoder(), candidate, texts(), **options), message)


# The command.


def test_the_command_judges_writes_and_exits(invoke, tmp_path):
    inputs = {name: tensor.numpy() for name, tensor in texts().items()}
    save_file(inputs, tmp_path / "inputs.safetensors")
    wrong = activations(encoder(), texts())
    wrong["layers.1.inner"] = wrong["layers.1.inner"] * np.float32(1 + 2**-12)
    save_file(wrong, tmp_path / "wrong.safetensors")
    asked, given = "compare tests.toys.modules:encoder", ["--inputs", tmp_path / "inputs.safetensors"]
    assert invoke(asked, "--as", "bfloat16", *given)[0] == 0
    page = tmp_path / "page.html"
    code, output, _ = invoke(asked, tmp_path / "wrong.safetensors", *given, "--html", page)
    assert code == 1
    assert "first at layers.1.inner" in output
    assert "layers.1.inner" in page.read_text()
    save_file({"inner": wrong["layers.1.inner"]}, tmp_path / "wrong.safetensors")
    named = [tmp_path / "wrong.safetensors", *given, "--names", tmp_path / "names.txt"]
    assert [invoke(asked, *named)[0] for _ in range(2)] == [3, 1]
    assert (tmp_path / "names.txt").read_text() == "inner = layers.1.inner\n"
    (tmp_path / "names.txt").write_text("# inner\n\ninner : layers.1.inner\n")
    assert "names.txt:3: must be CANDIDATE'S NAME" in invoke(asked, *named)[2][0]


def test_numbers_that_are_not_finite_are_compared_as_such():
    found = activations(encoder(), texts())
    found["layers.0.inner"][0, 0, 0] = math.nan
    assert compare(encoder(), found, texts()).first == "layers.0.inner"


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
