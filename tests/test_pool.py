import signal

import psutil
import pytest

from concord import backends
from concord.backends.pool import RESTARTS, Pool, Supervisor
from concord.backends.wire import WorkerFailure
from concord.conformance import Setup, check_jobs, conduct
from tests.toys.disturbed import name_of
from tests.toys.running import alive, noted, until
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import toy

CASES = ("ragged", "peaked", "tiny", "single", "full")


def conducted(name, monkeypatch, notes, **settings):
    monkeypatch.setenv("TOY_NOTES", str(notes))
    jobs = check_jobs(["bert"], ["float32"], cases=[f"bert-{case}" for case in CASES])
    report = conduct(jobs, [name], Setup(threads=1, **settings))
    return [result.status for result in report.results], report, len(noted(notes, "started"))


@pytest.mark.parametrize(
    ("name", "expected", "started"),
    [
        # Cases run in their own order, in which the batch of one is fourth.
        (name_of("SIGKILL", "alone"), ["agrees"] * 3 + ["crashed", "agrees"], 2),
        (name_of("SIGKILL"), ["crashed"] * 5, 1 + RESTARTS),
        (name_of("lacks a library", "found"), ["broken"] * 5, 0),
    ],
)
def test_a_worker_that_died_is_started_again_unless_that_is_hopeless(
    tmp_path, monkeypatch, name, expected, started
):
    statuses, report, count = conducted(name, monkeypatch, tmp_path)
    assert (statuses, count, report.exit_code) == (expected, started, 3)


def test_a_worker_that_hangs_ends_with_what_it_started_and_is_not_started_again(tmp_path, monkeypatch):
    statuses, report, count = conducted(name_of("forks and hangs"), monkeypatch, tmp_path, time_limit=8.0)
    assert (statuses, count, report.exit_code) == (["timed out"] * 5, 1, 3)
    assert report.results[0].detail == "no answer within 8 s; it was stopped"
    assert report.results[0].stderr.endswith("waiting for a lock")
    assert until(lambda: not any(map(alive, noted(tmp_path, "hanging"))), 5.0)


def test_a_worker_that_has_grown_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr("concord.backends.worker.MUCH", 1)
    statuses, report, count = conducted(toy("Grows"), monkeypatch, tmp_path)
    assert statuses == ["agrees"] * 5
    assert 1 < count < 5
    (about,) = report.environments.values()
    assert about["peak_memory_bytes"] >= 0


def opening(name, **settings):
    return lambda opened: backends.open(name, threads=1, opened=opened, **settings)


def test_a_worker_that_died_unseen_is_followed_by_another(small):
    supervisor = Supervisor(opening(toy("NumpyBackend")))
    first = supervisor.get()
    psutil.Process(first.pid).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerFailure, match=r"^crashed"):
        run_of(first, request_for(small()))  # without the supervisor, as tests do
    assert supervisor.get() is not first
    assert run_of(supervisor.get(), request_for(small())).output.shape == (3, 3)
    supervisor.end()
    with pytest.raises(WorkerFailure, match="crashed: its work was stopped"):
        supervisor.get()


@pytest.mark.parametrize("how", ["a task raises", "halted"])
def test_all_workers_end_together(how, tmp_path, monkeypatch, small):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    request = request_for(small())
    pids = []

    def both_hang():
        return len(noted(tmp_path, "hanging")) == 2

    def task(supervisor):
        if supervisor is None:
            assert until(both_hang)
            if how == "a task raises":
                raise LookupError("the task's")
            return "third"
        try:
            run_of(supervisor.get(), request)
        except WorkerFailure as failure:
            return failure.status
        return "it ran"

    with Pool(3, halted=lambda: how == "halted" and both_hang()) as pool:
        supervisors = [
            pool.supervise(opening(name_of("hangs")), started=lambda worker: pids.append(worker.pid or 0))
            for _ in range(2)
        ]
        if how == "halted":
            assert pool.map(task, [*supervisors, None]) == ["crashed", "crashed", "third"]
        else:
            with pytest.raises(LookupError):
                pool.map(task, [*supervisors, None])
        assert pool.stopped
        assert len(pids) == 2
        assert until(lambda: not any(map(alive, pids)), 10.0)
