import shutil

import numpy as np
import pytest

from concord import spec
from concord.spec.cases import LONG, OWN, build_case, standard_cases
from concord.spec.cases.case_files import FOLDER, drift
from tests.toys.surroundings import state


def test_case_files_are_what_this_code_would_write():
    assert drift() == []


def digit(path):
    arrays = path.with_suffix(".safetensors")
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (digit, "bert-single.json: 'sha256' differs"),
        (lambda path: state(path, config={}), "bert-single.json: 'config' differs"),
        (lambda path: path.with_suffix(".safetensors").unlink(), "bert-single.safetensors: no such file"),
    ],
)
def test_what_was_changed_is_noticed(tmp_path, change, expected):
    for suffix in (".json", ".safetensors"):
        shutil.copy(FOLDER / f"bert-single{suffix}", tmp_path)
    change(tmp_path / "bert-single.json")
    problems = [problem for problem in drift(tmp_path) if not problem.endswith("is missing")]
    assert expected in problems[0]


# Cases in sequence.


def shape_of(case):
    return (*case.batch.required("input_ids").shape, case.config.d_model, case.config.vocab_size)


@pytest.mark.parametrize("variant", [name for name in spec.variants() if name not in OWN])
def test_what_is_kept_from_an_earlier_call_shows(variant):
    # Whatever a backend caches by shape, a later case of that shape needs something else.
    by_shape = {}
    for case in standard_cases([variant]):
        by_shape.setdefault(shape_of(case), []).append(case)
    first, *later = next(iter(by_shape.values()))
    ids, pad = first.batch.required("input_ids"), first.config.pad_id
    others = [case.batch.required("input_ids") for case in later]
    assert any(not np.array_equal(ids, other) for other in others)
    assert any(not np.array_equal(ids == pad, other == pad) for other in others)
    for name, array in first.weights.items():
        if name != "embeddings.position.weight" or variant == "bert":
            assert any(not np.array_equal(array, case.weights.get(name)) for case in later), name
    longer = build_case(variant, "long").config
    assert longer.max_positions == LONG + longer.position_start > first.config.max_positions
