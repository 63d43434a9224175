"""No process outlives what it was started for.

Not a worker, not what it has started, however its parent ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from concord import backends, spec
from concord.backends.worker import WorkerFailure
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import PATIENCE, ROOT, errors, fake_ssh, toy

SmallConfig = Callable[..., spec.EncoderConfig]

ONE_CASE = ("--case", "bert-single", "--dtype", "float32", "--threads", "1")


def until(done: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + patience
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def noted(notes: Path) -> list[int]:
    """Return the processes that have said that they hang."""
    file = notes / "hanging"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def left_by(
    arguments: tuple[str, ...], how: signal.Signals, notes: Path, hanging: int, **environment: str
) -> list[int]:
    """Have a parent's workers hang, end the parent, and return its descendants that live on for more than
    a few seconds.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "concord", *arguments],
        cwd=ROOT,
        env={**os.environ, "TOY_NOTES": str(notes), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as parent:
        try:
            assert until(lambda: len(noted(notes)) == hanging)
            started = {*descendants(parent.pid), *noted(notes)}
            assert len(started) >= hanging
        finally:
            parent.send_signal(how)
        parent.wait(PATIENCE)
    until(lambda: not any(map(alive, started)), 5.0)
    return [pid for pid in started if alive(pid)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("name", "hanging"), [("Hangs", 1), ("ComputesWithoutEnd", 1), ("ForksAndHangs", 2)])
def test_a_worker_ends_when_its_parent_is_gone(
    name: str, hanging: int, how: signal.Signals, tmp_path: Path
) -> None:
    assert left_by(("check", "--backend", toy(name), *ONE_CASE), how, tmp_path, hanging) == []


def test_a_worker_on_another_host_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    home, notes = tmp_path / "home", tmp_path / "notes"
    for folder in (home, notes):
        folder.mkdir()
    calls = fake_ssh(tmp_path / "bin", home)
    name = toy("Hangs")
    arguments = ("check", "--backend", name, "--ssh", f"{name}=far:{ROOT}", *ONE_CASE)
    assert left_by(arguments, signal.SIGKILL, notes, 1, PATH=f"{calls.parent}:{os.environ['PATH']}") == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_processes_of_a_hunt_end_when_their_parent_is_gone(how: signal.Signals, tmp_path: Path) -> None:
    arguments = (
        "fuzz",
        "--backend",
        toy("Hangs"),
        "--cases",
        "200",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "out"),
    )
    assert left_by(arguments, how, tmp_path, 1) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_told_in_a_line_and_in_the_exit_code(how: signal.Signals, tmp_path: Path) -> None:
    arguments = ("check", "--backend", toy("Hangs"), *ONE_CASE, "--json", str(tmp_path / "out.json"))
    with subprocess.Popen(
        [sys.executable, "-m", "concord", *arguments],
        cwd=ROOT,
        env={**os.environ, "TOY_NOTES": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert until(lambda: len(noted(tmp_path)) == 1)
        for _ in range(2):  # a second one changes nothing
            parent.send_signal(how)
        output, said = parent.communicate(timeout=PATIENCE)
    assert (parent.returncode, output) == (128 + how, "")
    assert errors(said) == (
        "concord: interrupted\n" if how == signal.SIGINT else f"concord: ended by {how.name}\n"
    )
    assert not (tmp_path / "out.json").exists()


def test_what_a_worker_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: SmallConfig
) -> None:
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    with (
        backends.open(toy("ForksAndHangs"), threads=1, time_limit=5.0) as worker,
        pytest.raises(WorkerFailure, match="timed out"),
    ):
        run_of(worker, request_for(small()))
    assert len(noted(tmp_path)) == 2
    assert until(lambda: not any(map(alive, noted(tmp_path))), 5.0)


@pytest.mark.parametrize("name", ["ForksAndDies", "LeavesADaemonAndDies"])
def test_a_process_that_holds_the_pipe_of_a_dead_worker_delays_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: SmallConfig
) -> None:
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    started = time.monotonic()
    try:
        with (
            backends.open(toy(name), threads=1) as worker,
            pytest.raises(WorkerFailure, match="crashed: its process ended with exit code 9"),
        ):
            run_of(worker, request_for(small()))
        assert time.monotonic() - started < 20
        assert until(lambda: not any(map(alive, noted(tmp_path))), 5.0)
    finally:
        for pid in filter(alive, noted(tmp_path)):
            os.kill(pid, signal.SIGKILL)
