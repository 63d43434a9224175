"""Any model: right candidates agree, wrong ones diverge where they are wrong, and nonsense is refused."""

import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import assert_same, compare
from concord.conformance.judging.verdict import Judgement, Row, Verdict, verdict_lines
from concord.spec.errors import SpecError
from tests.toys.module_bugs import setting, weight
from tests.toys.modules import WIDTH, Fused, activations, encoder, texts

# Right candidates.


@pytest.mark.parametrize("gradients", [False, True])
def test_another_form_of_attention_agrees(gradients):
    verdict = compare(encoder(), encoder(Fused), texts(), gradients=gradients)
    assert verdict.status == "agrees"
    judged = {row.tensor for row in verdict.table if row.status == "agrees"}
    assert {"layers.1.attention.output", "output[logits]"} <= judged
    assert ("gradients.layers.0.attention.query.weight" in judged) == gradients
    assert ("gradients.taps.layers.0.norm2" in judged) == gradients


def test_a_model_beside_itself_has_the_same_bits_at_once():
    verdict = compare(encoder(), encoder(), texts())
    assert {row.note for row in verdict.table} == {"the same bits as the reference's own run"}


# Wrong ones.

BUGS = {
    "norm_epsilon": (setting("layers.1.norm1", "eps", 1e-3), "layers.1.norm1"),
    "transposed_weight": (weight("layers.1.attention.value.weight", torch.t), "layers.1.attention.value"),
    "score_scale_missing": (setting("layers.1.attention", "scaling", 1.0), "layers.1.attention.output"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_where_it_is_and_named(bug):
    wrong, inputs = encoder(), texts()
    edit, first = BUGS[bug]
    edit(wrong)
    verdict = compare(encoder(), activations(wrong, inputs), inputs).explained()
    assert (verdict.first, verdict.cause.hypothesis) == (first, bug)


def test_a_wrong_derivative_is_said_to_be_one_alone():
    wrong = encoder()
    wrong.layers[1].norm2.register_full_backward_hook(lambda norm, given, taken: (given[0] * 1.01,))
    verdict = compare(encoder(), wrong, texts(), gradients=True)
    assert verdict.first.startswith("gradients.")
    assert "only gradients diverge" in str(verdict)


def test_assert_same_fails_with_the_first_divergence():
    with pytest.raises(AssertionError, match=r"first at output"):
        assert_same(nn.Linear(5, 3).eval(), nn.Linear(5, 3).eval(), torch.ones(7, 5))


# What is said.


@pytest.mark.parametrize(
    ("given", "words", "never"),
    [
        (
            {"z": 4.6e44, "actual": 0.5, "expected": 0.0, "sigma": 1e-38},
            "where the exact value is 0",
            "tolerances",
        ),
        ({"z": np.inf, "actual": np.nan, "expected": 0.5, "sigma": 1e-7}, "the run nan, oracle 0.5", "inf"),
        (
            {"z": 7.0, "rms": 9.0, "actual": 0.5, "expected": 0.4, "sigma": 0.1},
            "none alone lies beyond",
            "0 of",
        ),
    ],
)
def test_numbers_are_told_where_a_ratio_says_nothing(given, words, never):
    judged = Judgement("diverges", element=(0, 3), beyond=int(given["z"] > 16), size=17, **given)
    said = "\n".join(verdict_lines(Verdict([Row("a", "", "diverges", judged, None, "", 17)])))
    assert words in said.splitlines()[1]
    assert never not in said.splitlines()[1].replace("tolerance ±", "")
    assert "--forward-only" not in said


def test_what_else_is_wrong_by_itself_is_said():
    right, wrong = (nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).eval() for _ in range(2))
    wrong.load_state_dict(right.state_dict())
    for place in (0, 2):
        wrong[place].weight.data += 0.1
    said = str(compare(right, wrong, torch.randn(3, 5)))
    assert "wrong too, judged alone: `2`" in said
    assert "computed by \n" not in said


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compare(3), "the reference is a int but must be a torch.nn.Module"),
        (lambda: compare(encoder(), way="fast"), "unknown way 'fast'"),
        (lambda: compare(encoder().train(), inputs=texts(), way="bfloat16"), "must be in evaluation mode"),
        (lambda: compare(encoder().double(), encoder(), texts()), "must be in float32"),
        (lambda: compare(nn.Linear(2, 3).eval()), "inputs are missing but required: input of Linear"),
        (lambda: compare(encoder(), encoder(), texts()["input_ids"]), "reference cannot .* 'attention_mask'"),
        (lambda: compare(Custom().eval(), nn.ReLU().eval(), torch.ones(3)), "twice.* in float64: no float64"),
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
