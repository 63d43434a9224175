"""What a hunt has seen is kept, whatever ends it or the search for a smaller case.

And nothing seen is no pass.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis.errors import FlakyFailure

from concord.conformance import record
from concord.conformance.campaign import Settings
from concord.conformance.fuzz import Findings, Plan, hunt, read_found, sample, write_failures
from concord.conformance.fuzz import chunk as chunk_module
from concord.conformance.fuzz import hunting as hunting_module
from tests.toys.surroundings import toy

RIGHT = toy("NumpyBackend")
LIARS = {
    name: f"tests.toys.liars:{name}"
    for name in ("WrongEverywhere", "WrongNowAndThen", "WrongInOtherWays", "KnowsOneArchitecture")
}

Invoke = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def invoke(invoke: Invoke, tmp_path: Path) -> Invoke:
    """Return a function that hunts from the command line, and gives exit code, output and lines of errors."""
    return lambda *arguments: invoke("fuzz", "--out", tmp_path / "out", *arguments)


def hunted(*names: str, **fields: Any) -> Findings:
    return hunt(Plan(names=names, shapes=2, **fields), Settings(asked=names, threads=1))


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_after_the_last_case_keeps_what_was_found(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    told: str,
) -> None:
    close = hunting_module.close_idle

    def interrupted() -> None:
        signal.raise_signal(number)
        close()

    monkeypatch.setattr(hunting_module, "close_idle", interrupted)
    ended, output, said = invoke(
        "--backend",
        RIGHT,
        "--cases",
        "2",
        "--part",
        "dot_product",
        "--json",
        tmp_path / "out.json",
        "--html",
        tmp_path / "out.html",
    )
    assert (ended, said) == (code, [f"concord: {told}"])
    assert "2 random cases" in output
    assert record.read(tmp_path / "out.json").outcome.cases == 2
    assert (tmp_path / "out.html").is_file()


@pytest.mark.parametrize("name", ["WrongEverywhere", "WrongNowAndThen", "WrongInOtherWays"])
def test_a_backend_is_blamed_for_what_was_seen_however_it_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(chunk_module.ATTEMPTS, "diverges", 5)
    found = hunted(LIARS[name], cases=2, parts=("dot_product",))
    assert (found.exit_code, found.notes) == (1, [])
    assert {failure.status for failure in found.failures} == {"diverges"}
    written, problems = write_failures(tmp_path, found, Settings())
    assert problems == []
    assert [job.config for job, _ in read_found(tmp_path)] == [
        failure.case.config for failure in found.failures
    ]
    assert len(written) == len(found.failures)


def test_a_failure_is_kept_whatever_becomes_of_the_search_for_a_smaller_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, errors = (
        chunk_module.draw,
        [FlakyFailure("it passed this time", [AssertionError()]), ArithmeticError("the search broke")],
    )

    def breaks(plan: Plan, index: int, look: Any, smallest: Any) -> None:
        draw(plan, index, lambda case: None, smallest)
        raise errors.pop(0)

    monkeypatch.setattr(chunk_module, "draw", breaks)
    found = hunted(LIARS["WrongEverywhere"], RIGHT, cases=3, parts=("dot_product", "attention"))
    assert [failure.found_as for failure in found.failures] == sample(
        Plan(names=(), parts=("dot_product", "attention"), shapes=2),
        [failure.origin.index for failure in found.failures],
    )
    assert len(found.failures) == 2
    assert errors == []
    assert found.notes == [
        f"fuzz-0-{found.failures[1].origin.index} could not be judged: ArithmeticError: the search broke"
    ]


def test_a_hunt_that_judged_nothing_does_not_pass(invoke: Invoke, tmp_path: Path) -> None:
    code, output, _ = invoke(
        "--backend",
        LIARS["KnowsOneArchitecture"],
        "--cases",
        "3",
        "--part",
        "dot_product",
        "--json",
        tmp_path / "out.json",
        "--html",
        tmp_path / "out.html",
    )
    assert code == 3
    line = (
        f"{LIARS['KnowsOneArchitecture']}: nothing was judged: of 3 cases 3 unsupported; a backend of a "
        f"fixed architecture is judged on its own weights: --checkpoint PATH"
    )
    assert line in output
    assert "3 random cases" in output
    assert "0 failures" not in output
    assert "✓" not in output
    page = (tmp_path / "out.html").read_text()
    assert "Nothing was judged." in page
    assert line in page
    both = hunted(LIARS["KnowsOneArchitecture"], RIGHT, cases=3, parts=("dot_product",))
    assert (both.exit_code, both.judged, both.unjudged) == (3, [RIGHT], (LIARS["KnowsOneArchitecture"],))
