"""The measurement: backends take turns, so that a drifting machine favours none."""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from concord.backends import machine
from concord.backends.interface import Unsupported
from concord.backends.pool import Pool
from concord.backends.wire import WorkerFailure
from concord.conformance.run.campaign import Setup
from concord.spec.arrays import Array
from concord.spec.errors import SpecError
from concord.spec.parameters import initialize
from concord.speed import truth
from concord.speed.peers import PEER_EXECUTIONS, PEERS
from concord.speed.presets import SEED, Workload
from concord.speed.statistics import median, settled
from concord.speed.work import product_sizes

# Sizes at which every framework reaches its best rate, by kind of device.
SQUARE = {"cpu": (2048, 2048, 2048), "cuda": (8192, 8192, 8192)}

PRODUCT_TURNS, PRODUCT_SECONDS = 3, 0.15  # for each bare product

Tell = Callable[[str], None]

Sizes = tuple[int, int, int]

Rates = dict[tuple[str, Sizes, str], float]  # GFLOP/s by backend, sizes and precision


@dataclass(frozen=True)
class Mode:
    """Implementation and execution, as in :class:`concord.backends.interface.Request`."""

    implementation: str = "library"
    execution: str = "eager"

    @property
    def name(self) -> str:
        """The name in tables and records."""
        return f"{self.implementation} {self.execution}"


@dataclass(frozen=True)
class SpeedPlan:
    """Workloads to measure in each mode on each backend and peer."""

    names: tuple[str, ...]
    workloads: tuple[Workload, ...]
    modes: tuple[Mode, ...]
    settings: Setup = field(default_factory=Setup)
    turns: int = 3  # minimum; up to ``patience`` times as many if a measurement is unsteady
    patience: int = 3
    budget: float | None = None  # seconds after which no workload or turn starts
    square: bool = True  # whether to measure a large square product in addition to one of the model's size
    slice: float = 0.3  # seconds per turn, or one step if that is longer


def measure(
    plan: SpeedPlan,
    keep: Callable[[dict[str, Any]], None] = lambda entry: None,
    tell: Tell = lambda text: None,
) -> bool:
    """Measure a plan, and return whether the budget sufficed."""
    deadline = math.inf if plan.budget is None else time.perf_counter() + plan.budget
    offered: dict[str, list[str]] = {}
    rates: Rates = {}
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        for mode in plan.modes:
            names = [name for name in plan.names if takes_part(name, mode, offered)]
            with Pool(len(names) or 1) as pool:
                tell(f"{mode.name}: starting {', '.join(names)}")
                members = [Member(name, plan.settings, pool) for name in names]
                pool.map(Member.start, members)
                for member in members:
                    if member.description:
                        offered[member.name] = member.description.get("implementations", [])
                team = Team(plan, mode, members, rates, Path(folder), tell)
                for work in plan.workloads:
                    if time.perf_counter() > deadline:
                        return False
                    for entry in team.measure(work, deadline):
                        keep(entry)
    return True


def takes_part(name: str, mode: Mode, offered: Mapping[str, Sequence[str]]) -> bool:
    """Whether a backend supports a mode; ``offered`` are known implementations."""
    if name in PEERS:
        return mode.implementation == "library" and mode.execution in PEER_EXECUTIONS[name]
    # A name with a colon is a backend's own implementation, such as library:onednn.
    return ":" not in mode.implementation or mode.implementation in offered.get(name, [mode.implementation])


def rules_of(work: Workload, settings: Setup, description: Mapping[str, Any]) -> str | None:
    """The precision whose rounding is allowed, if different from the workload's: TF32 on a GPU."""
    if work.dtype != "float32" or settings.device == "cpu":
        return None
    products = description.get("precision_defaults", {}).get("products", {}).get("cuda")
    return "tf32" if "tf32" in (settings.precision, settings.precision == "default" and products) else None


class Member:
    """A backend in one mode, in its own process."""

    def __init__(self, name: str, settings: Setup, pool: Pool) -> None:
        self.name, self.settings = name, settings
        self.description: dict[str, Any] = {}  # remains empty if it does not start
        self.entry: dict[str, Any] = {}  # entry of the current workload
        # No restarts: between turns, a new process would have to build, compile and be checked.
        self.supervisor = pool.supervise(
            partial(settings.open, PEERS.get(name, name), profile="tuned"), restarts=0
        )

    def start(self) -> None:
        """Start the process; if that fails, :meth:`ask` reports why."""
        with contextlib.suppress(WorkerFailure):
            self.description = {**self.supervisor.get().description}

    def ask(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Array]] | None:
        """Call an operation of :class:`concord.backends.bench.Bench`; the entry records a failure."""
        try:
            return self.supervisor.do(lambda worker: worker.bench(operation, **arguments))
        except Unsupported as reason:
            failure = "unsupported", str(reason)
        except SpecError as error:
            failure = "refused", error.problems[0]
        except WorkerFailure as error:
            failure = self.settings.status_of(self.name, error.status), error.detail
        self.entry["status"], self.entry["detail"] = failure
        return None

    def repeat(self, seconds: float) -> dict[str, Any] | None:
        """Run steps for one turn."""
        before, started = self._processor_seconds(), time.perf_counter()
        answer = self.ask("repeat", count=1000, seconds=seconds)
        busy = busy_cores(before, self._processor_seconds(), time.perf_counter() - started)
        self.rest()
        return {**answer[0], "busy_cores": busy} if answer else None

    def rest(self) -> None:
        """Wait until the process is idle."""
        # PaddlePaddle's MKL keeps a core busy for 0.2 s after each step, which slows down the next backend
        # (decision 0012).
        worker = self.supervisor.worker
        if worker and worker.pid is not None:
            machine.wait_for_rest(worker.pid)

    def _processor_seconds(self) -> float | None:
        worker = self.supervisor.worker
        return machine.processor_seconds(worker.pid) if worker and worker.pid is not None else None


