import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import assert_same, compare, prepare
from concord.conformance.judging.exemptions import ABSENT, CONSTANT
from concord.conformance.judging.verdict import Judgement, Row, Verdict, verdict_lines
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear, parameter
from tests.toys.modules import WIDTH, Attention, Fused, Layer, activations, encoder, texts

TABLE = {
    "scale": parameter(5),
    "inner": linear(3, 5),
    "position": lambda: nn.Embedding(7, 5),
    "act": nn.ReLU,
}


def looked_up(m, x):
    # Returns a parameter, and the sum of an activation and a table that does not depend on the input.
    places = m.position(torch.arange(len(x)))
    return {"scale": m.scale * 1.0, "y": m.act(m.inner(x)) + 0.1 * places}


X = torch.linspace(-1, 1, 21).reshape(7, 3)


def table():
    return Of(looked_up, TABLE)


def arrays(names, factor=1 + 2**-23, model=None, inputs=X):
    # By default each element is off by one rounding.
    tensors = prepare(model or table(), None, inputs).tensors
    return {name: tensors[name] * np.float32(factor) for name in names}


def verdict(names, *declared, factor=1 + 2**-23):
    return compare(table(), arrays(names, factor), X, declared=declared)


# Right and wrong candidates.


def layer(attention=Attention):
    torch.manual_seed(3)
    return Layer(attention).eval()


HIDDEN = {"x": torch.randn(3, 7, WIDTH), "mask": texts()["attention_mask"]}


def test_another_form_of_attention_agrees():
    judged = compare(layer(), layer(Fused), HIDDEN, gradients=True)
    assert judged.status == "agrees"
    agreeing = {row.tensor for row in judged.table if row.status == "agrees"}
    assert {"attention.output", "output"} <= agreeing
    assert {"gradients.attention.query.weight", "gradients.taps.norm2"} <= agreeing


def test_a_model_beside_itself_has_the_same_bits_at_once():
    judged = compare(layer(), layer(), HIDDEN)
    assert {row.note for row in judged.table} == {"the same bits as the reference's own run"}
    assert not any(row.tensor.startswith("gradients.") for row in judged.table)
    merged = layer()
    assert ["own module" in str(compare(merged, other, HIDDEN)) for other in (merged, layer())] == [
        True,
        False,
    ]


BUGS = {
    "norm_epsilon": ("norm1", lambda model: setattr(model.norm1, "eps", 1e-3)),
    "transposed_weight": (
        "attention.value",
        lambda model: setattr(model.attention.value.weight, "data", model.attention.value.weight.data.T),
    ),
    "score_scale_missing": ("attention.output", lambda model: setattr(model.attention, "scaling", 1.0)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found_where_it_is_and_named(bug):
    wrong = layer()
    first, edit = BUGS[bug]
    edit(wrong)
    judged = compare(layer(), activations(wrong, HIDDEN), HIDDEN).explained()
    assert (judged.first, judged.cause.hypothesis) == (first, bug)


def test_a_wrong_derivative_is_said_to_be_one_alone():
    right, wrong = table(), table()
    wrong.act.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 1.01,))
    judged = compare(right, wrong, X, gradients=True)
    assert judged.first.startswith("gradients.")
    assert "only the gradients diverge" in str(judged)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def test_gradients_of_inputs_are_judged_and_gradients_of_nothing_are_refused():
    right, wrong = Of(lambda m, x: 2 * x, {}), Of(lambda m, x: Scaled.apply(x), {})
    inputs = X.clone().requires_grad_()
    assert compare(right, right, inputs, gradients=True).row("gradients.inputs.0").status == "agrees"
    assert compare(right, wrong, inputs, gradients=True).first == "gradients.inputs.0"
    with pytest.raises(SpecError, match="no output of the reference depends on a parameter or input that"):
        compare(right, wrong, X, gradients=True)


