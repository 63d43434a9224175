"""The backends in one mode, each in a process of its own, in turns, so that a machine that drifts favours
none.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from concord.backends import machine
from concord.backends.interface import Unsupported
from concord.backends.pool import Pool
from concord.backends.wire import WorkerFailure
from concord.backends.worker import SWITCHES, Worker
from concord.conformance.campaign import Setup
from concord.spec.errors import SpecError
from concord.spec.parameters import initialize
from concord.speed import truth
from concord.speed.peers import PEERS
from concord.speed.plan import SQUARE, Mode, SpeedPlan
from concord.speed.presets import SEED, Workload
from concord.speed.statistics import median, settled
from concord.speed.work import product_sizes

Tell = Callable[[str], None]
"""Called with what is being done."""


def rules_of(work: Workload, settings: Setup, about: Mapping[str, Any]) -> str | None:
    """Return the mode by which results are judged where it is not that of their precision.

    That of float32 products on a GPU.

    Args:
        about: what the backend says of itself (:meth:`concord.backends.interface.Backend.describe`).
    """
    if work.dtype != "float32" or settings.device == "cpu":
        return None
    products = about.get("precision_defaults", {}).get("products", {}).get("cuda")
    return "tf32" if "tf32" in (settings.precision, settings.precision == "default" and products) else None


class Known:
    """What earlier modes of a run have shown, and the time that is left for later ones.

    Attributes:
        ahead: how many workloads, each in one mode, are still to be measured.
        took: seconds that a workload took for each backend when it was measured last, but for what is done
            only once.
        offered: the implementations that each backend said it has.
        imports: seconds that each backend's import took in each profile.
        tuned: what each backend said of itself in the tuned profile.
        rates: of bare products, in GFLOP/s: sizes and precision to backend to what it reached.
    """

    def __init__(self, plan: SpeedPlan, ahead: int) -> None:
        self.ahead = ahead
        self.end = math.inf if plan.budget is None else time.perf_counter() + plan.budget
        self.took: dict[Workload, float] = {}
        self.offered: dict[str, list[str]] = {}
        self.imports: dict[tuple[str, str], float] = {}
        self.tuned: dict[str, dict[str, Any]] = {}
        self.rates: dict[tuple[tuple[int, int, int], str], dict[str, list[float]]] = {}

    def suffices(self, work: Workload, members: Sequence[Member]) -> bool:
        """Whether a workload would end in time on these backends, if it takes as long as it did before."""
        return time.perf_counter() + len(members) * self.took.get(work, 0.0) <= self.end

    def until(self) -> float:
        """Return until when the next of the workloads may take.

        All that are ahead get as much of the time that is left.
        """
        now = time.perf_counter()
        self.ahead -= 1
        return now + (self.end - now) / (self.ahead + 1)


class Member:
    """A backend in one mode: its worker, and what is known of it."""

    def __init__(self, name: str, mode: Mode, settings: Setup, pool: Pool) -> None:
        self.name, self.settings = name, settings
        self.failure: tuple[str, str] | None = None
        self.about: dict[str, Any] = {}
        self.first_seconds = 0.0
        opening = partial(settings.open, PEERS.get(name, name), profile=mode.profile)
        self.supervisor = pool.supervise(opening, restarts=0)

    @property
    def worker(self) -> Worker | None:
        """Its worker, while that lives."""
        return self.supervisor.worker

    def start(self) -> None:
        """Start the worker; if it does not, :attr:`failure` says why."""
        try:
            self.about = {**self.supervisor.get().description}
        except WorkerFailure as failure:
            self.failure = self.settings.status_of(self.name, failure.status), failure.detail

    def ask(self, operation: str, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Have the worker do something; None if it did not, and :attr:`failure` says why."""
        if self.worker is None:
            return None
        try:
            return self.supervisor.do(lambda worker: worker.bench(operation, **asked))
        except Unsupported as reason:
            self.failure = "unsupported", str(reason)
        except SpecError as error:
            self.failure = "refused", error.problems[0]
        except WorkerFailure as failure:
            self.failure = failure.status, failure.detail
        return None

    def repeat(self, seconds: float) -> dict[str, Any] | None:
        """Have the worker run steps, and let it come to rest.

        Threads that look out for more work disturb whoever is next.
        """
        before, started = _processor_seconds(self.worker), time.perf_counter()
        answer = self.ask("repeat", count=1000, seconds=seconds)
        busy = busy_cores(before, _processor_seconds(self.worker), time.perf_counter() - started)
        self.rest()
        return {**answer[0], "busy_cores": busy} if answer else None

    def rest(self) -> None:
        """Wait until the worker is at rest."""
        if self.worker and self.worker.pid is not None:
            machine.wait_for_rest(self.worker.pid)


