"""The files of the standard cases: they are what this code would write, and what was changed is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from spec.cases.files import FOLDER, drift, read_case, write_case
from spec.errors import SpecError


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
    assert problems_of(stored) == [f"{arrays}: is not the file that bert-single.json was written with: its SHA-256 differs"]


def test_a_changed_configuration_is_noticed(stored: Path) -> None:
    header = json.loads(stored.read_text())
    header["config"]["norm_epsilon"] = 1e-6
    stored.write_text(json.dumps(header))
    assert problems_of(stored) == ["bert-single.json: 'config' differs"]


@pytest.mark.parametrize("name", ["bert-single", "keras-attention-looped", "tf1-text-classifier-sigmoid"])
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
