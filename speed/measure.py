"""The measurement: every backend in its own process, in turns, so that a machine that drifts favours none."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import backends
from backends.interface import Unsupported
from backends.wire import pack
from backends.worker import Worker, WorkerFailure
from spec.errors import SpecError
from spec.parameters import initialize
from speed import truth
from speed.peers import PEER_EXECUTIONS, PEERS
from speed.presets import SEED, Workload
from speed.statistics import settled
from speed.work import product_sizes

PROFILES = ("tuned", "as shipped")
"""``tuned``: the same threads for all, and documented switches. ``as shipped``: what a framework does if nothing is said."""

SLICE = 0.4
"""Seconds that a turn lasts, or one step if that is longer."""

TURNS = 4
"""Turns at least; the first warms up and does not count."""

PATIENCE = 5
"""How many times as many turns there may be, while a measurement is unsteady and time is left."""

BUDGET = 300.0
"""Seconds that the whole should take. Turns beyond the least number are taken while it lasts."""

BUSY = 0.5
"""Share of a turn that a thread has to compute for, to be counted as busy."""

SQUARE = (2048, 2048, 2048)
"""A product large enough for any framework to be at its best."""


@dataclass(frozen=True)
class Mode:
    """How a workload is run.

    Attributes:
        implementation, execution: as in :class:`backends.interface.Request`.
        profile: one of :data:`PROFILES`.
    """

    implementation: str = "library"
    execution: str = "eager"
    profile: str = "tuned"

    @property
    def name(self) -> str:
        """A name for tables and records."""
        return f"{self.implementation} {self.execution}" + ("" if self.profile == "tuned" else f", {self.profile}")


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        names: of backends, and of :data:`speed.peers.PEERS`.
        asked: those of them that were asked for by name.
        workloads, modes: all of the one in each of the other.
        limit: how far results may lie from the oracle's, in sigma.
        turns: how many turns there are at least.
        patience: how many times as many there may be, while a measurement is unsteady.
        budget: seconds after which no turn is added for the sake of steadiness.
        slice: seconds that a turn lasts, or one step if that is longer.
        threads: for every framework alike, in the tuned profile.
        python, ssh: as in :class:`backends.worker.Worker`, for each backend that needs them.
        time_limit: seconds that one answer may take.
    """

    names: tuple[str, ...]
    workloads: tuple[Workload, ...]
    modes: tuple[Mode, ...]
    limit: float
    asked: tuple[str, ...] = ()
    device: str = "cpu"
    turns: int = TURNS
    patience: int = PATIENCE
    budget: float = BUDGET
    slice: float = SLICE
    threads: int | None = None
    python: dict[str, str] = field(default_factory=dict)
    ssh: dict[str, str] = field(default_factory=dict)
    time_limit: float = 600.0


Told = Callable[[str], None]
"""Called with what is being done."""

Kept = Callable[[dict[str, Any]], None]
"""Called with each entry as soon as it is complete."""


def measure(plan: Plan, done: Sequence[tuple[str, str, str]] = (), keep: Kept = lambda entry: None, tell: Told = lambda text: None) -> None:
    """Measure all that a plan names and that is not done yet.

    Args:
        done: backend, mode and workload of what an earlier run measured.
        keep: called with each entry of the record.
    """
    known = _Known(plan, len(plan.modes) * len(plan.workloads))
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        for mode in plan.modes:
            names = [name for name in plan.names if takes_part(name, mode, known.offered)]
            left = {work: wanted for work in plan.workloads if (wanted := [name for name in names if (name, mode.name, work.name) not in done])}
            known.ahead -= len(plan.workloads) - len(left)
            if not left:
                continue
            with _Team(plan, mode, [name for name in names if any(name in wanted for wanted in left.values())], known, Path(folder), tell) as team:
                for work, wanted in left.items():
                    for entry in team.measure(work, wanted):
                        keep(entry)


def takes_part(name: str, mode: Mode, offered: Mapping[str, Sequence[str]]) -> bool:
    """Whether a backend has anything to do with a mode: not every one has every other's own implementations.

    Args:
        offered: the implementations of backends of which that is known.
    """
    if name in PEERS:
        return mode.implementation == "library" and mode.execution in PEER_EXECUTIONS[name] and mode.profile == "tuned"
    return ":" not in mode.implementation or mode.implementation in offered.get(name, [mode.implementation])


