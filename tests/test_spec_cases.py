"""The files of the standard cases: they are what this code would write, and what was changed is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from concord.spec.cases import build_case
from concord.spec.cases.files import FOLDER, drift, read_case, write_case
from concord.spec.errors import SpecError


def test_case_files_are_what_this_code_would_write() -> None:
    assert drift() == []


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """One case, copied; its JSON file."""
    for suffix in (".json", ".safetensors"):
        shutil.copy(FOLDER / f"bert-single{suffix}", tmp_path)
    return tmp_path / "bert-single.json"


def problems_of(path: Path) -> list[str]:
    return [problem for problem in drift(path.parent) if not problem.endswith("is missing")]


def test_a_changed_byte_is_noticed(stored: Path) -> None:
    assert problems_of(stored) == []
    arrays = stored.with_suffix(".safetensors")
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    with pytest.raises(SpecError, match="its SHA-256 differs"):
        read_case(stored)
    assert problems_of(stored) == [
        f"{arrays}: is not the file that bert-single.json was written with: its SHA-256 differs"
    ]


def test_a_changed_configuration_is_noticed(stored: Path) -> None:
    header = json.loads(stored.read_text())
    header["config"]["norm_epsilon"] = 1e-6
    stored.write_text(json.dumps(header))
    assert problems_of(stored) == ["bert-single.json: 'config' differs"]


@pytest.mark.parametrize(
    "name", ["bert-single", "keras-attention-looped", "tf1-text-classifier-sigmoid", "bert-long"]
)
def test_a_case_survives_being_written_and_read(name: str, tmp_path: Path) -> None:
    case, arrays = read_case(FOLDER / f"{name}.json")
    write_case(case, tmp_path)
    again, rewritten = read_case(tmp_path / f"{name}.json")
    assert (again.name, again.config, again.part) == (case.name, case.config, case.part)
    assert again.batch.arrays().keys() == case.batch.arrays().keys()
    assert rewritten.keys() == arrays.keys()
    # The others are computed again: another processor may differ in the last bit.
    for key in (key for key in arrays if key.startswith(("weights/", "inputs/"))):
        assert rewritten[key].dtype == arrays[key].dtype
        np.testing.assert_array_equal(rewritten[key], arrays[key])


def test_large_arrays_are_stored_in_part() -> None:
    case, arrays = read_case(FOLDER / "bert-long.json")
    header = json.loads((FOLDER / "bert-long.json").read_text())
    table, scores = "embeddings.token.weight", "float64/layers.1.attention.scores"
    whole = build_case("bert", "long")
    assert header["format"] == 2
    assert max(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 500_000
    np.testing.assert_array_equal(case.weights[table], whole.weights[table])
    np.testing.assert_array_equal(case.batch.required("input_ids"), whole.batch.required("input_ids"))
    gradient = arrays[f"float64/gradients.{table}"]
    assert gradient.shape == (70_001, 3)
    assert set(np.flatnonzero(gradient.any(1))) <= set(whole.batch.required("input_ids").ravel())
    assert header["stored"][scores] == {"shape": [1, 1, 263, 263], "every": 61}
    assert arrays[scores].shape == (-(-(263**2) // 61),)


def test_files_without_large_arrays_are_as_readers_of_format_1_know_them() -> None:
    headers = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    assert all(
        ("stored" in header) == (header["format"] == 2) == (header["scenario"] == "long")
        for header in headers
    )


def test_a_format_of_the_future_is_refused(stored: Path) -> None:
    header = json.loads(stored.read_text())
    stored.write_text(json.dumps({**header, "format": 3}))
    with pytest.raises(SpecError, match="'format' is 3 but must be 1 or 2"):
        read_case(stored)
