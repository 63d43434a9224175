"""``concord speed`` as a command: what it prints, writes, refuses, and goes on from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concord.cli import main
from concord.commands import speed as speeding
from concord.speed import SpeedPlan, presets, read
from tests.test_speed import RIGHT, SLOW, WRONG, small_preset


@pytest.fixture
def small_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})


@pytest.fixture
def invoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str | Path, columns: int = 200) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["concord", "speed", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


SMALL = (
    "--preset",
    "nndl",
    "--implementation",
    "explicit",
    "--execution",
    "eager",
    "--quick",
    "--threads",
    "1",
)


@pytest.mark.usefixtures("small_presets")
@pytest.mark.parametrize("columns", [80, 200])
def test_the_command_measures_prints_and_writes(
    invoke: Callable[..., tuple[int, str, str]], tmp_path: Path, columns: int
) -> None:
    (tmp_path / "a.md").write_text("before\n<!-- begin speed -->\n<!-- end speed -->\nafter\n")
    written = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--markdown", tmp_path / "a.md")
    code, out, _ = invoke(*SMALL, "--backend", RIGHT, *written, columns=columns)
    assert code == 0
    assert f"| {RIGHT} | explicit eager |" in (tmp_path / "a.md").read_text()
    assert "nndl inference full" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("written: ")) <= columns
    assert read(tmp_path / "a.json")["complete"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("small_presets")
def test_a_wrong_backend_ends_with_exit_code_1(invoke: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = invoke(*SMALL, "--backend", WRONG)
    assert code == 1
    assert f"{WRONG} withheld: what it computed is wrong: logits" in " ".join(out.split())


@pytest.mark.usefixtures("small_presets")
def test_an_interrupted_run_keeps_what_it_has_and_goes_on(
    invoke: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, right = tmp_path / "a.json", speeding.measure

    def interrupted(plan: SpeedPlan, done: Any, keep: Callable[[dict[str, Any]], None], tell: Any) -> None:
        def once(entry: dict[str, Any]) -> None:
            keep(entry)
            raise KeyboardInterrupt

        right(plan, done, once, tell)

    monkeypatch.setattr(speeding, "measure", interrupted)
    code, out, err = invoke(*SMALL, "--backend", RIGHT, "--backend", SLOW, "--json", path)
    assert code == 130
    assert "interrupted" in out + err
    kept = read(path)
    assert not kept["complete"]
    assert [entry["backend"] for entry in kept["entries"]] == [RIGHT]
    monkeypatch.setattr(speeding, "measure", right)
    code, _, _ = invoke(*SMALL, "--backend", RIGHT, "--backend", SLOW, "--resume", path)
    assert code == 0
    whole = read(path)
    assert whole["complete"]
    assert whole["entries"][0]["turns"] == kept["entries"][0]["turns"]
    assert [entry["backend"] for entry in whole["entries"]] == [RIGHT, SLOW]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--preset nndll", "unknown preset 'nndll'"),
        ("--kind infer", "unknown kind 'infer'"),
        ("--profile fast", "unknown profile 'fast'"),
        ("--turns 0", "--turns is 0"),
        ("--budget -1", "--budget is -1 s"),
        ("--resume nowhere.json", "nowhere.json: no such file"),
        ("--markdown pyproject.toml", "lacks the lines '<!-- begin speed -->'"),
    ],
)
def test_what_cannot_be_understood_is_refused(
    invoke: Callable[..., tuple[int, str, str]], line: str, words: str
) -> None:
    code, _, err = invoke(*line.split())
    assert code == 2
    assert words in err
