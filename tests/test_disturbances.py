"""Two hundred disturbances, of workers and of their parent.

Nothing is lost, nothing hangs, nothing is left, and nobody sees a traceback.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from concord.backends import machine
from concord.backends.process import MARK
from tests.toys.disturbed import DEADLY, HARMLESS, WHEN, name_of
from tests.toys.surroundings import ROOT, errors, options, toy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="processes are found by their environment"
    ),
]

RIGHT = toy("NumpyBackend")
CASES = ("bert-ragged", "bert-single")
CHECK = ("check", "--dtype", "float32", "--threads", "1", "--memory-limit", "700")
HUNT = ("fuzz", "--cases", "100000", "--shapes", "2", "--part", "dot_product", "--threads", "1")

SEED = 2026
WITHIN, SIGNALLED, PARENTS = 110, 36, 54
"""How many disturbances come from within workers, how many are signals to workers, and how many to their
parent.
"""

TOGETHER = 11
"""Disturbances from within that meet one command, each in a backend of its own."""

TIME_LIMIT = 15
BOUND = 240.0
"""Seconds after which a command hangs, on a machine that has much else to do."""

STATUSES = {"broken", "crashed", "timed out", "out of memory", "error", "absent", "missing"}
TO_WORKERS = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGQUIT,
)
TO_PARENTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)


def within() -> list[list[tuple[str, str]]]:
    """Return what happens in the backends of each command: everything at some time, then anything."""
    drawn = random.Random(SEED)
    all_of_it = [*HARMLESS, *DEADLY]
    whats = [*all_of_it, *drawn.choices(all_of_it, k=WITHIN)][:WITHIN]
    happenings = [(what, drawn.choice(WHEN)) for what in whats]
    drawn.shuffle(happenings)
    return [happenings[first : first + TOGETHER] for first in range(0, WITHIN, TOGETHER)]


def test_there_are_two_hundred_disturbances() -> None:
    assert sum(map(len, within())) + SIGNALLED + PARENTS == 200
    assert {what for together in within() for what, _ in together} == {*HARMLESS, *DEADLY}


class Command:
    """A command in a process of its own, whose descendants are known by a variable of their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.folder = f"TOY_DISTURBANCE={uuid.uuid4().hex}", folder
        name, _, value = self.mark.partition("=")
        self.out, self.err = (folder / "out.txt").open("w"), (folder / "err.txt").open("w")
        environment = {
            **os.environ,
            name: value,
            "COLUMNS": "200",
            "TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
        }
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "concord", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=self.out,
            stderr=self.err,
        )

    def wait_for_handlers(self) -> None:
        """Wait until the command heeds signals: before that, it is Python that starts."""
        status, bit = Path(f"/proc/{self.process.pid}/status"), 1 << (signal.SIGTERM - 1)
        while not any(
            line.startswith("SigCgt:") and int(line.split()[1], 16) & bit
            for line in status.read_text().splitlines()
        ):
            time.sleep(0.01)

    def all(self) -> list[int]:
        """Return the processes that the command has started and that live."""
        return [pid for pid in machine.marked(self.mark) if pid not in (self.process.pid, os.getpid())]

    def workers(self) -> dict[str, list[int]]:
        """Return the processes of each worker."""
        found: dict[str, list[int]] = {}
        for pid in self.all():
            with contextlib.suppress(psutil.Error):
                found.setdefault(psutil.Process(pid).environ().get(MARK, ""), []).append(pid)
        found.pop("", None)
        return found

    def end(self) -> int:
        """Wait for its end, and return its exit code; it has left nothing but what it was asked for."""
        try:
            code = self.process.wait(BOUND)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"it hangs: {self.said()[-2000:]}")
        finally:
            self.out.close()
            self.err.close()
        deadline = time.monotonic() + 10
        while self.all() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [" ".join(psutil.Process(pid).cmdline()) for pid in self.all() if psutil.pid_exists(pid)]
        for pid in self.all():
            os.kill(pid, signal.SIGKILL)
        assert left == []
        assert "Traceback" not in errors(self.said()).replace("| Traceback", "")
        return code

    def said(self) -> str:
        return (self.folder / "out.txt").read_text() + (self.folder / "err.txt").read_text()

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"out.txt", "err.txt"}


def results(path: Path) -> dict[str, dict[str, str]]:
    """Return the status of each case of each backend in a record."""
    found: dict[str, dict[str, str]] = {}
    for result in json.loads(path.read_text())["results"]:
        found.setdefault(result["backend"], {})[result["case"]] = result["status"]
        assert "\n" not in result.get("detail", "")
    return found


