"""The supervisor of workers.

One worker to a supervisor, started again or given up, and all of them ended at once.
"""

import os
import signal
from functools import partial

import psutil
import pytest

from concord import backends
from concord.backends.pool import HOPELESS, RESTARTS, Pool, Supervisor
from concord.backends.wire import WorkerFailure
from tests.toys.disturbed import name_of
from tests.toys.running import alive, noted, until
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import toy


def opening(name, **settings):
    return lambda opened: backends.open(name, threads=1, opened=opened, **settings)


class Imagined:
    """Stands in for a worker."""

    def __init__(self):
        self.dead = None
        self.closed = False

    def close(self):
        self.closed = True

    def fail(self, status):
        failure = WorkerFailure(status, "as asked")
        self.dead = None if status == "error" else failure
        raise failure


def imagined(opened, hold):
    opened.append(Imagined())
    hold(opened[-1])
    return opened[-1]


def failures(supervisor, statuses):
    """Have a supervisor's workers fail, and return what was said."""
    said = []
    for status in statuses:
        with pytest.raises(WorkerFailure) as raised:
            supervisor.do(lambda worker, status=status: worker.fail(status))
        said.append(raised.value.status)
    return said


@pytest.mark.parametrize(
    ("statuses", "restarts", "count"),
    [
        (["crashed"] * 6, RESTARTS, 1 + RESTARTS),
        (["crashed"] * 6, None, 6),
        (["out of memory", "crashed"], 0, 1),
        (["error"] * 6, 0, 1),
        *((([status, "crashed"]), RESTARTS, 1) for status in HOPELESS),
    ],
)
def test_a_worker_is_started_again_as_often_as_said_and_not_where_it_is_hopeless(statuses, restarts, count):
    opened = []
    supervisor = Supervisor(partial(imagined, opened), restarts)
    said = failures(supervisor, statuses)
    assert len(opened) == count
    assert said == statuses[:count] + [statuses[count - 1]] * (len(statuses) - count)
    assert all(worker.closed for worker in opened if worker.dead)


def test_a_supervisor_that_was_given_up_gets_another_chance():
    opened = []
    supervisor = Supervisor(partial(imagined, opened), 0)
    failures(supervisor, ["crashed", "crashed"])
    assert supervisor.failure is not None
    supervisor.refresh(1)
    assert supervisor.do(lambda worker: "done") == "done"
    assert len(opened) == 2


def test_a_worker_that_died_unseen_is_followed_by_another(small):
    supervisor = Supervisor(opening(toy("NumpyBackend")))
    first = supervisor.get()
    psutil.Process(first.pid).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerFailure, match=r"^crashed"):
        run_of(first, request_for(small()))  # not through the supervisor, as tests do
    assert supervisor.get() is not first
    assert run_of(supervisor.get(), request_for(small())).output.shape == (3, 3)
    supervisor.end()
    with pytest.raises(WorkerFailure, match="crashed: its work was ended"):
        supervisor.get()


@pytest.mark.parametrize("how", ["a task raises", "Ctrl-C", "halted"])
def test_all_workers_end_together(how, tmp_path, monkeypatch, small):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    request = request_for(small())
    pids = []

    def both_hang():
        return len(noted(tmp_path, "hanging")) == 2

    def task(supervisor):
        if supervisor is None:
            assert until(both_hang)
            if how == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
            elif how == "a task raises":
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
            with pytest.raises(LookupError if how == "a task raises" else KeyboardInterrupt):
                pool.map(task, [*supervisors, None])
        assert pool.stopped
        assert len(pids) == 2
        assert until(lambda: not any(map(alive, pids)), 10.0)
