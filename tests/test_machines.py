"""Other machines on this one: kernels that a processor has, and verdicts that are the same on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concord.backends.worker import Worker
from tests import machines
from tests.machines import FILES, KERNELS, PROCESSORS, obstacle, outcomes_of, run_kernels, run_verdicts


def test_a_kernel_that_the_processor_lacks_is_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(machines, "features", lambda: {"avx2", "fma", "sse4_2"})
    monkeypatch.setattr(machines, "kernel", lambda chosen: "Haswell")
    monkeypatch.setattr(
        machines.subprocess,
        "run",
        lambda *given, env, **more: ran.append(env["OPENBLAS_CORETYPE"]) or Done(0),
    )
    assert run_kernels() == 0
    assert ran == ["Haswell"]
    said = capsys.readouterr().out
    assert "  Haswell: passed\n" in said
    assert (
        "  SkylakeX: skipped: this processor has no avx512bw, avx512cd, avx512dq, avx512f, avx512vl\n" in said
    )
    assert "  Nehalem: skipped: NumPy's BLAS takes Haswell instead\n" in said
    monkeypatch.setattr(machines.subprocess, "run", lambda *given, **more: Done(1))
    assert run_kernels() == 1
    assert "  Haswell: FAILED\n" in capsys.readouterr().out


class Done:
    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def test_nothing_runs_where_a_processor_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "features", set)
    assert all(obstacle(name).startswith("this processor has no ") for name in KERNELS)


def test_the_tests_of_numpy_alone_are_there() -> None:
    assert [name for name in FILES if not (Path(__file__).parent / f"{name}.py").exists()] == []


def test_an_outcome_that_is_another_on_another_processor_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_of_a_mutant_the_tensor_that_is_named_counts() -> None:
    record = {
        "findings": [
            {"backend": "jax", "mutant": "m", "status": "found", "tensor": "logits"},
            {"backend": "jax", "mutant": "n", "status": "missed"},
        ]
    }
    assert outcomes_of(record) == {("jax", "m"): "found logits", ("jax", "n"): "missed"}


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_processor(
    open_worker: Callable[[str], Worker], tmp_path: Path
) -> None:
    open_worker("torch")  # or skip
    table, differing = run_verdicts(["torch"], ["check"], tmp_path)
    assert differing == []
    assert len(table) == 2 + len(PROCESSORS)
