"""How a command ends that is not done: with a line and a code, never with that of a divergence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from concord.cli import main
from concord.ending import end
from tests.toys.surroundings import PATIENCE, ROOT, errors, toy

ONE_RUN = (
    "check",
    "--backend",
    toy("NumpyBackend"),
    "--case",
    "bert-single",
    "--dtype",
    "float32",
    "--threads",
    "1",
)


def told(*arguments, monkeypatch, capsys):
    """Run a command here; return its exit code, and what it said on standard error."""
    monkeypatch.setattr(sys, "argv", ["concord", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, errors(capsys.readouterr().err)


def test_a_fault_of_concord_is_told_in_a_line(monkeypatch, capsys):
    def fails(*arguments):
        raise ZeroDivisionError("of Concord\nin two lines")

    monkeypatch.setattr("concord.commands.check.check_jobs", fails)
    code, said = told(*ONE_RUN, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 3
    assert said.startswith("concord: a bug in Concord: ZeroDivisionError: of Concord (test_ending.py:")
    assert said.count("\n") == 1
    monkeypatch.setenv("CONCORD_TRACEBACK", "1")
    assert "in fails" in told(*ONE_RUN, monkeypatch=monkeypatch, capsys=capsys)[1]


def test_a_signal_is_not_lost_where_nothing_can_be_raised(capsys):
    class Ending:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def command():
        Ending()
        time.sleep(PATIENCE)

    with pytest.raises(SystemExit) as ended:
        end(command)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "concord: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_record_is_written_before_anything_is_shown(tmp_path, monkeypatch, capsys):
    def fails(*arguments):
        raise RecursionError("of what shows it")

    monkeypatch.setattr("concord.conformance.report.show", fails)
    code, said = told(*ONE_RUN, "--json", str(tmp_path / "out.json"), monkeypatch=monkeypatch, capsys=capsys)
    assert (code, said.count("\n")) == (3, 1)
    assert [result["status"] for result in json.loads((tmp_path / "out.json").read_text())["results"]] == [
        "agrees"
    ]


def test_a_reader_that_has_gone_changes_nothing(tmp_path):
    arguments = [sys.executable, "-m", "concord", *ONE_RUN, "--json", str(tmp_path / "out.json")]
    with subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(PATIENCE) == 0
    assert errors(said) == ""
    assert (tmp_path / "out.json").exists()


def test_a_full_disk_behind_standard_output_is_no_fault_of_concord(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no device that is always full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "concord", *ONE_RUN],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2
    assert (
        errors(done.stderr) == "concord: error: standard output: cannot be written: No space left on device\n"
    )
