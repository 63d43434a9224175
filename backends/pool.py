"""Supervised workers, restarted after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from concord.backends import heaps
from concord.backends.cores import available_cores
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker

T = TypeVar("T")
U = TypeVar("U")

# Maximum restarts of a crashed worker.
RESTARTS = 2

# After these failures, a new worker would also fail.
HOPELESS = ("absent", "broken", "timed out")

# Seconds between checks of running tasks. A thread that waits indefinitely does not wake on Ctrl-C if another
# thread gets the signal.
GLANCE = 0.2

Opening = Callable[[Callable[[Worker], None]], Worker]
"""Starts a worker, and passes it to its argument once the process exists."""


class Supervisor:
    """A supervisor of one worker: starts it on demand, and again after a crash.

    Tasks share the worker, which exposes leftovers of earlier calls.

    Attributes:
        failure: reason to start no more workers.
    """

    def __init__(
        self,
        opening: Opening,
        restarts: int | None = RESTARTS,
        started: Callable[[Worker], None] = lambda worker: None,
        worker: Worker | None = None,
    ) -> None:
        self._opening, self._started = opening, started
        self._ended = False
        self.worker = worker
        self.refresh(restarts)

    def refresh(self, restarts: int | None = RESTARTS) -> None:
        """Forget earlier failures and allow restarts again."""
        self._restarts = restarts
        self.failure: WorkerFailure | None = None

    def get(self) -> Worker:
        """Return the worker, started if necessary.

        Raises:
            WorkerFailure: if it cannot start, crashed too often, or was ended.
        """
        worker = self.worker
        if worker and worker.dead:
            self._bury(worker.dead)
            worker = None
        if self.failure:
            raise self.failure
        if self._ended:
            raise WorkerFailure("crashed", "its work was stopped")
        if worker is None:
            try:
                worker = self._opening(self._hold)
            except WorkerFailure as failure:
                self._bury(failure)
                raise
            self.worker = worker
            self._started(worker)
        return worker

    def renew(self) -> None:
        """End a worker that has grown; the next task starts a new one."""
        worker = self.worker
        if worker and not worker.dead and worker.grown:
            self.close()

    def do(self, work: Callable[[Worker], T]) -> T:
        """Run a task on the worker.

        Raises:
            WorkerFailure: as in :meth:`get`, or without a result.
        """
        worker = self.get()
        try:
            return work(worker)
        except WorkerFailure:
            if worker.dead:
                self._bury(worker.dead)
            raise

    def _hold(self, worker: Worker) -> None:
        self.worker = worker
        if self._ended:
            worker.close()

    def _bury(self, failure: WorkerFailure) -> None:
        self.close()
        if self._restarts is not None:
            self._restarts -= 1
            if failure.status in HOPELESS or self._restarts < 0:
                self.failure = failure

    def close(self) -> None:
        """End the worker, if any. Thread-safe."""
        worker, self.worker = self.worker, None
        if worker:
            worker.close()

    def end(self) -> None:
        """End the worker permanently. Thread-safe."""
        self._ended = True
        self.close()


class Pool:
    """Parallel supervisors, in a ``with`` block or until :meth:`close`.

    Args:
        width: simultaneous tasks; by default the number of cores.
        halted: polled while tasks run; True ends every worker.
    """

    def __init__(self, width: int | None = None, halted: Callable[[], bool] = lambda: False) -> None:
        heaps.share()
        self.halted, self.stopped, self._looked = halted, False, 0.0
        self._supervisors: list[Supervisor] = []
        self._threads = ThreadPoolExecutor(width or available_cores())

    def supervise(self, opening: Opening, **how: Any) -> Supervisor:
        """A new :class:`Supervisor`."""
        supervisor = Supervisor(opening, **how)
        self._supervisors.append(supervisor)
        return supervisor

    def map(self, task: Callable[[U], T], items: Iterable[U]) -> list[T]:
        """Run a task for each item in threads; return results in order.

        Raises:
            BaseException: a task's first error, or an interrupt; all workers are ended.
        """
        futures = [self._threads.submit(task, item) for item in items]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=GLANCE, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._look()
        except BaseException:
            self.stop()
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def _look(self) -> None:
        # Not every time, since the check may send a message to another host.
        now = time.monotonic()
        if not self.stopped and now - self._looked >= GLANCE:
            self._looked = now
            if self.halted():
                self.stop()

    def stop(self) -> None:
        """End every worker permanently. Thread-safe."""
        self.stopped = True
        for supervisor in self._supervisors:
            supervisor.end()

    def close(self) -> None:
        """End every worker, and wait for running tasks."""
        self.stop()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