@pytest.mark.parametrize("number", range(len(within())))
def test_what_happens_within_a_worker_is_its_row(number: int, tmp_path: Path) -> None:
    together = within()[number]
    backends = {name_of(what, when): what for what, when in together}
    path = tmp_path / "out.json"
    command = Command(
        tmp_path,
        *CHECK,
        *options("--case", CASES),
        *options("--backend", [RIGHT, *backends, toy("Raises")]),
        "--time-limit",
        str(TIME_LIMIT),
        "--json",
        str(path),
    )
    assert command.end() == 3
    found = results(path)
    assert found.keys() == {RIGHT, *backends, toy("Raises")}
    assert all(of_one.keys() == set(CASES) for of_one in found.values())
    assert set(found[RIGHT].values()) == {"agrees"}
    assert set(found[toy("Raises")].values()) == {"error"}
    for name, what in backends.items():
        statuses = set(found[name].values())
        assert statuses <= ({"agrees"} if what in HARMLESS else STATUSES | {"agrees"}), name
    assert command.files() == {"out.json"}


@pytest.mark.parametrize("number", range(0, SIGNALLED, 3))
def test_a_signal_to_a_worker_loses_no_other_s_results(number: int, tmp_path: Path) -> None:
    drawn, path = random.Random(SEED + number), tmp_path / "out.json"
    names = [
        RIGHT,
        *(toy(name) for name in ("SaysUnsupported", "Revealing", "RaisesOnOneSample", "DeclaresNotExposed")),
    ]
    command = Command(
        tmp_path,
        *CHECK,
        "--variant",
        "bert",
        *options("--backend", names),
        "--time-limit",
        str(TIME_LIMIT),
        "--json",
        str(path),
    )
    hit: set[str] = set()
    for how in (TO_WORKERS[(number + place) % len(TO_WORKERS)] for place in range(3)):
        time.sleep(drawn.uniform(0, 1.5))
        workers = {mark: pids for mark, pids in command.workers().items() if mark not in hit}
        if not workers:
            continue
        mark = drawn.choice(sorted(workers))
        hit.add(mark)
        for pid in workers[mark] if drawn.random() < 0.2 else [drawn.choice(workers[mark])]:
            if psutil.pid_exists(pid):
                os.kill(pid, how)
    code = command.end()
    found = results(path)
    assert found.keys() == set(names)
    assert len({frozenset(of_one) for of_one in found.values()}) == 1
    usual = {toy("SaysUnsupported"): {"unsupported"}, toy("RaisesOnOneSample"): {"agrees", "error"}}
    disturbed = [
        name for name, of_one in found.items() if not set(of_one.values()) <= usual.get(name, {"agrees"})
    ]
    assert len(disturbed) <= len(hit)
    assert all(set(found[name].values()) <= STATUSES | usual.get(name, {"agrees"}) for name in disturbed)
    assert code == 3  # one of them raises
    assert command.files() == {"out.json"}


def disturbances_of_parents() -> Iterator[tuple[int, tuple[str, ...], signal.Signals]]:
    commands = (
        (*CHECK, *options("--backend", [RIGHT, toy("ForksAndHangs")])),
        (*HUNT, *options("--backend", [RIGHT, toy("Raises")])),
    )
    for number, (how, command) in zip(
        range(PARENTS), itertools.cycle(itertools.product(TO_PARENTS, commands)), strict=False
    ):
        yield number, command, how


@pytest.mark.parametrize(
    ("number", "arguments", "how"),
    disturbances_of_parents(),
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_a_signal_to_the_parent_ends_all_of_it(
    number: int, arguments: tuple[str, ...], how: signal.Signals, tmp_path: Path
) -> None:
    drawn, path, out = random.Random(SEED + number), tmp_path / "out.json", tmp_path / "found"
    command = Command(
        tmp_path, *arguments, "--json", str(path), *(("--out", str(out)) if arguments[0] == "fuzz" else ())
    )
    command.wait_for_handlers()
    time.sleep(drawn.uniform(0.0, 5.0))
    if how == signal.SIGSTOP:
        command.process.send_signal(how)
        time.sleep(drawn.uniform(0.5, 3.0))
        command.process.send_signal(signal.SIGCONT)
        time.sleep(drawn.uniform(0.0, 1.0))
        how = signal.SIGTERM
    for _ in range(drawn.choice((1, 1, 2, 3))):  # whoever is impatient
        command.process.send_signal(how)
        time.sleep(drawn.uniform(0.0, 0.3))
    code = command.end()
    said = errors(command.said()).splitlines()
    if how == signal.SIGKILL:
        assert code == -how
    else:
        assert code == 128 + how
        assert said[-1] == (
            "concord: interrupted" if how == signal.SIGINT else f"concord: ended by {how.name}"
        )
    left = command.files() - ({"found"} if arguments[0] == "fuzz" else set())
    whole = whole_records(path, out)
    if how != signal.SIGKILL:
        assert left <= {"out.json"}
        assert arguments[0] == "check" or "out.json" not in left or whole["cases"] >= 0
        assert arguments[0] == "fuzz" or left == set()


def whole_records(path: Path, out: Path) -> dict[str, Any]:
    """Return what was recorded; every file is whole."""
    for found in out.glob("[!.]*/found.json") if out.exists() else ():
        assert json.loads(found.read_text())["format"] == "concord.found/1"
        assert (found.parent / "case.safetensors").exists()
    return json.loads(path.read_text()) if path.exists() else {}
