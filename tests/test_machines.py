"""Other machines on this one: kernels that a processor has, and verdicts that are the same on all."""

import json
from pathlib import Path

import pytest

from tests import machines
from tests.machines import FILES, PROCESSORS, run_verdicts


def test_the_tests_of_numpy_alone_are_there():
    assert [name for name in FILES if not (Path(__file__).parent / f"{name}.py").exists()] == []


def test_an_outcome_that_is_another_on_another_processor_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "features", lambda: {"sse4_2"})
    for name in PROCESSORS:
        status = "diverges" if name == "SSE4" else "agrees"
        runs = [
            {
                "backend": "torch",
                "case": case,
                "dtype": "float32",
                "status": status if case == "b" else "agrees",
            }
            for case in "ab"
        ]
        (tmp_path / f"{name.replace(' ', '-')}.check.json").write_text(json.dumps({"results": runs}))
    table, differing = run_verdicts(["torch"], ["check"], tmp_path)
    assert table[2:] == [
        "| as it is | 2 agrees; none differ |",
        "| AVX2 | skipped: this processor has no avx2, fma |",
        "| SSE4 | 1 agrees, 1 diverges; 1 differs |",
        "| other libraries | 2 agrees; none differ |",
    ]
    assert differing == ["SSE4, check: torch b float32: diverges, but agrees as it is"]


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_processor(open_worker, tmp_path):
    open_worker("torch")  # or skip
    table, differing = run_verdicts(["torch"], ["check"], tmp_path)
    assert differing == []
    assert len(table) == 2 + len(PROCESSORS)
