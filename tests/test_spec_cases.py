"""The files of the standard cases: they are what this code would write, and what was changed is noticed."""

import json
import shutil

import pytest

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
