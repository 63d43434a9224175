"""A command that tests disturb while it runs."""

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.toys.surroundings import PATIENCE, ROOT, errors

# Seconds until a command counts as hanging, on a busy machine.
BOUND = 240.0


def until(done, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def noted(folder, name):
    """Process ids of toys, once for each note."""
    file = folder / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


class Running:
    """A command; a variable of the environment marks its descendants."""

    def __init__(self, folder, line, *words, **environment):
        if not Path("/proc/self/environ").exists():
            pytest.skip("processes are found by their environment")
        self.mark, self.folder, self.notes = f"TOY_DISTURBANCE={uuid.uuid4().hex}", folder, folder / "notes"
        self.notes.mkdir()
        variables = dict([self.mark.split("=")], COLUMNS="200", TMPDIR=str(folder), TOY_NOTES=str(self.notes))
        with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "concord", *shlex.split(line), *map(str, words)],
                cwd=ROOT,
                env={**os.environ, **variables, **environment},
                stdout=out,
                stderr=err,
            )

    def all(self):
        ours, (name, value) = (self.process.pid, os.getpid()), self.mark.split("=")
        processes = psutil.process_iter(["environ"])
        return [
            process.pid
            for process in processes
            if (process.info["environ"] or {}).get(name) == value and process.pid not in ours
        ]

    def end(self, patience=5.0):
        """The exit code; fails if processes outlive it by ``patience`` seconds, or after a traceback."""
        try:
            code = self.process.wait(BOUND)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"it hangs: {self.said()[-2000:]}")
        until(lambda: not any(map(alive, self.all())), patience)
        survivors = [pid for pid in self.all() if alive(pid)]
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)
        assert survivors == []
        assert "Traceback" not in errors(self.said()).replace("| Traceback", "")
        return code

    def said(self):
        return (self.folder / "out.txt").read_text() + (self.folder / "err.txt").read_text()

    def files(self):
        return {path.name for path in self.folder.iterdir()} - {"out.txt", "err.txt", "notes"}