class Team:
    """All backends in one mode, each in a process of its own."""

    def __init__(
        self,
        plan: SpeedPlan,
        mode: Mode,
        names: Sequence[str],
        works: Sequence[Workload],
        known: Known,
        folder: Path,
        tell: Tell,
    ) -> None:
        self.plan, self.mode, self.works, self.known = plan, mode, works, known
        self.folder, self.tell, self.pool = folder, tell, Pool(len(names) or 1)
        self.members = [Member(name, mode, plan.settings, self.pool) for name in names]

    def __enter__(self) -> Team:
        try:
            with ThreadPoolExecutor(1) as drawing:  # imports leave a core idle
                drawn = [drawing.submit(self._weights, work) for work in self.works]
                self._start()
            for weights in drawn:
                weights.result()
        except BaseException:
            self.pool.close()
            raise
        return self

    def _start(self) -> None:
        """Start all workers: one by one if the time of their imports is to be measured, else together."""
        imports, profile = self.known.imports, self.mode.profile
        for member in self.members:
            if self.plan.thorough and (member.name, profile) not in imports:
                self.tell(f"{self.mode.name}: starting {member.name}")
                member.start()
                if member.worker:
                    imports[member.name, profile] = member.worker.import_seconds
        others = [member for member in self.members if not member.worker and not member.failure]
        self.tell(f"{self.mode.name}: starting {', '.join(member.name for member in others)}")
        self.pool.map(Member.start, others)
        for member in self.members:
            if member.worker:
                member.about["import_seconds"] = imports.get((member.name, profile))
                self.known.offered[member.name] = member.about.get("implementations", [])
                if profile == "tuned":
                    self.known.tuned[member.name] = member.about

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def measure(self, work: Workload) -> Iterator[dict[str, Any]]:
        """Measure one workload on every backend, and yield an entry for each."""
        until, different = self.known.until(), self.different()
        entries = {
            member.name: self._entry(member, work)
            | {
                "status": "as tuned",
                "detail": f"as shipped it computes with {member.about['threads']} threads too, and none of "
                "the switches is for it",
            }
            for member in self.members
            if member not in different
        }
        self._products(different, product_sizes(work), work.dtype)
        began = time.perf_counter()
        entries |= {member.name: self._prepare(member, work) for member in different}
        running = [member for member in different if entries[member.name]["status"] == "measured"]
        for member, turn in self._turns(running, work, until):
            entries[member.name]["turns"].append(turn)
        if different:
            self.known.took[work] = (time.perf_counter() - began) / len(different)
        for member in self.members:
            entry = entries[member.name]
            if member.failure and entry["status"] == "measured":
                entry |= {"status": member.failure[0], "detail": member.failure[1]}
            member.failure = None if member.worker else member.failure
            member.ask("release")
        if self.plan.thorough:  # last: on a GPU this takes longer than all before
            self._products(different, self._sizes(work)[0], work.dtype)
        for member in self.members:
            entry = entries[member.name]
            found = (self.known.rates.get((sizes, work.dtype), {}) for sizes in self._sizes(work))
            yield entry | {"product_gflops": max(max(rates.get(member.name, [0.0])) for rates in found)}

    def _sizes(self, work: Workload) -> tuple[tuple[int, int, int], ...]:
        """Return the sizes of the products by which a workload is measured."""
        return (
            *([SQUARE[self.plan.settings.device.partition(":")[0]]] if self.plan.thorough else []),
            product_sizes(work),
        )

    def different(self) -> list[Member]:
        """Return the backends to which the mode's profile makes a difference."""
        return [member for member in self.members if not self._as_tuned(member)]

    def _as_tuned(self, member: Member) -> bool:
        """Whether a backend as shipped says that it has the settings of a tuned one that is measured."""
        tuned, shipped = self.known.tuned.get(member.name), member.about
        return bool(
            tuned
            and member.worker
            and self.mode.profile != "tuned"
            and replace(self.mode, profile="tuned") in self.plan.modes
            and "threads" in tuned
            and tuned["threads"] == shipped.get("threads")
            and not SWITCHES.keys() & tuned.get("thread_switches", {}).keys()
        )

    def _entry(self, member: Member, work: Workload) -> dict[str, Any]:
        return {
            "backend": member.name,
            "mode": self.mode.name,
            "workload": work.name,
            **vars(self.mode),
            "status": "measured",
            "detail": "",
            "turns": [],
            "backend_info": member.about,
        }

    def _prepare(self, member: Member, work: Workload) -> dict[str, Any]:
        """Build a program and check what it computes first; nothing is timed that is wrong."""
        self.tell(f"{work.name}, {self.mode.name}: building on {member.name}")
        checked, place = truth.probe(work), self.plan.settings
        entry = self._entry(member, work) | {"checked_samples": checked.preset.batch}
        settings = {
            "implementation": self.mode.implementation,
            "execution": self.mode.execution,
            "device": place.device,
            "precision": place.precision,
        }
        for one in [checked, *([work] if checked != work else [])]:
            answer = member.ask("prepare", request=one.request(**settings), weights=self._weights(work))
            if answer is None:
                status, detail = member.failure or ("crashed", "")
                member.failure = None if member.worker else member.failure
                return entry | {"status": status, "detail": detail}
            if one is checked:
                expected = truth.expected(one, rules_of(one, place, member.about))
                verdict = truth.judge(expected, answer[1])
                nearest = verdict.nearest
                entry["error_in_tolerances"] = nearest.ratio if nearest else math.nan
                if verdict.status == "undetermined":
                    tensor = next(row.tensor for row in verdict.table if row.status == verdict.status)
                    said = f"was not judged: {one.dtype} does not determine {tensor}"
                    return entry | {"status": "undetermined", "detail": f"what it computed {said}"}
                if nearest and not verdict.passed:
                    said = f"is wrong: {nearest.tensor} lies {nearest.ratio:.3g} tolerances from the oracle"
                    return entry | {"status": "withheld", "detail": f"what it computed {said}"}
            entry |= answer[0]
        member.rest()
        member.first_seconds = entry["first_seconds"]
        return entry

    def _weights(self, work: Workload) -> str:
        """Return the file that holds a model's weights, for all modes.

        Drawing them takes longer than reading them.
        """
        config = work.preset.config
        path = self.folder / f"{hashlib.sha256(config.to_toml().encode()).hexdigest()}.safetensors"
        if not path.exists():
            drawn = initialize(config, SEED)
            save_file(
                {name: np.asarray(array, np.float32, order="C") for name, array in drawn.items()}, path
            )  # exact: they are float32 numbers
        return str(path)

    def _products(self, members: Sequence[Member], sizes: tuple[int, int, int], dtype: str) -> None:
        """Measure the bare product, in turns, once for each size and precision."""
        found = self.known.rates.setdefault((sizes, dtype), {})
        members = [member for member in members if member.name not in found]
        if not members:
            return
        self.tell(f"{self.mode.name}: matrix product {' x '.join(map(str, sizes))}")
        operations = 2 * sizes[0] * sizes[1] * sizes[2]
        place = self.plan.settings
        settings = {"dtype": dtype, "device": place.device, "precision": place.precision}
        ready = [m for m in members if m.ask("product", sizes=sizes, **settings)]
        for _ in range(3):
            for member in ready:
                answer = member.repeat(0.15)
                if answer:
                    # As steps are: what a turn sustains, not what a lucky moment allows.
                    found.setdefault(member.name, []).append(operations / median([answer["seconds"]]) / 1e9)
        for member in members:
            found.setdefault(member.name, [0.0])
            member.failure = None if member.worker else member.failure

    def _turns(
        self, members: Sequence[Member], work: Workload, until: float
    ) -> Iterator[tuple[Member, dict[str, Any]]]:
        """Let backends run in turns.

        All of them the same number of times, until every one is steady, or patience or time end.
        """
        steps: dict[str, list[list[float]]] = {member.name: [] for member in members}
        self._warm_up(members, work)
        began = time.perf_counter()
        for turn in range(self.plan.turns * self.plan.patience):
            one = (time.perf_counter() - began) / max(turn, 1)
            if turn >= self.plan.turns and (
                all(settled(steps[m.name]) for m in members if m.worker) or time.perf_counter() + one > until
            ):
                return
            self.tell(f"{work.name}, {self.mode.name}: turn {turn + 1}")
            for member in members:
                answer = member.repeat(self.plan.slice)
                if answer is not None:
                    steps[member.name].append(answer["seconds"])
                    yield member, answer

    def _warm_up(self, members: Sequence[Member], work: Workload) -> None:
        """Let each backend have a turn that does not count, unless its first step, which compiled nothing,
        took as long as one.
        """
        self.tell(f"{work.name}, {self.mode.name}: warming up")
        for member in members:
            if member.first_seconds < self.plan.slice or self.mode.execution.endswith("compiled"):
                member.repeat(self.plan.slice)


def busy_cores(before: float | None, after: float | None, elapsed: float) -> float | None:
    """Return how many cores a process kept busy. None: nothing is known of it, for it is elsewhere.

    Args:
        before, after: seconds that its threads have computed, all together.
        elapsed: seconds between the two.
    """
    return None if before is None or after is None or elapsed <= 0 else (after - before) / elapsed


def _processor_seconds(worker: Worker | None) -> float | None:
    """Return how long the threads of a worker have computed, all together."""
    return machine.processor_seconds(worker.pid) if worker and worker.pid is not None else None
