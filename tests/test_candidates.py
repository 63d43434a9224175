"""Candidates as they run: none that ends its process ends the comparison, or passes."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from concord.conformance.compare import compare
from concord.spec.errors import SpecError
from tests.toys import endings

X = torch.linspace(-1, 1, 35).reshape(7, 5)


@pytest.mark.parametrize("time", range(1, 5))
def test_a_reference_that_ends_the_process_is_refused_whenever_it_does(time):
    other = {"output": np.zeros((7, 3), np.float32)}
    with pytest.raises(SpecError, match=r"the reference .* SystemExit: 0"):
        compare(endings.Leaving(time).eval(), other, X)


@pytest.mark.parametrize("candidate", [endings.leaving(), lambda *x: endings.leaves(), endings.raises])
def test_a_candidate_that_ends_the_process_is_refused(candidate):
    with pytest.raises(SpecError, match=r"the candidate .*: (SystemExit: 0|\w+Error: )"):
        compare(endings.linear(), candidate, {"input": X})


ENDS = {
    "leaves": (2, "endings:leaves gave no result: SystemExit: 0"),
    "leaves_with_words": (2, "endings:leaves_with_words gave no result: SystemExit: enough"),
    "raises": (2, "endings:raises gave no result: KeyError: 'no such layer'"),
    "dies": (3, "endings:dies gave no result: killed by SIGKILL"),
    "dies_without_a_word": (3, "endings:dies_without_a_word gave no result: exit code 0"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_command_ends_as_its_candidate_does(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(
        f"compare tests.toys.endings:linear tests.toys.endings:{end}",
        *("--inputs", tmp_path / "inputs.safetensors"),
    )
    expected, words = ENDS[end]
    assert (code, len(lines)) == (expected, 1)
    assert words in lines[0]


@pytest.mark.parametrize("end", ["leaving", "leaves_where_it_is_built", "linears"])
def test_the_command_refuses_a_reference_that_ends_it_or_cannot_be_built(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(f"compare tests.toys.endings:{end}", "--inputs", tmp_path / "inputs.safetensors")
    assert (code, len(lines)) == (2, 1)
    assert any(words in lines[0] for words in ("SystemExit: 0", "AttributeError: "))
