"""The files of the standard cases: they are what this code would write, and what was changed is noticed."""

import json
import shutil

import numpy as np
import pytest

from concord import spec
from concord.spec.cases import LONG, OWN, build_case, standard_cases
from concord.spec.cases.case_files import FOLDER, drift, write_case


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
        (lambda path: path.with_suffix(".safetensors").unlink(), "bert-single.safetensors: no such file"),
    ],
)
def test_what_was_changed_is_noticed(tmp_path, change, expected):
    for suffix in (".json", ".safetensors"):
        shutil.copy(FOLDER / f"bert-single{suffix}", tmp_path)
    change(tmp_path / "bert-single.json")
    problems = [problem for problem in drift(tmp_path) if not problem.endswith("is missing")]
    assert expected in problems[0]


# A list of cases is a sequence.

POSITIONS = "embeddings.position.weight"

WHOLE = [name for name in spec.variants() if name not in OWN]


def sizes(case):
    return (*case.batch.required("input_ids").shape, case.config.d_model, case.config.vocab_size)


@pytest.mark.parametrize("kept", ["mask", "weights", "inputs", "position of a shorter text"])
@pytest.mark.parametrize("variant", WHOLE)
def test_what_is_kept_from_an_earlier_call_shows(variant, kept):
    """Whatever a backend keeps by shape, some later case of that shape is another."""
    seen = {}
    for case in standard_cases([variant]):
        seen.setdefault(sizes(case), []).append(case)
    first, *later = next(iter(seen.values()))
    ids = first.batch.required("input_ids")

    def real(case):
        return case.batch.required("input_ids") != case.config.pad_id

    if kept == "mask":
        assert any(not np.array_equal(real(first), real(case)) for case in later)
    elif kept == "weights":
        assert all(
            any(not np.array_equal(first.weights[name], case.weights.get(name)) for case in later)
            for name in first.weights
            if name != POSITIONS or variant == "bert"
        )
    elif kept == "inputs":
        assert any(not np.array_equal(ids, case.batch.required("input_ids")) for case in later)
    else:
        longer = build_case(variant, "long").config
        assert longer.max_positions > first.config.max_positions
        assert longer.max_positions == LONG + longer.position_start
