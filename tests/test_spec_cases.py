"""The files of the standard cases: they are what this code would write, and what was changed is noticed."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from concord.spec.cases import build_case
from concord.spec.cases.files import FOLDER, drift, write_case


def test_case_files_are_what_this_code_would_write():
    assert drift() == []


def test_a_case_is_written_as_it_lies_there(tmp_path):
    write_case(build_case("bert", "single"), tmp_path)
    assert [problem for problem in drift(tmp_path) if not problem.endswith("is missing")] == []


def digit(path):
    arrays = path.with_suffix(".safetensors")
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)


def said(**fields):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields})) and None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (digit, "bert-single.json: 'sha256' differs"),
        (said(config={}), "bert-single.json: 'config' differs"),
        (said(format=3), "bert-single.json: 'format' differs"),
        (lambda path: path.write_text("{"), "bert-single.json: not valid JSON"),
        (lambda path: path.with_suffix(".safetensors").unlink(), "bert-single.safetensors: no such file"),
    ],
)
def test_what_was_changed_is_noticed(tmp_path, change, expected):
    for suffix in (".json", ".safetensors"):
        shutil.copy(FOLDER / f"bert-single{suffix}", tmp_path)
    change(tmp_path / "bert-single.json")
    problems = [problem for problem in drift(tmp_path) if not problem.endswith("is missing")]
    assert expected in problems[0]


def test_large_arrays_are_stored_in_part():
    arrays, whole = load_file(FOLDER / "bert-long.safetensors"), build_case("bert", "long")
    stored = json.loads((FOLDER / "bert-long.json").read_text())["stored"]
    table, scores = "embeddings.token.weight", "float64/layers.1.attention.scores"
    assert max(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 500_000
    rebuilt = np.zeros(stored[f"weights/{table}"]["shape"])
    rebuilt[stored[f"weights/{table}"]["rows"]] = arrays[f"weights/{table}"]
    np.testing.assert_array_equal(rebuilt, whole.weights[table])
    assert set(stored[f"float64/gradients.{table}"]["rows"]) <= set(whole.batch.required("input_ids").ravel())
    assert stored[scores] == {"shape": [1, 1, 263, 263], "every": 61}
    assert arrays[scores].shape == (-(-(263**2) // 61),)
