"""Workers under supervision: started, given work, started again after they died, and ended.

A :class:`Supervisor` keeps one worker at a time. What it is given to do is done one after the other, in the
same process for as long as that lives, so a backend that carries something from one call to the next is seen
as it is. A :class:`Pool` holds the supervisors of a job, of several backends and devices, and has as many
work at a time as there are cores. It ends all of them at once: when a task raises something, at Ctrl-C, when
it is told to, and with its ``with`` block. Each worker limits time and memory of a request
(:class:`concord.backends.worker.Worker`), and a worker whose parent is gone ends by itself. What stands above
a pool may be any executor: a thread, a process, Dask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from concord.backends import heaps
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker

T = TypeVar("T")
U = TypeVar("U")

RESTARTS = 2
"""How often a worker is started again after it died, unless the caller says otherwise."""

HOPELESS = ("absent", "broken", "timed out")
"""Of what a worker dies so that no other is started in its place."""

GLANCE = 0.2
"""Seconds between two looks at whether to end: Ctrl-C does not wake a thread that waits without end, if
another one gets the signal."""

Opening = Callable[[Callable[[Worker], None]], Worker]
"""Starts a worker; what it is given is called with the worker as soon as there is a process, so that it can
be ended while it starts."""


class Supervisor:
    """Keeps one worker: starts it when it is first needed, and again when it died.

    Args:
        opening: starts the worker.
        restarts: how often another worker may follow one that died; None: each time.
        started: called with each worker that has started.
        worker: one that runs already.

    Attributes:
        worker: the worker, if there is one.
        failure: why no worker is started any more, if that is so.
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
        """Let the worker be started again, as often as said, whatever happened so far."""
        self._restarts = restarts
        self.failure: WorkerFailure | None = None

    def get(self) -> Worker:
        """Return the worker, and start it if there is none that lives.

        Raises:
            WorkerFailure: if it cannot be started, has died too often, or supervision has ended.
        """
        worker = self.worker
        if worker and worker.dead:
            self._bury(worker.dead)
            worker = None
        if self.failure:
            raise self.failure
        if self._ended:
            raise WorkerFailure("crashed", "its work was ended")
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
        """End a worker that has grown, so that the next work finds another.

        Not within what has to be done in one process.
        """
        worker = self.worker
        if worker and not worker.dead and worker.grown:
            self.close()

    def do(self, work: Callable[[Worker], T]) -> T:
        """Have the worker do something.

        Raises:
            WorkerFailure: as :meth:`get` does, and if there was no result. The next work finds another
                worker, if it died.
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
        """Let the worker go; whether another one may follow depends on what it died of."""
        self.close()
        if self._restarts is not None:
            self._restarts -= 1
            if failure.status in HOPELESS or self._restarts < 0:
                self.failure = failure

    def close(self) -> None:
        """End the worker, if there is one. Any thread may."""
        worker, self.worker = self.worker, None
        if worker:
            worker.close()

    def end(self) -> None:
        """End the worker, and start none any more. Any thread may."""
        self._ended = True
        self.close()


class Pool:
    """Supervisors that work at the same time and end together.

    Use it in a ``with`` block, or call :meth:`close`.

    Args:
        width: how many work at a time; by default as many as there are cores.
        halted: asked while tasks run; once it says True, every worker is ended.
    """

    def __init__(self, width: int | None = None, halted: Callable[[], bool] = lambda: False) -> None:
        heaps.share()
        self.halted, self.stopped, self._looked = halted, False, 0.0
        self._supervisors: list[Supervisor] = []
        self._threads = ThreadPoolExecutor(width or os.cpu_count() or 1)

    def supervise(self, opening: Opening, **how: Any) -> Supervisor:
        """Return a new supervisor; the arguments are those of :class:`Supervisor`."""
        supervisor = Supervisor(opening, **how)
        self._supervisors.append(supervisor)
        return supervisor

    def map(self, task: Callable[[U], T], items: Iterable[U]) -> list[T]:
        """Do a task for each item, on threads, and return what came of it in the order of the items.

        Raises:
            BaseException: the first that a task raises, or that ends the waiting, such as KeyboardInterrupt;
                every worker is ended then.
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
        """Look whether to end, now and then: to ask may take a message to another host."""
        now = time.monotonic()
        if not self.stopped and now - self._looked >= GLANCE:
            self._looked = now
            if self.halted():
                self.stop()

    def stop(self) -> None:
        """End every worker at once; what runs ends with a failure, and none is started any more.

        Any thread may.
        """
        self.stopped = True
        for supervisor in self._supervisors:
            supervisor.end()

    def close(self) -> None:
        """End every worker, and wait for what ran."""
        self.stop()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
