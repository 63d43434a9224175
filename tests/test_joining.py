"""Joining from outside: a class by its path, an installed package, or nothing but files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord.conformance import Report, Settings, check_jobs, conduct
from tests.toys.surroundings import PATIENCE, ROOT, concord, errors, offer, options, toy

Invoke = Callable[..., tuple[int, str, list[str]]]


# A class.


@pytest.mark.parametrize("part", ["model", "dot_product"])
def test_a_class_agrees_in_every_precision(invoke: Invoke, part: str) -> None:
    dtypes = options("--dtype", ["float64", "float32", "bfloat16", "float16"])
    code, output, errors = invoke(
        f"check --backend {toy('NumpyBackend')}",
        *dtypes,
        "--part",
        part,
        "--variant",
        "bert",
        "--variant",
        "keras-attention",
    )
    assert errors == []
    assert " agree" in output.splitlines()[-2]
    assert "diverges" not in output
    # Of gradients that leave the range of float16 nothing is judged, and what was not judged does not agree.
    assert code == (3 if "undetermined" in output else 0)
    assert (
        "gradients not judged (the forward pass is not finite)" in output or "out of range" in output
    ) == (code == 3)


def test_a_class_of_ones_own_is_found_in_the_folder_where_the_command_is_given(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "backend.py").write_text(
        "from tests.toys.numpy_backend import NumpyBackend\n\nclass Mine(NumpyBackend):\n    name = 'mine'\n"
    )
    done = concord("check --backend mine.backend:Mine --case bert-single", folder=tmp_path)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "2 agree" in done.stdout


@pytest.fixture(scope="module")
def verdicts() -> Report:
    """What becomes of backends that return something else than they should."""
    names = [
        "WrongAfterTheFirstLayer",
        "ReturnsNaN",
        "ReturnsAWrongShape",
        "ComputesInFloat32",
        "ReturnsFloat32",
    ]
    names += ["LeavesOutATap", "LeavesOutGradients", "DeclaresNotExposed", "SaysUnsupported", "NumpyBackend"]
    jobs = check_jobs(["bert"], ["float64", "bfloat16"], cases=["bert-ragged", "bert-single"])
    return conduct(jobs, [toy(name) for name in names], Settings(threads=1))


FIRST = [
    ("WrongAfterTheFirstLayer", "bert-ragged", "float64", "layers.1.attention.scores", ""),
    ("ReturnsNaN", "bert-single", "bfloat16", "logits", "not finite"),
    ("ComputesInFloat32", "bert-ragged", "float64", "embeddings.sum", ""),
    (
        "ComputesInFloat32",
        "bert-ragged",
        "bfloat16",
        "embeddings.sum",
        "holds numbers that the precision has not: it was computed in a wider one",
    ),
]

BROKEN = [
    ("ReturnsAWrongShape", "bert-ragged", "float64", "'logits' is of shape (3, 5) but must be (5, 3)"),
    (
        "ReturnsFloat32",
        "bert-single",
        "float64",
        "more are of dtype float32 but must be float64 in a float64 run",
    ),
]


@pytest.mark.xdist_group("verdicts")
@pytest.mark.parametrize(
    ("name", "words", "status"),
    [
        ("LeavesOutATap", "layers.0.attention.weights", "agrees"),
        ("LeavesOutGradients", "gradients", "undetermined"),
    ],
)
def test_what_a_backend_leaves_out_is_said(verdicts: Report, name: str, words: str, status: str) -> None:
    """One activation of many is said; of gradients that were asked for none was judged."""
    results = [r for r in verdicts.results if r.backend == toy(name)]
    assert {r.status for r in results} == {status}
    assert all(r.verdict is not None and words in r.verdict.unchecked for r in results)


@pytest.mark.xdist_group("verdicts")
@pytest.mark.parametrize(("name", "case", "dtype", "words"), BROKEN)
def test_what_cannot_be_what_was_asked_for_is_broken(
    verdicts: Report, name: str, case: str, dtype: str, words: str
) -> None:
    (result,) = [r for r in verdicts.results if (r.backend, r.case, r.dtype) == (toy(name), case, dtype)]
    assert (result.status, result.verdict) == ("broken", None)
    assert words in result.detail


@pytest.mark.xdist_group("verdicts")
@pytest.mark.parametrize(("name", "case", "dtype", "tensor", "note"), FIRST)
def test_what_is_wrong_or_missing_diverges_where_it_is(
    verdicts: Report, name: str, case: str, dtype: str, tensor: str, note: str
) -> None:
    (result,) = [r for r in verdicts.results if (r.backend, r.case, r.dtype) == (toy(name), case, dtype)]
    assert result.status == "diverges"
    assert result.first_divergence is not None
    assert (result.first_divergence.tensor, result.first_divergence.note) == (tensor, note)


@pytest.mark.xdist_group("verdicts")
def test_what_is_right_agrees_beside_what_is_wrong(verdicts: Report) -> None:
    found = {(r.backend.partition(":")[2], r.case, r.dtype): r for r in verdicts.results}
    assert {
        r.status for (name, *_), r in found.items() if name in ("NumpyBackend", "DeclaresNotExposed")
    } == {"agrees"}
    # Wrong in its second layer only, it has nothing wrong with a model of one.
    assert found["WrongAfterTheFirstLayer", "bert-single", "float64"].status == "agrees"
    not_exposed = found["DeclaresNotExposed", "bert-single", "float64"].verdict
    assert not_exposed is not None
    rows = [row.tensor for row in not_exposed.table if row.status == "not exposed"]
    assert rows == [f"layers.0.attention.{name}" for name in ("scores", "masked_scores", "weights")]


@pytest.mark.xdist_group("verdicts")
def test_what_is_not_supported_says_why_and_is_no_failure(verdicts: Report) -> None:
    found = [r for r in verdicts.results if r.backend == toy("SaysUnsupported")]
    assert {(r.status, r.dtype, r.detail) for r in found} == {
        ("unsupported", dtype, f"this toy has no {dtype} kernels") for dtype in ("float64", "bfloat16")
    }
    assert verdicts.exit_code == 3  # because of the others


# A package.


def test_an_installed_package_offers_a_backend(tmp_path: Path) -> None:
    packages = offer(tmp_path, numpy=toy("NumpyBackend"))
    done = concord("check --backend numpy --case bert-single", PYTHONPATH=str(packages))
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "2 agree" in done.stdout
    refused = concord("check --backend nunpy --case bert-single", PYTHONPATH=str(packages))
    assert refused.returncode == 2
    assert "unknown backend 'nunpy': did you mean 'numpy'?" in refused.stderr


def test_a_package_cannot_take_the_place_of_a_framework(tmp_path: Path) -> None:
    program = "from concord import backends; print(backends.names(), backends.resolve('torch'))"
    packages = offer(tmp_path, torch=toy("ReturnsNaN"), zeta=toy("NumpyBackend"), alpha=toy("NumpyBackend"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(packages)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert (
        done.stdout.strip()
        == "['torch', 'tf', 'paddle', 'jax', 'alpha', 'zeta'] concord.backends.torch.backend:Adapter"
    )


# The guide.


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A folder with the programs of the guide."""
    text = (ROOT / "docs" / "guides" / "joining.md").read_text()
    programs = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    for name, program in zip(
        ("numpy_attention.py", "numpy_backend.py", "run_cases.py"), programs, strict=True
    ):
        (tmp_path / name).write_text(program)
    return tmp_path


