"""``concord speed`` as a command: what it prints, writes, refuses, and goes on from."""

import pytest

from concord.commands import speed as speeding
from concord.speed import presets, read
from tests.test_speed import RIGHT, SLOW, WRONG, small_preset


@pytest.fixture
def small_presets(monkeypatch):
    monkeypatch.setattr(presets, "presets", lambda: {"nndl": small_preset("nndl")})


SMALL = "speed --preset nndl --implementation explicit --execution eager --quick --threads 1"


@pytest.mark.usefixtures("small_presets")
def test_the_command_measures_prints_and_writes(invoke, tmp_path):
    columns = 80
    (tmp_path / "a.md").write_text("before\n<!-- begin speed -->\n<!-- end speed -->\nafter\n")
    written = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--markdown", tmp_path / "a.md")
    code, out, _ = invoke(f"{SMALL} --backend {RIGHT}", *written, columns=columns)
    assert code == 0
    assert f"| {RIGHT} | explicit eager |" in (tmp_path / "a.md").read_text()
    assert "nndl inference full" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("written: ")) <= columns
    assert read(tmp_path / "a.json")["complete"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("small_presets")
def test_a_wrong_backend_ends_with_exit_code_1(invoke):
    code, out, _ = invoke(f"{SMALL} --backend {WRONG}")
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
    both = f"{SMALL} --backend {RIGHT} --backend {SLOW}"
    code, _, errors = invoke(f"{both} --json {path}")
    assert (code, errors[-1]) == (130, "concord: interrupted")
    kept = read(path)
    assert not kept["complete"]
    assert [entry["backend"] for entry in kept["entries"]] == [RIGHT]
    monkeypatch.setattr(speeding, "measure", right)
    code, _, errors = invoke(f"{both} --execution compiled --resume {path}")
    assert code == 2
    assert "was begun with the modes" in errors[-1]
    assert read(path) == kept
    assert invoke(f"{both} --resume {path}")[0] == 0
    whole = read(path)
    assert whole["complete"]
    assert whole["entries"][0]["turns"] == kept["entries"][0]["turns"]
    assert [entry["backend"] for entry in whole["entries"]] == [RIGHT, SLOW]
