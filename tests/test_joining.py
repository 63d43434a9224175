"""Joining by the path of a class, by an installed package, or by files only."""

import pytest

from concord import backends
from concord.conformance import Setup, check_jobs, conduct
from tests.toys.dumps import answer, exported, leave
from tests.toys.surroundings import ROOT, offer, python, state, suite, toy

# A class.


# By backend, case and precision: the status, the first divergence, and words of the explanation.
VERDICTS = {
    ("NumpyBackend", "ragged", "bfloat16"): ("agrees", "", ""),
    ("WrongAfterTheFirstLayer", "ragged", "float64"): ("diverges", "layers.1.attention.scores", ""),
    ("WrongAfterTheFirstLayer", "single", "float64"): ("agrees", "", ""),  # one layer only
    ("ComputesInFloat32", "ragged", "bfloat16"): (
        "diverges",
        "embeddings.sum",
        "holds values that the precision cannot represent: it was computed in a wider one",
    ),
    ("ReturnsAWrongShape", "ragged", "float64"): (
        "broken",
        "",
        "'logits' is of shape (3, 5) but must be (5, 3)",
    ),
    # One missing activation of many is only named.
    ("LeavesOutATap", "ragged", "float64"): ("agrees", "", "layers.0.attention.weights"),
    ("DeclaresNotExposed", "single", "float64"): ("agrees", "", ""),
    ("SaysUnsupported", "ragged", "float64"): ("unsupported", "", "this toy has no float64 kernels"),
}


@pytest.mark.parametrize(("name", "case", "dtype"), VERDICTS)
def test_what_a_backend_returns_has_its_verdict(name, case, dtype):
    status, tensor, words = VERDICTS[name, case, dtype]
    jobs = check_jobs(["bert"], [dtype], cases=[f"bert-{case}"])
    (result,) = conduct(jobs, [toy(name)], Setup(threads=1)).results
    assert (result.status, result.verdict is None) == (status, status in ("broken", "unsupported"))
    if first := result.first_divergence:
        assert (first.tensor, first.note) == (tensor, words)
    else:
        assert tensor == ""
        assert words in (result.verdict.unchecked if result.verdict else result.detail)
    if name == "DeclaresNotExposed":
        rows = [row.tensor for row in result.verdict.table if row.status == "not exposed"]
        assert rows == [f"layers.0.attention.{step}" for step in ("scores", "masked_scores", "weights")]


# A package.


def test_an_installed_package_offers_backends_but_cannot_take_the_place_of_a_framework(tmp_path, monkeypatch):
    right = toy("NumpyBackend")
    monkeypatch.syspath_prepend(offer(tmp_path, torch=toy("ReturnsNaN"), numpy=right, alpha=right))
    assert backends.names() == ["torch", "tf", "paddle", "jax", "alpha", "numpy"]
    assert backends.resolve("torch") == "concord.backends.torch.backend:Adapter"


# The guide, whose plug-in is a module in the current folder.


@pytest.fixture
def guide(tmp_path, monkeypatch):
    # The current folder, with the programs of the guide.
    programs = [
        block.partition("```")[0]
        for block in (ROOT / "docs" / "guides" / "joining.md").read_text().split("```python\n")[1:]
    ]
    names = ("numpy_attention.py", "numpy_backend.py", "run_cases.py")
    for name, program in zip(names, programs, strict=True):
        (tmp_path / name).write_text(program)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plugin_of_the_guide_agrees_with_golden_files_and_under_pytest(guide, entered):
    output, errors = entered("golden --backend numpy_backend:Backend")
    assert not errors
    assert "runs: 4 agree, " in output
    words = "--concord-backend numpy_backend:Backend --concord-part dot_product --concord-variant"
    ran = suite(f"{words} keras-attention", guide)
    assert ran.returncode == 0, ran.stdout
    assert " failed" not in ran.stdout


def test_the_program_of_the_guide_that_has_only_files_agrees(guide, entered):
    entered("case export cases --part dot_product --variant vanilla-encoder")
    assert python("run_cases.py", "cases", folder=guide).returncode == 0
    output, errors = entered("check --from-dump cases")
    assert not errors
    assert f"{len(list(guide.rglob('case.json')))} agree" in output


# Files.

ONE = "bert-single-float64"


@pytest.fixture
def cases(tmp_path):
    return exported(tmp_path / "cases", "bert-single", "keras-attention-ragged")


@pytest.fixture
def dumps(cases):
    # The same with runs.
    return answer(cases)


@pytest.mark.parametrize("tensor", ["taps/layers.0.attention.context", "gradients/layers.0.norm2.bias"])
def test_a_wrong_dump_diverges_at_the_wrong_tensor(entered, cases, tensor):
    folder = answer(cases / ONE, tensor)
    output, errors = entered(f"check --from-dump {folder}", ends=1)
    assert not errors
    name = tensor.removeprefix("taps/").replace("gradients/", "gradients.")
    assert f"first at {name} (SPEC " in output
    # A tap that was changed later also contradicts the input of the next step.
    assert ("  1 of " in output) == ("context" not in tensor)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("run.safetensors", lambda path: leave(path, "output"), "lacks 'loss'"),
        (
            "case.json",
            lambda path: state(path, format="concord.case/9"),
            "'format' is 'concord.case/9' but must be 'concord.case/1'",
        ),
        ("run.json", lambda path: state(path, inof={}), "unknown key 'inof': did you mean 'info'?"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(refused, dumps, tmp_path, name, spoil, message):
    spoil(dumps / ONE / name)
    (error,) = refused(f"check --from-dump {dumps} --json {tmp_path / 'out.json'}")
    assert str(dumps / ONE / name) in error
    assert message in error
    assert not (tmp_path / "out.json").exists()


def test_what_lacks_in_a_dump_is_said_and_the_others_are_judged(entered, dumps):
    def checked(agree, words, ends=0):
        output, errors = entered(f"check --from-dump {dumps}", ends=ends)
        assert not errors
        assert words in " ".join(output.split())
        assert f"{agree} agree" in output

    (dumps / ONE / "run.json").unlink()  # only names the backend
    checked(4, "dump")
    leave(dumps / ONE / "run.safetensors", "output", "loss")
    checked(3, "not checked: the run does not return ", ends=3)
    state(dumps / ONE / "case.json", gradients=False)  # without gradients, taps alone need no loss
    checked(4, "")
    (dumps / ONE / "run.safetensors").unlink()
    checked(3, "run.safetensors: no such file", ends=3)
