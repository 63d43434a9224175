"""Joining by the path of a class, by an installed package, or by files only."""

import json

import pytest

from concord.conformance import Setup, check_jobs, conduct
from tests.toys.dumps import answer, exported, leave
from tests.toys.surroundings import ROOT, concord, errors, offer, python, suite, toy

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


@pytest.fixture(scope="module")
def verdicts():
    names = dict.fromkeys(toy(name) for name, *_ in VERDICTS)
    jobs = check_jobs(["bert"], ["float64", "bfloat16"], cases=["bert-ragged", "bert-single"])
    report = conduct(jobs, list(names), Setup(threads=1))
    assert report.exit_code == 3
    return {(result.backend, result.case, result.dtype): result for result in report.results}


@pytest.mark.xdist_group("verdicts")
@pytest.mark.parametrize(("name", "case", "dtype"), VERDICTS)
def test_what_a_backend_returns_has_its_verdict(verdicts, name, case, dtype):
    status, tensor, words = VERDICTS[name, case, dtype]
    result = verdicts[toy(name), f"bert-{case}", dtype]
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


def test_an_installed_package_offers_backends_but_cannot_take_the_place_of_a_framework(tmp_path):
    right = toy("NumpyBackend")
    packages = str(offer(tmp_path, torch=toy("ReturnsNaN"), numpy=right, alpha=right))
    done = concord("check --backend numpy --case bert-single", PYTHONPATH=packages)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "2 agree" in done.stdout
    program = "from concord import backends; print(backends.names(), backends.resolve('torch'))"
    output = python("-c", program, PYTHONPATH=packages).stdout
    names = ["torch", "tf", "paddle", "jax", "alpha", "numpy"]
    assert output.strip() == f"{names} concord.backends.torch.backend:Adapter"


# The guide, whose plug-in is a module in the current folder.


@pytest.fixture
def guide(tmp_path):
    # Holds the programs of the guide.
    text = (ROOT / "docs" / "guides" / "joining.md").read_text()
    programs = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    names = ("numpy_attention.py", "numpy_backend.py", "run_cases.py")
    for name, program in zip(names, programs, strict=True):
        (tmp_path / name).write_text(program)
    return tmp_path


def test_the_plugin_of_the_guide_agrees_with_golden_files_and_under_pytest(guide):
    done = concord("golden --backend numpy_backend:Backend", folder=guide)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "runs: 4 agree, " in done.stdout
    words = "--concord-backend numpy_backend:Backend --concord-part dot_product --concord-variant"
    ran = suite(f"{words} keras-attention", guide)
    assert ran.returncode == 0, ran.stdout
    assert " failed" not in ran.stdout


def test_the_program_of_the_guide_that_has_only_files_agrees(guide):
    export = "case export cases --part dot_product --variant vanilla-encoder"
    assert concord(export, folder=guide).returncode == 0
    assert python("run_cases.py", "cases", folder=guide).returncode == 0
    done = concord("check --from-dump cases", folder=guide)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert f"{len(list(guide.rglob('case.json')))} agree" in done.stdout


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


def edit(**fields):
    def change(path):
        data = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    return change


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("run.safetensors", lambda path: leave(path, "output"), "lacks 'loss'"),
        (
            "case.json",
            edit(format="concord.case/9"),
            "'format' is 'concord.case/9' but must be 'concord.case/1'",
        ),
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
    edit(gradients=False)(dumps / ONE / "case.json")  # without gradients, taps alone need no loss
    checked(4, "")
    (dumps / ONE / "run.safetensors").unlink()
    checked(3, "run.safetensors: no such file", ends=3)