def test_a_failure_says_the_first_divergence_and_what_else_is_wrong_by_itself():
    right, wrong = (nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).eval() for _ in range(2))
    wrong.load_state_dict(right.state_dict())
    for place in (0, 2):
        wrong[place].weight.data += 0.1
    with pytest.raises(
        AssertionError,
        match=r"^diverges at 0 by \S+ tolerances: .*`0(.|\n)*first at 0(.|\n)*judged separately: `2`",
    ) as caught:
        assert_same(right, wrong, torch.randn(3, 5))
    assert "computed by \n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words", "never"),
    [
        (
            {"z": 4.6e44, "actual": 0.5, "expected": 0.0, "sigma": 1e-38},
            "where the exact value is 0",
            "tolerances",
        ),
        (
            {"z": np.inf, "actual": np.nan, "expected": 0.5, "sigma": 1e-7},
            "the run nan, reference 0.5",
            "inf",
        ),
        (
            {"z": 7.0, "rms": 9.0, "actual": 0.5, "expected": 0.4, "sigma": 0.1},
            "(0.44 tolerances; 1.64 by the RMS of all 17 elements; local error; no single element exceeds",
            "0 of",
        ),
        (
            {"z": 32.0, "rms": 22.0, "actual": 0.5, "expected": 0.4, "sigma": 0.1},
            "(2.00 tolerances; 4.01 by the RMS of all 17 elements; local error; 1 of 17 elements beyond)",
            "inf",
        ),
    ],
)
def test_numbers_are_told_where_a_ratio_says_nothing(given, words, never):
    judged = Judgement("diverges", element=(0, 3), beyond=int(given["z"] > 16), size=17, **given)
    text = "\n".join(verdict_lines(Verdict([Row("a", "", "diverges", judged, None, "", 17)])))
    assert words in text.splitlines()[1]
    assert never not in text.splitlines()[1].replace("tolerance ±", "")
    assert "--forward-only" not in text


# Which outputs are judged.


def test_a_candidate_that_nobody_returned_is_refused():
    for candidates in (None, {"port": None}):
        with pytest.raises(SpecError, match="is None but must be"):
            compare(encoder(), candidates, texts())


def test_a_verdict_agrees_if_every_output_was_judged():
    assert verdict(["output[scale]", "output[y]"]).passed


@pytest.mark.parametrize("names", [["output[scale]"], ["inner"], ["inner", "act", "output[y]"]])
def test_an_output_that_is_not_delivered_is_not_judged_and_may_be_declared(names):
    result = verdict(names)
    lacking = {"output[scale]", "output[y]"} - {*names}
    assert (result.status, {*result.unjudged}) == ("undetermined", lacking)
    assert all(f"{name} not judged (not returned): return it; if" in str(result) for name in lacking)
    assert all(f'give --declare "{name}"' in str(result) for name in lacking)
    declared, depending = verdict(names, *lacking), {"inner", "output[y]"} & {*names}
    assert (declared.passed, verdict(names, "output").passed) == (bool(depending), bool(depending))
    assert {row.note for row in declared.table if row.tensor in lacking} == {ABSENT}
    assert verdict(names, *lacking, factor=1.01).status == "diverges"


def masked(m, x, ids, mask):
    weights = torch.softmax(x.masked_fill(~mask, -9.0), -1)
    return m.last(weights.clamp(max=0.36)) + m.table(ids)


def test_an_agreement_says_what_these_inputs_do_not_show():
    layers = {"last": linear(3, 5), "table": lambda: nn.Embedding(7, 5)}
    model, port = Of(masked, layers), Of(masked, layers)
    for module in (model, port):
        nn.init.zeros_(module.last.bias)
    port.table.weight.data[3] += 1
    hiding, inputs = X > 0, {"x": 4 * X, "ids": torch.arange(2, 9) % 2}
    steps, neutral, differing = compare(model, port, {**inputs, "mask": torch.ones_like(hiding)}).notes
    assert re.fullmatch(r"untested.* change nothing: masked_fill \(test_compare.py:\d+\)", steps)
    assert re.fullmatch(r"untested.* 0, or all are 1: last.bias", neutral)
    assert re.search(r"the modules differ, .*: `table.weight` differs in 5 of 35 elements", differing)
    assert not any(
        "change nothing" in note for note in compare(model, port, {**inputs, "mask": hiding}).notes
    )


def test_what_follows_a_layer_of_zeros_is_judged_end_to_end():
    def forward(m, x):
        return m.last(x + m.added(x))

    layers = {"added": linear(5, 5), "last": linear(5, 3)}
    model = Of(forward, layers)
    nn.init.zeros_(model.added.weight)
    nn.init.zeros_(model.added.bias)
    in_parts = Of(lambda m, x: torch.cat([forward(m, x[:2]), forward(m, x[2:]) * (1 + 2**-23)]), {})
    in_parts.added, in_parts.last = model.added, model.last
    row = compare(model, in_parts, drawn(7, 5)).row("output")
    assert (row.end_to_end.status, row.status) == ("agrees", "agrees")


