"""Whatever becomes of workers and of their parent.

Nothing is lost, nothing hangs, no process outlives what it was started for, and nobody sees a traceback.
"""

import json
import os
import random
import signal
import time

import pytest

from concord import backends
from concord.backends.wire import WorkerFailure
from tests.toys.disturbed import DEADLY, HARMLESS, WHEN, name_of
from tests.toys.running import Running, alive, noted, until
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import errors, options, toy

RIGHT, HANGS, FORKS = toy("NumpyBackend"), name_of("hangs"), name_of("forks and hangs")
RAISES = name_of("raises")
ONE_CASE = "--case bert-single --dtype float32 --threads 1"

HANGING = {
    "hangs": (f"check --backend {HANGS} {ONE_CASE}", 1),
    "describes": (f"check --backend {name_of('hangs', 'described')} {ONE_CASE}", 1),
    "computes": (f"check --backend {name_of('spins')} {ONE_CASE}", 1),
    "forks": (f"check --backend {FORKS} {ONE_CASE}", 2),
    "hunts": (f"fuzz --backend {HANGS} --cases 200 --threads 1", 1),
}
"""Commands whose workers hang, and how many processes do."""


def assert_ended(code, said, how):
    """A signal is told in a line and in the exit code."""
    if how == signal.SIGKILL:
        assert code == -how
    else:
        words = "interrupted" if how == signal.SIGINT else f"ended by {how.name}"
        assert (code, errors(said).splitlines()[-1]) == (128 + how, f"concord: {words}")


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, signal.SIGKILL) for what in ("hangs", "computes", "forks", "hunts")),
        *(("forks", how) for how in (signal.SIGTERM, signal.SIGHUP)),
        *((what, signal.SIGINT) for what in ("describes", "hunts")),
    ],
)
def test_all_that_a_parent_has_started_ends_when_it_is_gone(what, how, tmp_path):
    line, hanging = HANGING[what]
    written = ("--out", tmp_path / "found") if what == "hunts" else ("--json", tmp_path / "out.json")
    command = Running(tmp_path, line, *written)
    try:
        assert until(lambda: len(noted(command.notes, "hanging")) == hanging)
        assert len(command.all()) >= hanging
    finally:
        for _ in range(2):  # a second one changes nothing
            command.process.send_signal(how)
    assert_ended(command.end(), command.said(), how)
    if how != signal.SIGKILL:
        assert command.files() <= {"found"}
        assert what == "hunts" or errors(command.said()).count("\n") == 1


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("forks and hangs", "timed out"),
        ("forks and exits", "crashed: its process ended with exit code 9"),
        ("leaves a daemon and exits", "crashed: its process ended with exit code 9"),
    ],
)
def test_what_a_worker_has_started_ends_with_it_and_delays_nothing(what, said, tmp_path, monkeypatch, small):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    started = time.monotonic()
    try:
        with (
            backends.open(name_of(what), threads=1, time_limit=5.0) as worker,
            pytest.raises(WorkerFailure, match=said),
        ):
            run_of(worker, request_for(small()))
        assert time.monotonic() - started < 20
        assert until(lambda: not any(map(alive, noted(tmp_path, "hanging"))), 5.0)
    finally:
        for pid in filter(alive, noted(tmp_path, "hanging")):
            os.kill(pid, signal.SIGKILL)


# Two hundred disturbances, of workers and of their parent.

CASES = ("bert-ragged", "bert-single")
CHECK = "check --dtype float32 --threads 1 --memory-limit 700"
LIMITED = "--time-limit 15"
HUNT = "fuzz --cases 100000 --shapes 2 --part dot_product --threads 1"

SEED = 2026
WITHIN, PARENTS = 110, 54
"""How many come from within workers, and how many are signals to their parent."""

TOGETHER = 11
"""Disturbances from within that meet one command, each in a backend of its own."""

LATE = 10.0
STATUSES = {"broken", "crashed", "timed out", "out of memory", "error", "absent", "missing"}
KILLING = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)


def within():
    """Return what happens in the backends of each command: everything at some time, then anything."""
    drawn = random.Random(SEED)
    all_of_it = [*HARMLESS, *DEADLY]
    whats = [*all_of_it, *drawn.choices(all_of_it, k=WITHIN)][:WITHIN]
    happenings = [(what, drawn.choice(WHEN)) for what in whats]
    drawn.shuffle(happenings)
    return [happenings[first : first + TOGETHER] for first in range(0, WITHIN, TOGETHER)]


def results(command):
    """Return the status of each case of each backend in its record, which is all that it has written."""
    assert command.files() == {"out.json"}
    found = {}
    for result in json.loads((command.folder / "out.json").read_text())["results"]:
        found.setdefault(result["backend"], {})[result["case"]] = result["status"]
        assert "\n" not in result.get("detail", "")
    assert len({frozenset(of_one) for of_one in found.values()}) == 1, "the same cases of each"
    return {name: set(of_one.values()) for name, of_one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(within())))
def test_what_happens_within_a_worker_is_its_row(number, tmp_path):
    happening = {name_of(what, when): what for what, when in within()[number]}
    names = [RIGHT, *happening, RAISES]
    asked = [*options("--case", CASES), *options("--backend", names), "--json", tmp_path / "out.json"]
    command = Running(tmp_path, f"{CHECK} {LIMITED}", *asked)
    assert command.end(LATE) == 3
    found = results(command)
    assert found.keys() == set(names)
    assert (found[RIGHT], found[RAISES]) == ({"agrees"}, {"error"})
    for name, what in happening.items():
        assert found[name] <= ({"agrees"} if what in HARMLESS else STATUSES | {"agrees"}), name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PARENTS))
def test_a_signal_to_the_parent_ends_all_of_it(number, tmp_path):
    drawn, how = random.Random(SEED + number), KILLING[number // 2 % len(KILLING)]
    hunts, path, out = number % 2, tmp_path / "out.json", tmp_path / "found"
    line = f"{HUNT} --out {out} --backend {RAISES}" if hunts else f"{CHECK} --backend {FORKS}"
    command = Running(tmp_path, f"{line} --backend {RIGHT} --json {path}")
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
    assert_ended(command.end(LATE), command.said(), how)
    for found in out.glob("[!.]*/found.json"):  # every file is whole
        assert json.loads(found.read_text())["result"]["status"] == "error"
        assert (found.parent / "case.safetensors").exists()
    recorded = json.loads(path.read_text()) if path.exists() else {"cases": 0}
    if how != signal.SIGKILL:
        assert command.files() <= ({"found", "out.json"} if hunts else set())
        assert recorded["cases"] >= 0
