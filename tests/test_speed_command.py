"""``concord speed`` as a command: what it prints, writes, refuses, and goes on from."""

import sys

import pytest

from concord.cli import main
from concord.commands import speed as speeding
from concord.speed import presets, read
from tests.test_speed import RIGHT, SLOW, WRONG, small_preset


@pytest.fixture
def small_presets(monkeypatch):
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})


@pytest.fixture
def invoke(monkeypatch, capsys):
    def run(*arguments, columns=200):
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
def test_the_command_measures_prints_and_writes(invoke, tmp_path, columns):
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
def test_a_wrong_backend_ends_with_exit_code_1(invoke):
    code, out, _ = invoke(*SMALL, "--backend", WRONG)
    assert code == 1
    assert f"{WRONG} withheld: what it computed is wrong: logits" in " ".join(out.split())


@pytest.mark.usefixtures("small_presets")
def test_an_interrupted_run_keeps_what_it_has_and_goes_on(invoke, tmp_path, monkeypatch):
    path, right = tmp_path / "a.json", speeding.measure

    def interrupted(plan, done, keep, tell):
        def once(entry):
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
def test_what_cannot_be_understood_is_refused(invoke, line, words):
    code, _, err = invoke(*line.split())
    assert code == 2
    assert words in err