def test_what_depends_on_no_input_says_nothing_of_the_forward_pass():
    text = str(verdict(["position", "output[scale]"], "output"))
    assert text.startswith("undetermined")
    assert f"forward not judged: {CONSTANT}" in text


def chosen():
    # It returns outputs of several types, and has a layer named `output`.
    def forward(m, x):
        y = m.last(torch.relu(m.output(x)))
        return {"y": y, "ids": y.argmax(-1), "mask": y > 0, "sum": y.sum().item(), "count": len(x)}

    return Of(forward, {"output": linear(3, 5), "last": linear(5, 5)})


def test_outputs_of_whole_numbers_truth_values_and_numbers_of_python_are_judged():
    right, port = chosen(), chosen()
    with torch.no_grad():
        port.output.bias += 1e-8  # changes the bits
    comparison = prepare(right, port, X)
    assert comparison.verdict().passed
    tensors = comparison.tensors
    for name in ("output", "output[ids]", "output[mask]", "output[sum]", "output[count]"):
        assert compare(right, {**tensors, name: tensors[name] + 1}, X).first == name
    lacking = {name: array for name, array in tensors.items() if name != "output[ids]"}
    assert compare(right, lacking, X).unjudged == ("output[ids]",)
    by_place = {
        str(place): right(X)[name].detach().numpy() for place, name in enumerate(("y", "ids", "mask"))
    }
    assert {*prepare(right, by_place, X).tensors} == {"output", "output[ids]", "output[mask]"}


def apart(m, x, times=1.0, by=1e-3):
    scores = m.inner(x)
    others = (scores + by * m.act(scores)).softmax(-1)
    return times * F.kl_div(scores.log_softmax(-1), others, reduction="batchmean")


def test_an_output_that_is_lost_in_rounding_agrees_with_nothing():
    def judged(times, by=1e-3):
        return compare(*(Of(partial(apart, by=by, times=factor), TABLE) for factor in (1.0, times)), X).status

    assert [judged(1 + 2**-22, by=1.0), judged(1.1, by=1.0)] == ["agrees", "diverges"]
    assert [judged(1.1), judged(1e4)] == ["undetermined", "diverges"]
    # A difference of equal values is zero in every correct run, up to rounding.
    assert judged(1.5, by=0.0) == "agrees"


class Counted(nn.Module):
    """Returns integers that float64 cannot tell from their neighbours."""

    def forward(self, x):
        return {"y": x + 1.0, "ids": 2**60 + torch.arange(len(x))}


def test_integers_that_float64_rounds_never_agree():
    right = Counted().eval()
    ids = right(X)["ids"].numpy()
    for off, status in ((0, "undetermined"), (1, "undetermined"), (2**20, "diverges")):
        port = {"output[y]": X.numpy() + 1, "output[ids]": ids + off}
        assert compare(right, port, X).row("output[ids]").status == status


# Models and inputs that leave nothing to judge.


def layers(name="", value=0.0):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    if name:
        nn.init.constant_(model.get_parameter(name), value)
    return model


VOID = {
    "an empty batch": (layers(), X[:0], "it has no elements"),
    "inputs that are infinite": (layers(), X / 0, "the inputs are not finite"),
    "weights that are NaN": (layers("0.weight", torch.nan), X, "where 0 is the first such tensor"),
}


@pytest.mark.parametrize("kind", VOID)
def test_where_nothing_is_to_be_judged_no_port_agrees(kind):
    model, inputs, words = VOID[kind]
    for candidate in (model, arrays(["output"], 3.0, model, inputs)):
        result = compare(model, candidate, inputs)
        assert result.status == "undetermined"
        assert "output not judged: " in str(result)
        assert words in str(result)


def test_a_tensor_that_is_partly_finite_is_judged_where_it_is():
    inputs = X.clone()
    inputs[2] = torch.nan
    assert compare(layers(), layers(), inputs).passed
    assert compare(layers(), layers("2.bias", 0.01), inputs).status == "diverges"


def test_numbers_where_one_side_alone_has_none_diverge():
    void, port = layers("0.weight", torch.nan), arrays(["output"], model=layers())
    assert compare(void, port, X).first == "output"
    port["output"][3, 1] = np.nan
    assert compare(layers(), port, X).first == "output"


def test_complex_numbers_that_are_conjugated_are_judged():
    right, other = Of(lambda m, x: torch.fft.rfft(x), {}), Of(lambda m, x: torch.fft.rfft(x).conj(), {})
    assert compare(right, other, X).first == compare(other, right, X).first == "output"
    assert "search for a cause failed" not in str(compare(right, other, X))