class _Known:
    """What earlier modes of a run have shown, and the time that is left for later ones.

    Attributes:
        ahead: how many workloads, each in one mode, are still to be measured.
        offered: the implementations that each backend said it has.
        imports: seconds that each backend's import took in each profile.
        rates: of bare products, in GFLOP/s: profile and sizes to backend to what it reached.
    """

    def __init__(self, plan: Plan, ahead: int) -> None:
        self.ahead = ahead
        self.end = time.perf_counter() + plan.budget
        self.offered: dict[str, list[str]] = {}
        self.imports: dict[tuple[str, str], float] = {}
        self.rates: dict[tuple[str, tuple[int, ...]], dict[str, list[float]]] = {}

    def share(self) -> float:
        """Return until when the next of the workloads may take: all that are ahead get as much of the time that is left."""
        now = time.perf_counter()
        self.ahead -= 1
        return now + (self.end - now) / (self.ahead + 1)


class _Member:
    """A backend in one mode: its worker, and what is known of it."""

    def __init__(self, name: str, mode: Mode, plan: Plan) -> None:
        self.name, self.mode, self.plan = name, mode, plan
        self.worker: Worker | None = None
        self.failure: tuple[str, str] | None = None
        self.about: dict[str, Any] = {}

    def start(self) -> None:
        plan = self.plan
        try:
            self.worker = backends.open(
                PEERS.get(self.name, self.name),
                plan.device,
                python=plan.python.get(self.name),
                ssh=plan.ssh.get(self.name),
                threads=plan.threads,
                profile=self.mode.profile,
                time_limit=plan.time_limit,
            )
        except WorkerFailure as failure:
            status = "missing" if failure.status == "absent" and self.name in plan.asked else failure.status
            self.failure = status, failure.detail
            return
        self.about = {**self.worker.description}

    def ask(self, operation: str, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Have the worker do something; None if it did not, and :attr:`failure` says why."""
        if self.worker is None:
            return None
        try:
            return self.worker.bench(operation, **asked)
        except Unsupported as reason:
            self.failure = "unsupported", str(reason)
        except SpecError as error:
            self.failure = "refused", error.problems[0]
        except WorkerFailure as failure:
            self.failure = failure.status, failure.detail
            if failure.status != "error":
                self.worker = None
        return None

    def close(self) -> None:
        if self.worker:
            self.worker.close()


class _Team:
    """All backends in one mode, each in a process of its own."""

    def __init__(self, plan: Plan, mode: Mode, names: Sequence[str], known: _Known, folder: Path, tell: Told) -> None:
        self.plan, self.mode, self.known, self.folder, self.tell = plan, mode, known, folder, tell
        self.members = [_Member(name, mode, plan) for name in names]

    def __enter__(self) -> _Team:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        """Start all workers: one after the other if how long their imports take is still to be measured, else together."""
        imports, profile = self.known.imports, self.mode.profile
        for member in self.members:
            if (member.name, profile) not in imports:
                self.tell(f"{self.mode.name}: starting {member.name}")
                member.start()
                if member.worker:
                    imports[member.name, profile] = member.worker.import_seconds
        others = [member for member in self.members if not member.worker and not member.failure]
        self.tell(f"{self.mode.name}: starting {', '.join(member.name for member in others)}")
        with ThreadPoolExecutor(len(others) or 1) as pool:
            for _ in pool.map(_Member.start, others):
                pass
        for member in self.members:
            if member.worker:
                member.about["import_seconds"] = imports[member.name, profile]
                self.known.offered[member.name] = member.about.get("implementations", [])

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.close()

    def measure(self, work: Workload, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Measure one workload on every backend, and yield an entry for each."""
        members, until = [member for member in self.members if member.name in names], self.known.share()
        for sizes in (SQUARE, product_sizes(work)):
            self._products(members, sizes, work.dtype)
        entries = {member.name: self._prepare(member, work) for member in members}
        running = [member for member in members if entries[member.name]["status"] == "measured"]
        for member, turn in self._turns(running, work, until):
            entries[member.name]["turns"].append(turn)
        for member in members:
            entry = entries[member.name]
            if member.failure and entry["status"] == "measured":
                entry |= {"status": member.failure[0], "detail": member.failure[1]}
            member.failure = None if member.worker else member.failure
            member.ask("release")
            rates = [max(self.known.rates.get((self.mode.profile, sizes), {}).get(member.name, [0.0])) for sizes in (SQUARE, product_sizes(work))]
            yield entry | {"product_gflops": max(rates)}

    def _prepare(self, member: _Member, work: Workload) -> dict[str, Any]:
        """Build a program and check what it computes first; nothing is timed that is wrong."""
        self.tell(f"{work.name}, {self.mode.name}: building on {member.name}")
        entry: dict[str, Any] = {"backend": member.name, "mode": self.mode.name, "workload": work.name, **_plain(self.mode), "status": "measured", "detail": "", "turns": []}
        settings = {"implementation": self.mode.implementation, "execution": self.mode.execution, "device": self.plan.device}
        answer = member.ask("prepare", **work.request(), **settings, weights=self._weights(work))
        entry["backend_info"] = member.about
        if answer is None:
            status, detail = member.failure or ("crashed", "")
            member.failure = None if member.worker else member.failure
            return entry | {"status": status, "detail": detail}
        seconds, results = answer
        worst, tensor = truth.expected(work).worst(results, self.plan.limit)
        entry |= {**seconds, "error_in_allowances": worst}
        if not worst <= 1:
            return entry | {"status": "withheld", "detail": f"what it computed is wrong: {tensor} lies {worst:.3g} allowances from the oracle"}
        return entry

    def _weights(self, work: Workload) -> str:
        """Return the file that holds a model's weights, for all modes: drawing them takes longer than reading them."""
        path = self.folder / f"{work.preset.name}.safetensors"
        if not path.exists():
            drawn = initialize(work.preset.config, SEED)
            path.write_bytes(pack({name: array.astype("float32") for name, array in drawn.items()}))  # exact: they are float32 numbers
        return str(path)

    def _products(self, members: Sequence[_Member], sizes: tuple[int, int, int], dtype: str) -> None:
        """Measure the bare product, in turns, once for each size and profile."""
        found = self.known.rates.setdefault((self.mode.profile, sizes), {})
        members = [member for member in members if member.name not in found]
        if not members:
            return
        self.tell(f"{self.mode.name}: matrix product {' x '.join(map(str, sizes))}")
        operations = 2 * sizes[0] * sizes[1] * sizes[2]
        ready = [m for m in members if m.ask("product", sizes=sizes, dtype=dtype, device=self.plan.device)]
        for _ in range(3):
            for member in ready:
                answer = member.ask("repeat", count=1000, seconds=0.15)
                if answer:
                    found.setdefault(member.name, []).append(operations / min(answer[0]["seconds"]) / 1e9)
        for member in members:
            found.setdefault(member.name, [0.0])
            member.failure = None if member.worker else member.failure

    def _turns(self, members: Sequence[_Member], work: Workload, until: float) -> Iterator[tuple[_Member, dict[str, Any]]]:
        """Let backends run in turns: all of them the same number of times, until every one is steady, or patience or time end."""
        steps: dict[str, list[list[float]]] = {member.name: [] for member in members}
        began = time.perf_counter()
        for turn in range(self.plan.turns * self.plan.patience):
            one = (time.perf_counter() - began) / max(turn, 1)
            if turn >= self.plan.turns and (all(settled(steps[m.name]) for m in members if m.worker) or time.perf_counter() + one > until):
                return
            self.tell(f"{work.name}, {self.mode.name}: turn {turn + 1}")
            for member in members:
                before, started = _thread_seconds(member.worker), time.perf_counter()
                answer = member.ask("repeat", count=1000, seconds=self.plan.slice)
                if answer is not None:
                    steps[member.name].append(answer[0]["seconds"])
                    yield member, {**answer[0], "busy_threads": busy_threads(before, _thread_seconds(member.worker), time.perf_counter() - started)}


def _plain(mode: Mode) -> dict[str, str]:
    return {"implementation": mode.implementation, "execution": mode.execution, "profile": mode.profile}


def busy_threads(before: Mapping[int, float], after: Mapping[int, float], elapsed: float) -> int | None:
    """Return how many threads computed most of the time. None: nothing is known of them, for they are elsewhere.

    Args:
        before, after: thread to the seconds that it has computed.
        elapsed: seconds between the two.
    """
    return sum(seconds - before.get(thread, 0.0) > BUSY * elapsed for thread, seconds in after.items()) if after else None


def _thread_seconds(worker: Worker | None) -> dict[int, float]:
    """Return how long each thread of a worker has computed."""
    if worker is None or not worker.local or worker.pid is None:
        return {}
    try:
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(worker.pid).threads()}
    except psutil.Error:
        return {}
