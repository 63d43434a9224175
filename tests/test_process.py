import json
import os
import signal
import time

import psutil
import pytest

from concord import backends
from concord.backends.wire import WorkerFailure
from tests.toys.disturbed import name_of
from tests.toys.running import Running, alive, noted, until
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import concord, errors, options, python, toy

RIGHT = toy("NumpyBackend")

FAILURES = {
    name_of("SIGKILL"): ("crashed", "killed by SIGKILL", "first words\nlast words"),
    name_of("exits with a code"): ("crashed", "its process ended with exit code 77", ""),
    name_of("hoards"): ("out of memory", "MiB, over its limit of 600 MiB, and was stopped", "allocating"),
    name_of("raises for want of memory"): ("out of memory", "MemoryError: Unable to allocate 8.00 PiB", ""),
    name_of("raises"): ("error", "ArithmeticError: it broke", "it broke\nand has more to say"),
    name_of("raises what cannot be shown"): (
        "error",
        r"lone \ud800 surrogate, [/red] markup, \x1b[31m colour",
        r"ArithmeticError: lone \ud800 surrogate, [/red] markup, \x1b[31m",
    ),
    toy("NoSuchClass"): ("broken", "module 'tests.toys.numpy_backend' has no 'NoSuchClass'", ""),
    name_of("lacks a library", "found"): (
        "broken",
        "ImportError: libtoy.so.1: cannot open shared object file",
        "ImportError: libtoy.so.1",
    ),
    name_of("lacks its framework", "found"): ("missing", "No module named 'no_such_framework'", ""),
}


@pytest.fixture(scope="module")
def wreckage(tmp_path_factory):
    # One check, with a right backend and one backend for each way to fail.
    path = tmp_path_factory.mktemp("wreckage") / "out.json"
    done = concord(
        f"check --case bert-single --dtype float32 --json {path} --memory-limit 600",
        *options("--backend", (RIGHT, *FAILURES)),
        patience=240,
    )
    assert path.exists(), done.stderr
    return done, {result["backend"]: result for result in json.loads(path.read_text())["results"]}


@pytest.mark.xdist_group("wreckage")
@pytest.mark.parametrize("name", FAILURES)
def test_a_worker_that_fails_says_how(wreckage, name):
    done, results = wreckage
    status, detail, words = FAILURES[name]
    assert results[name]["status"] == status
    assert detail in results[name]["detail"]
    assert "\n" not in results[name]["detail"]
    assert words in results[name].get("stderr", "")
    assert len(results[name].get("stderr", "").splitlines()) <= 10
    assert f"{name} {status}: " in done.stdout
    assert words.splitlines()[-1:] == [] or f"| {words.splitlines()[-1]}" in done.stdout


@pytest.mark.xdist_group("wreckage")
def test_a_worker_that_fails_leaves_the_others_results_and_exit_code_3(wreckage):
    done, results = wreckage
    assert done.returncode == 3
    assert errors(done.stderr) == ""
    assert results[RIGHT]["status"] == "agrees"
    assert len(results) == len(FAILURES) + 1
    assert "Traceback" not in done.stdout.replace("| Traceback", "")


@pytest.mark.parametrize(
    ("backend", "hanging", "how"),
    [
        (name_of("spins"), 1, signal.SIGKILL),
        (name_of("forks and hangs"), 2, signal.SIGKILL),
        (name_of("forks and hangs"), 2, signal.SIGHUP),
        (name_of("hangs", "described"), 1, signal.SIGTERM),
    ],
)
def test_all_that_a_parent_has_started_ends_when_it_is_gone(backend, hanging, how, tmp_path):
    # The tests of fuzz cover an interrupt.
    line = f"check --backend {backend} --case bert-single --dtype float32 --threads 1 --json"
    command = Running(tmp_path, line, tmp_path / "out.json")
    try:
        assert until(lambda: len(noted(command.notes, "hanging")) == hanging)
        assert len(command.all()) >= hanging
    finally:
        for _ in range(2):  # the second has no effect
            command.process.send_signal(how)
    code, lines = command.end(), errors(command.said())
    if how == signal.SIGKILL:
        assert code == -how
    else:
        assert (code, lines) == (128 + how, f"concord: ended by {how.name}\n")
        assert command.files() == set()


def test_what_a_worker_has_started_ends_with_it_and_delays_nothing(tmp_path, monkeypatch, small):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    started = time.monotonic()
    try:
        with (
            backends.open(name_of("forks and exits"), threads=1) as worker,
            pytest.raises(WorkerFailure, match="crashed: its process ended with exit code 9"),
        ):
            run_of(worker, request_for(small()))
        assert time.monotonic() - started < 20
        assert until(lambda: not any(map(alive, noted(tmp_path, "hanging"))), 5.0)
    finally:
        for pid in filter(alive, noted(tmp_path, "hanging")):
            os.kill(pid, signal.SIGKILL)


def test_no_worker_process_outlives_its_parents_interest(small):
    with backends.open(toy("NumpyBackend"), threads=1) as worker:
        process = psutil.Process(worker.pid)
        run_of(worker, request_for(small()))
    assert not process.is_running()
    worker.close()


def test_cores_are_those_that_the_process_may_use():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    count = "from concord.backends.cores import available_cores; print(available_cores())"
    assert python("-c", f"{one}; {count}").stdout == "1\n"
