"""Execution of random cases, locally or on a Dask cluster."""

from __future__ import annotations

import importlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from concord.backends.pool import Pool
from concord.conformance.fuzz.findings import FAILED, NOT_THERE, Failure, Findings, explained
from concord.conformance.fuzz.plan import Plan, drawn, files_elsewhere
from concord.conformance.judging.verdict import NOT_JUDGED
from concord.conformance.run.campaign import Runner, Setup, own_bug, unseen
from concord.spec.errors import SpecError, optional
from concord.spec.text import first_line

# Maximum restarts of a worker per chunk, after crashes of a known kind.
RESTARTS = 5

# Seconds to wait for a scheduler.
PATIENCE = 8.0


def hunt(
    plan: Plan,
    settings: Setup,
    scheduler: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Findings:
    """Run the cases of a plan.

    Args:
        scheduler: address of a Dask scheduler, such as ``"tcp://host:8786"``; by default local.
        progress: called with the number of finished cases.
        stopped: polled; if true, the hunt ends with the findings so far.

    Raises:
        SpecError: if Dask is not installed, or no scheduler answers.
    """
    started = time.time()
    if scheduler is None:
        findings = _Hunt(plan, settings, stopped, progress).run(plan.indices)
    else:
        findings = _on_dask(plan, settings, connected(scheduler), progress, stopped)
    for name in findings.unjudged:
        if reason := unseen(findings.environments.get(name, {}), settings.device):
            findings.note(f"{name} {reason}")
        elif any(tally.statuses["unsupported"] for tally in findings.tallies[name].values()):
            advice = "a backend with a fixed architecture is judged on its own weights: concord check PATH"
            findings.note(f"{name}: nothing was judged; {advice}")
    findings.plan, findings.interrupted = plan, stopped()
    findings.seconds = time.time() - started
    return findings


class _Hunt:
    def __init__(
        self,
        plan: Plan,
        settings: Setup,
        halted: Callable[[], bool],
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.plan, self.progress, self.findings, self.device = plan, progress, Findings(), settings.device
        self.pool, self.environments = Pool(len(plan.names), halted), self.findings.environments
        self.runners = {name: Runner(name, settings, self.pool, self.environments) for name in plan.names}

    def run(self, indices: Iterable[int]) -> Findings:
        with self.pool, files_elsewhere():
            for count, index in enumerate(indices):
                if count % self.plan.chunk == 0:
                    self.renew()
                if self.pool.stopped or self.plan.late or not self.left:
                    break
                self.examine(index)
        self.renew()
        return self.findings

    @property
    def left(self) -> list[Runner]:
        # Exclude runners that crashed too often in this chunk.
        return [runner for runner in self.runners.values() if not runner.supervisor.failure]

    def renew(self) -> None:
        for name, runner in self.runners.items():
            if failure := runner.supervisor.failure:
                rest = f"the rest of its {self.plan.chunk} cases were skipped"
                self.findings.note(f"{name}: {failure}; {rest}")
            runner.supervisor.refresh(RESTARTS)

    def examine(self, index: int) -> None:
        case, findings = drawn(self.plan, index), self.findings
        job = case.job(f"fuzz-{self.plan.seed}-{index}")
        results = self.pool.map(lambda runner: runner.attempt(job), self.left)
        if self.pool.stopped:  # workers were stopped during the case
            return
        for result in results:
            name = result.backend
            if result.status in NOT_THERE:
                self.runners.pop(name).supervisor.end()
                findings.owed |= result.status != "absent"
                findings.note(f"{name} is {result.status}: {result.detail}")
                continue
            if unseen(self.environments.get(name, {}), self.device):
                self.runners.pop(name).supervisor.end()  # every case would fail in the same way
            if result.status == NOT_JUDGED:  # an error in Concord is not a finding
                findings.owed = True
                fault = f" could not be judged: {name}: {first_line(result.detail)}"
                if not any(note.endswith(fault) for note in findings.notes):
                    findings.note(result.case + fault)
            findings.tally(name, result.dtype).add(result)
            if result.status in FAILED:
                findings.add(Failure(result, case))
        if any(result.backend in self.runners for result in results):
            findings.cases += 1
            self.progress(findings.cases)
        for failure in findings.failures:
            failure.result = explained(failure.result)


def _on_dask(
    plan: Plan, settings: Setup, client: Any, progress: Callable[[int], None], stopped: Callable[[], bool]
) -> Findings:
    event = dask().Event(f"concord-{uuid.uuid4().hex}", client=client)
    executor, chunks, ending = client.get_executor(pure=False), plan.chunks, False
    findings = Findings()
    pending: dict[Future[Findings], int] = {}
    results: dict[int, Findings] = {}
    try:
        while True:
            # Two chunks per Dask thread, so that no thread is idle.
            room = 0 if ending or plan.late else 2 * max(1, sum(client.nthreads().values())) - len(pending)
            for number, indices in itertools.islice(chunks, max(room, 0)):
                pending[executor.submit(_hunt_on_dask, plan, settings, indices, event.name)] = number
            if not pending:
                break
            for future in wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)[0]:
                number = pending.pop(future)
                results[number] = future.result()
                progress(sum(chunk.cases for chunk in results.values()))
                ending |= not results[number].tallies  # no backend is available
            ending |= stopped()
            if ending:
                event.set()
    except Exception as error:  # keeps earlier findings
        findings.owed = True
        findings.note(own_bug("hunting", error))
    finally:
        event.set()
        executor.shutdown()
        client.close()
    for number in sorted(results):  # in order, regardless of which finished first
        findings.merge(results[number])
    return findings


def _hunt_on_dask(plan: Plan, settings: Setup, indices: Iterable[int], event: str) -> Findings:
    return _Hunt(plan, settings, dask().Event(event).is_set).run(indices)


def connected(address: str) -> Any:
    """Return a Dask client, whose workers need Concord and the frameworks."""
    distributed = dask()
    try:
        return distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise SpecError(
            f"--scheduler is {address!r} but no scheduler answers there within {PATIENCE:g} s: "
            f"{first_line(error)}"
        ) from None


def dask() -> Any:
    """Import Dask."""
    with optional("--scheduler", "dask"):
        return importlib.import_module("distributed")