# Invalid arguments.


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise TypeError("no float64")
    return 2 * x


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("a lock")


def beside(candidate, **options):
    return lambda: compare(encoder(), candidate, texts(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compare(3), "the reference has type int but must be a torch.nn.Module"),
        (lambda: compare(encoder(), way="fast"), "unknown way 'fast'"),
        (lambda: compare(encoder(), way="bfloat16+onnx"), "'onnx' cannot be joined with others"),
        (lambda: compare(layers(), inputs=X, way="cached"), "way 'cached' needs a transformers decoder"),
        (lambda: compare(layers(), inputs=X, way="tf32"), "way is 'tf32' but PyTorch sees no CUDA device"),
        (lambda: compare(Uncopyable(3, 5).eval(), inputs=X, way="bfloat16"), "cannot be copied, as way"),
        (lambda: compare(encoder().train(), inputs=texts(), way="bfloat16"), "must be in evaluation mode"),
        (lambda: compare(encoder().double(), encoder(), texts()), "must be in float32"),
        (lambda: compare(nn.Linear(2, 3).eval()), "missing but required: input of Linear; give them with"),
        (beside(encoder(), input_ids=X), "unknown option 'input_ids'; inputs go into a dictionary"),
        (beside({"a": encoder()}, mask=X), "unknown option 'mask'; inputs go into a dictionary"),
        (lambda: compare(encoder(), encoder(), texts()["input_ids"]), "reference cannot .* 'attention_mask'"),
        (lambda: compare(Of(lambda m, x: twice(x), {}), nn.ReLU(), X), "twice.* in float64: no float64"),
        (lambda: verdict(["inner"], "output[z]"), r"unknown output 'output\[z\]'"),
        (beside(encoder(), way="sdpa"), "a candidate is given too"),
        (beside(encoder(), declared=["speed"]), "unknown declaration 'speed'"),
        (beside({"nothing": np.zeros(7)}), "no activation of the candidate shares a name"),
        (beside("nowhere.onnx"), "^nowhere.onnx: no such file$"),
    ],
)
def test_nonsense_is_refused_in_one_line(make, message):
    with pytest.raises(SpecError, match=message) as caught:
        make()
    assert len(caught.value.problems) == 1


# The command.


def test_the_command_judges_writes_and_exits(entered, tmp_path):
    def given(name, tensors):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    line, inputs = "compare tests.test_compare:table", ("--inputs", given("inputs", {"x": X.numpy()}))
    assert "sensitivity" in entered(line, "--as", "bfloat16", "--prove", *inputs)[0]
    inner, outputs = arrays(["inner"]), arrays(["output[scale]", "output[y]"])
    port, page = given("port", inner), tmp_path / "page.html"
    (refused,) = entered("compare --prove", ends=2)[1]
    assert refused.endswith(
        "--prove is given but applies only to a REFERENCE and one candidate on the command line"
    )
    (refused,) = entered(line, "mine:port", "--alone-and-batched", ends=2)[1]
    assert refused.endswith("--alone-and-batched is given but applies only to the reference")
    assert "output[y] not judged (not returned)" in entered(line, port, *inputs, "--seed", "3", ends=3)[0]
    entered(line, port, *inputs, "--declare", "output[y]", "--declare", "output[scale]")
    wrong = given("wrong", outputs | {"inner": inner["inner"] * np.float32(1.01)})
    assert "first at inner" in entered(line, wrong, *inputs, "--html", page, ends=1)[0]
    assert "inner" in (text := page.read_text())
    assert not re.search("clause|eclared deviation", text)
    named = given("named", outputs | {"first": inner["inner"]}), *inputs, "--names", tmp_path / "names.txt"
    # Names are only printed, for inspection.
    assert entered(line, *named, ends=3)[0].startswith("first = inner\nwritten: ")
    entered(line, *named)
    assert (tmp_path / "names.txt").read_text() == "first = inner\n"
    (tmp_path / "names.txt").write_text("# first\n\nfirst : inner\n")
    assert "names.txt:3: the line must be CANDIDATE'S NAME" in entered(line, *named, ends=2)[1][0]
    (tmp_path / "names.txt").write_text("# first\nfrist = inner\n")
    assert "names.txt:2: no tensor of the candidate matches 'frist'" in entered(line, *named, ends=2)[1][-1]