def test_the_plugin_of_the_guide_agrees_with_golden_files_and_under_pytest(guide: Path) -> None:
    done = concord("golden --backend numpy_backend:Backend", folder=guide)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "runs: 4 agree, " in done.stdout
    suite = (
        "-q -p no:cacheprovider --pyargs concord.conformance --concord-backend numpy_backend:Backend "
        "--concord-part dot_product --concord-variant keras-attention"
    )
    command = [sys.executable, "-m", "pytest", *suite.split()]
    ran = subprocess.run(
        command,
        cwd=guide,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert " failed" not in ran.stdout


def test_the_program_of_the_guide_that_has_only_files_agrees(guide: Path) -> None:
    assert (
        concord("case export cases --part dot_product --variant vanilla-encoder", folder=guide).returncode
        == 0
    )
    subprocess.run([sys.executable, "run_cases.py", "cases"], cwd=guide, timeout=PATIENCE, check=True)
    done = concord("check --from-dump cases", folder=guide)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert f"{len(list(guide.rglob('case.json')))} agree" in done.stdout


# Files.

CASES = (
    "bert-single-float64",
    "bert-single-float32",
    "keras-attention-ragged-float64",
    "keras-attention-ragged-float32",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exported cases."""
    folder = tmp_path_factory.mktemp("exported") / "cases"
    done = concord(f"case export {folder} --case bert-single --case keras-attention-ragged")
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == sorted(CASES)
    return folder


def answer(folder: Path, *wrong: str) -> Path:
    """Let the stand-alone tool compute the cases of a folder."""
    subprocess.run(
        [sys.executable, ROOT / "tests" / "toys" / "standalone.py", folder, *wrong],
        timeout=PATIENCE,
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def answered(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the runs of the stand-alone tool."""
    return answer(shutil.copytree(exported, tmp_path_factory.mktemp("answered") / "cases"))


@pytest.fixture
def dumps(answered: Path, tmp_path: Path) -> Path:
    """A copy of that, to be spoilt."""
    return shutil.copytree(answered, tmp_path / "dumps")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_exported_case_says_all_that_has_to_come_back(exported: Path) -> None:
    case = json.loads((exported / CASES[0] / "case.json").read_text())
    arrays = load_file(exported / CASES[0] / "case.safetensors")
    assert (case["format"], case["case"], case["group"], case["part"], case["dtype"]) == (
        "concord.case/1",
        "bert-single",
        "bert",
        "model",
        "float64",
    )
    assert case["wanted"]["output"] == "logits"
    assert case["wanted"]["taps"][-1] == "loss"
    assert {f"weights/{name}" for name in case["wanted"]["gradients"]} <= arrays.keys()
    assert {"inputs/input_ids", "inputs/labels"} <= arrays.keys()


def test_right_dumps_agree(invoke: Invoke, answered: Path, tmp_path: Path) -> None:
    code, output, errors = invoke(f"check --from-dump {answered} --json {tmp_path / 'out.json'}")
    assert (code, errors) == (0, [])
    assert "4 agree" in output
    record = json.loads((tmp_path / "out.json").read_text())
    assert [(r["backend"], r["status"]) for r in record["results"]] == [("standalone", "agrees")] * 4
    assert record["environments"] == {"standalone": {"numpy": np.__version__}}


@pytest.mark.parametrize(
    "tensor", ["taps/layers.0.attention.context", "gradients/layers.0.norm2.bias", "taps/loss"]
)
def test_a_wrong_dump_diverges_at_the_wrong_tensor(
    invoke: Invoke, exported: Path, tmp_path: Path, tensor: str
) -> None:
    folder = answer(shutil.copytree(exported / CASES[0], tmp_path / "one"), tensor)
    code, output, errors = invoke(f"check --from-dump {folder}")
    assert (code, errors) == (1, [])
    name = tensor.removeprefix("taps/").replace("gradients/", "gradients.")
    assert f"first at {name} (SPEC " in output
    # A tap that was changed afterwards is also not what the next step was computed from.
    assert ("  1 of " in output) == ("context" not in tensor)


def test_a_dump_without_its_taps_and_gradients_is_judged_by_its_output(invoke: Invoke, dumps: Path) -> None:
    for path in dumps.rglob("run.safetensors"):
        run = load_file(path)
        save_file({name: run[name] for name in ("output", "loss")}, path)
    code, output, _ = invoke(f"check --from-dump {dumps}")
    assert code == 3  # gradients were wanted
    assert "not checked, since not delivered: " in " ".join(output.split())
    for path in dumps.rglob("case.json"):
        path.write_text(path.read_text().replace('"gradients": true', '"gradients": false'))
    assert invoke(f"check --from-dump {dumps}")[0] == 0


@pytest.mark.parametrize("name", ["taps/encoder.layer.0", "tap/logits", "gradients/layers.0.gamma"])
def test_a_dump_with_a_tensor_that_nobody_knows_is_refused(invoke: Invoke, dumps: Path, name: str) -> None:
    path = next(dumps.rglob("run.safetensors"))
    run = load_file(path)
    save_file({**run, name: np.zeros(3, np.float32)}, path)
    code, output, (line, *more) = invoke(f"check --from-dump {dumps}")
    assert (code, output, more) == (2, "", [])
    assert str(path) in line
    assert name.partition("/")[2] in line


def test_a_case_without_a_run_is_missing_and_the_others_are_judged(invoke: Invoke, dumps: Path) -> None:
    (dumps / CASES[1] / "run.safetensors").unlink()
    code, output, errors = invoke(f"check --from-dump {dumps}")
    assert (code, errors) == (3, [])
    assert "3 agree" in output
    assert "1 missing" in output
    assert f"{CASES[1]}/run.safetensors: no such file" in output.replace("\n", "")


def test_a_run_that_does_not_say_who_made_it_is_a_dump(invoke: Invoke, dumps: Path) -> None:
    for path in dumps.rglob("run.json"):
        path.unlink()
    code, output, _ = invoke(f"check --from-dump {dumps}")
    assert code == 0
    assert "dump" in output


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def edit(path: Path, **fields: object) -> None:
    data = {
        key: value for key, value in {**json.loads(path.read_text()), **fields}.items() if value is not None
    }
    path.write_text(json.dumps(data))


def put(path: Path, **arrays: np.ndarray | None) -> None:
    """Replace arrays of a file; in the names a double underscore stands for a slash."""
    changed = load_file(path) | {name.replace("__", "/"): array for name, array in arrays.items()}
    save_file({name: array for name, array in changed.items() if array is not None}, path)


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a truncated run": ("run.safetensors", cut, "not a whole safetensors file"),
    "a run without its loss": ("run.safetensors", lambda path: put(path, loss=None), "lacks 'loss'"),
    "a run by nobody": (
        "run.json",
        lambda path: edit(path, backend=3),
        "'backend' is 3 but must be a string",
    ),
    "a run that declares nonsense": (
        "run.json",
        lambda path: edit(path, info={"not_exposed": "*"}),
        "'not_exposed' is '*' but must be a list of strings",
    ),
    "inputs out of range": (
        "case.safetensors",
        lambda path: put(path, inputs__labels=np.array([99])),
        "'labels' is 99 at (0,) but must lie in [0, 3)",
    ),
    "a truncated case": ("case.json", cut, "not valid JSON"),
    "a case of another format": (
        "case.json",
        lambda path: edit(path, format="concord.case/9"),
        "'format' is 'concord.case/9' but must be 'concord.case/1'",
    ),
    "a case without its configuration": (
        "case.json",
        lambda path: edit(path, config={}),
        "field 'vocab_size' is missing but is required",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_named_in_one_line(invoke: Invoke, dumps: Path, tmp_path: Path, what: str) -> None:
    name, spoil, message = DAMAGE[what]
    spoil(dumps / CASES[0] / name)
    code, output, errors = invoke(f"check --from-dump {dumps} --json {tmp_path / 'out.json'}")
    assert (code, output) == (2, "")
    assert errors[0].startswith(f"concord: error: {dumps / CASES[0] / name}: ")
    assert message in errors[0]
    assert len(errors) == 1 or what == "a case without its configuration"  # one line for each field
    assert not (tmp_path / "out.json").exists()


def test_a_folder_without_cases_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    for folder, problem in (
        (tmp_path, "holds no case.json; export cases with 'concord case export'"),
        (tmp_path / "absent", "no such folder"),
    ):
        code, _, errors = invoke(f"check --from-dump {folder}")
        assert (code, errors) == (2, [f"concord: error: {folder}: {problem}"])


def test_export_into_a_folder_that_holds_the_case_changes_nothing(
    invoke: Invoke, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "cases")
    before = contents(folder)
    # Of its four runs two are there already.
    code, output, errors = invoke(f"case export {folder} --case bert-tiny --case bert-single")
    assert (code, output) == (2, "")
    assert errors == [
        f"concord: error: {folder.absolute()}: holds something already; export into an empty folder"
    ]
    assert contents(folder) == before
    assert {path.name for path in folder.iterdir()} == set(CASES)