def busy_cores(before: float | None, after: float | None, elapsed: float) -> float | None:
    """Number of busy cores of a process, from CPU times."""
    return None if before is None or after is None or elapsed <= 0 else (after - before) / elapsed


@dataclass
class Team:
    """All backends in one mode."""

    plan: SpeedPlan
    mode: Mode
    members: list[Member]
    rates: Rates  # shared by all modes, since a bare product has no mode
    folder: Path  # of the weights
    tell: Tell

    def measure(self, work: Workload, deadline: float) -> list[dict[str, Any]]:
        """Measure a workload on every backend; return their entries."""
        device = self.plan.settings.device.partition(":")[0]
        # A share of this machine's measured rate is more informative than a share of a data sheet's rate
        # (decision 0012).
        sizes = [product_sizes(work), *([SQUARE[device]] if self.plan.square else [])]
        for size in sizes:
            self._measure_product(size, work.dtype)
        for member in self.members:
            member.entry = {
                "backend": member.name,
                "mode": self.mode.name,
                "workload": work.name,
                **asdict(self.mode),
                "status": "measured",
                "detail": "",
                "turns": [],
                "backend_info": member.description,
                "product_gflops": max(self.rates[member.name, size, work.dtype] for size in sizes),
            }
        for member in self.members:
            self._prepare(member, work)
        self._take_turns(work, deadline)
        entries = [member.entry for member in self.members]
        for member in self.members:
            member.entry = {}
            member.ask("release")
        return entries

    def _measure_product(self, sizes: Sizes, dtype: str) -> None:
        members = [member for member in self.members if (member.name, sizes, dtype) not in self.rates]
        if not members:
            return
        self.tell(f"{self.mode.name}: matrix product {' x '.join(map(str, sizes))}")
        self.rates |= {(member.name, sizes, dtype): 0.0 for member in members}
        settings = {
            "dtype": dtype,
            "device": self.plan.settings.device,
            "precision": self.plan.settings.precision,
        }
        ready = [member for member in members if member.ask("product", sizes=sizes, **settings)]
        for _ in range(PRODUCT_TURNS):
            for member in ready:
                if answer := member.repeat(PRODUCT_SECONDS):
                    # As for steps, use the rate sustained over a turn, not that of a lucky moment.
                    rate = 2 * math.prod(sizes) / median([answer["seconds"]]) / 1e9
                    key = member.name, sizes, dtype
                    self.rates[key] = max(self.rates[key], rate)

    def _prepare(self, member: Member, work: Workload) -> None:
        self.tell(f"{work.name}, {self.mode.name}: preparing {member.name}")
        settings, checked = self.plan.settings, truth.probe(work)
        options = {**asdict(self.mode), "device": settings.device, "precision": settings.precision}
        # Judge before timing, since the speed of a wrong program is useless (decision 0012).
        for part in dict.fromkeys((checked, work)):
            answer = member.ask("prepare", request=part.request(**options), weights=self._weights(part))
            if answer is None:
                return
            seconds, results = answer
            if part == checked:
                member.entry |= judged(checked, rules_of(checked, settings, member.description), results)
                if member.entry["status"] != "measured":
                    return
            member.entry |= seconds
        member.rest()

    def _weights(self, work: Workload) -> str:
        config = work.preset.config
        # In a file, since generating weights takes longer than reading them, and each mode needs them again.
        path = self.folder / f"{hashlib.sha256(config.to_toml().encode()).hexdigest()}.safetensors"
        if not path.exists():
            weights = initialize(config, SEED)  # already float32 values, so the file rounds nothing
            save_file(
                {name: np.asarray(array, np.float32, order="C") for name, array in weights.items()}, path
            )
        return str(path)

    def _take_turns(self, work: Workload, deadline: float) -> None:
        where = f"{work.name}, {self.mode.name}"
        self.tell(f"{where}: warming up")
        for member in self._running():
            # A first step as long as a turn suffices as warm-up, unless it includes compilation.
            if member.entry["first_seconds"] < self.plan.slice or self.mode.execution.endswith("compiled"):
                member.repeat(self.plan.slice)
        for turn in range(self.plan.turns * self.plan.patience):
            running = self._running()
            # All backends get the same number of turns, so that temporary noise affects all of them.
            steady = all(settled([turn["seconds"] for turn in member.entry["turns"]]) for member in running)
            if turn >= self.plan.turns and (steady or time.perf_counter() > deadline):
                return
            self.tell(f"{where}: turn {turn + 1}")
            for member in running:
                if answer := member.repeat(self.plan.slice):
                    member.entry["turns"].append(answer)

    def _running(self) -> list[Member]:
        return [member for member in self.members if member.entry["status"] == "measured"]


def judged(work: Workload, rules: str | None, results: Mapping[str, Array]) -> dict[str, Any]:
    """An entry's status and error in tolerances."""
    verdict = truth.judge(truth.expected(work, rules), results)
    nearest = verdict.nearest
    entry = {
        "checked_samples": work.preset.batch,
        "error_in_tolerances": nearest.ratio if nearest else math.nan,
    }
    if verdict.status == "undetermined":
        tensor = next(row.tensor for row in verdict.table if row.status == verdict.status)
        detail = f"its results were not judged: {work.dtype} does not determine {tensor}"
        return entry | {"status": "undetermined", "detail": detail}
    if nearest and not verdict.passed:
        wrong = f"{nearest.tensor} is {nearest.ratio:.3g} tolerances from the reference"
        return entry | {"status": "withheld", "detail": f"its results are wrong: {wrong}"}
    return entry
