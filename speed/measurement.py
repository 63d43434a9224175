"""The measurement: backends take turns, so that a drifting machine favours none."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from concord.backends.pool import Pool
from concord.backends.wire import WorkerFailure
from concord.conformance.run.campaign import Setup, failure_of
from concord.spec.arrays import Array
from concord.spec.parameters import initialize
from concord.speed import truth
from concord.speed.peers import PEERS
from concord.speed.presets import SEED, Workload
from concord.speed.statistics import median, settled
from concord.speed.table import seconds
from concord.speed.work import product_sizes

# Sizes at which every framework reaches its best rate, by kind of device.
SQUARE = {"cpu": (2048, 2048, 2048), "cuda": (8192, 8192, 8192)}

PRODUCT_TURNS, PRODUCT_SECONDS = 3, 0.15  # for each bare product

Tell = Callable[[str], None]

Sizes = tuple[int, int, int]

Keep = Callable[[dict[str, Any]], None]


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

    names: Sequence[str]
    workloads: tuple[Workload, ...]
    modes: tuple[tuple[Mode, ...], ...]  # the programs of a group of modes are all built before their turns
    settings: Setup
    turns: int = 3  # minimum; up to ``patience`` times as many if a measurement is unsteady
    patience: int = 3
    budget: float | None = None  # seconds after which no workload or turn starts
    square: bool = True  # whether to measure a large square product in addition to one of the model's size
    slice: float = 0.3  # seconds per turn, or one step if that is longer


def measure(plan: SpeedPlan, keep: Keep = lambda entry: None, tell: Tell = lambda text: None) -> bool:
    """Measure a plan, and return whether the budget sufficed.

    Args:
        keep: takes each entry, as soon as it has a figure and whenever it has more.
    """
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        measurement = Measurement(plan, keep, tell, Path(folder))
        # The fastest peer so far takes turns with each later group, so the group with most peers is first.
        return all(map(measurement.measure_group, sorted(plan.modes, key=peers_in, reverse=True)))


def peers_in(modes: Sequence[Mode]) -> int:
    """The number of measurements of peers in a group."""
    return sum(takes_part(name, mode, {}) for name in PEERS for mode in modes)


def takes_part(name: str, mode: Mode, offered: Mapping[str, Sequence[str]]) -> bool:
    """Whether a backend supports a mode; ``offered`` are known implementations."""
    if name in PEERS:
        return mode.name in PEERS[name].modes
    # A name with a colon is a backend's own implementation, such as library:onednn.
    return ":" not in mode.implementation or mode.implementation in offered.get(name, [mode.implementation])


class Member:
    """A backend in one mode, in its own process."""

    def __init__(self, name: str, mode: Mode, settings: Setup, pool: Pool) -> None:
        self.name, self.mode, self.settings = name, mode, settings
        self.description: dict[str, Any] = {}  # remains empty if it does not start
        self.entry: dict[str, Any] = {}  # entry of the current workload
        # No restarts: between turns, a new process would have to build, compile and be checked.
        self.supervisor = pool.supervise(
            partial(settings.open, PEERS[name].plugin if name in PEERS else name, profile="tuned"), restarts=0
        )

    def start(self) -> None:
        """Start the process; if that fails, :meth:`ask` reports why."""
        with contextlib.suppress(WorkerFailure):
            self.description = {**self.supervisor.get().description}

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Call an operation of :class:`concord.backends.bench.Bench`; None: the entry records its failure."""
        try:
            return self.supervisor.do(lambda worker: worker.bench(operation, **arguments))
        except Exception as error:
            if not (failure := failure_of(error)):
                raise
            status, detail, _ = failure
            self.entry |= {"status": self.settings.status_of(self.name, status), "detail": detail}
            return None


class Measurement:
    """All backends and peers on all workloads."""

    def __init__(self, plan: SpeedPlan, keep: Keep, tell: Tell, folder: Path) -> None:
        self.plan, self.keep, self.tell = plan, keep, tell
        self.folder = folder  # of the weights
        self.deadline = math.inf if plan.budget is None else time.perf_counter() + plan.budget
        self.device = plan.settings.device
        self.once = Lock()  # weights and expectations are computed by one thread, for all
        self.offered: dict[str, list[str]] = {}
        # GFLOP/s by backend, sizes and dtype: a bare product has no mode.
        self.rates: dict[tuple[str, Sizes, str], float] = {}
        self.fastest: dict[str, tuple[str, Mode]] = {}  # peer so far, by workload

    def measure_group(self, modes: Sequence[Mode]) -> bool:
        """Measure each workload in a group of modes, and return whether the budget sufficed."""
        self.label = ", ".join(mode.name for mode in modes)
        group = [
            (name, mode) for mode in modes for name in self.plan.names if takes_part(name, mode, self.offered)
        ]
        programs = dict.fromkeys([*group, *self.fastest.values()])
        with Pool(len(programs)) as self.pool:
            self.members = [Member(*program, self.plan.settings, self.pool) for program in programs]
            self.tell(f"{self.label}: starting {len(self.members)} processes")
            self.pool.map(Member.start, self.members)
            self.offered |= {
                member.name: member.description.get("implementations", [])
                for member in self.members
                if member.description
            }
            self.members = [
                member for member in self.members if takes_part(member.name, member.mode, self.offered)
            ]
            for work in self.plan.workloads:
                if time.perf_counter() > self.deadline:
                    return False
                self._measure(work)
        return True

    def _measure(self, work: Workload) -> None:
        for member in self.members:
            member.entry = {
                "backend": member.name,
                "mode": member.mode.name,
                "workload": work.name,
                **asdict(member.mode),
                "status": "measured",
                "detail": "",
                "turns": [],
                "backend_info": member.description,
            }
        prepare = partial(self._prepare, work)
        if self.device == "cpu":  # there, programs that compile at once would share the cores
            for member in self.members:
                prepare(member)
        else:
            self.pool.map(prepare, self.members)
        self._take_turns(work)
        steps = {
            member: median([turn["seconds"] for turn in member.entry["turns"]]) for member in self._running()
        }
        peer = min((member for member in steps if member.name in PEERS), key=steps.__getitem__, default=None)
        if peer:
            self.fastest[work.name] = peer.name, peer.mode
        for member, step in steps.items():
            member.entry["peer_seconds"] = peer and steps[peer]
            self.tell(f"{work.name}, {member.mode.name}: {member.name} takes {seconds(step)}")
        entries = [member.entry for member in self.members]
        for member in self.members:
            member.entry = {}  # what happens from here on changes no result
        # A share of this machine's measured rate is more informative than a share of a data sheet's rate
        # (decision 0012).
        sizes = [product_sizes(work)]
        if self.plan.square and time.perf_counter() < self.deadline:
            sizes.append(SQUARE[self.device.partition(":")[0]])
        for size in sizes:
            self._measure_product(size, work)
        for entry in entries:
            rates = (self.rates.get((entry["backend"], size, work.dtype), 0.0) for size in sizes)
            self.keep({**entry, "product_gflops": max(rates)})
        for member in self.members:
            member.ask("release")

    def _measure_product(self, sizes: Sizes, work: Workload) -> None:
        members = {
            key: member
            for member in self.members
            if (key := (member.name, sizes, work.dtype)) not in self.rates
        }
        if not members:
            return
        self.tell(f"{self.label}: matrix product {' x '.join(map(str, sizes))}")
        settings = {**work.settings, "sizes": sizes, "device": self.device}
        ready = [key for key, member in members.items() if member.ask("product", **settings)]
        self.rates |= dict.fromkeys(members, 0.0)
        for key in ready * PRODUCT_TURNS:
            if answer := members[key].ask("repeat", seconds=PRODUCT_SECONDS):
                # As for steps, use the rate sustained over a turn, not that of a lucky moment.
                rate = 2 * math.prod(sizes) / median([answer["seconds"]]) / 1e9
                self.rates[key] = max(self.rates[key], rate)

    def _prepare(self, work: Workload, member: Member) -> None:
        self.tell(f"{work.name}, {member.mode.name}: preparing {member.name}")
        checked = truth.program(work)
        options = {**asdict(member.mode), "device": self.device}
        # Judge before timing, since the speed of a wrong program is useless (decision 0012).
        for part in dict.fromkeys((checked, work)):
            with self.once:
                weights = self._weights(part)
            answer = member.ask("prepare", request=part.request(**options), weights=weights)
            if answer is None:
                return
            seconds, results = answer
            if part == checked:
                with self.once:
                    member.entry |= judged(checked, results)
                if member.entry["status"] != "measured":
                    return
            member.entry |= seconds

    def _weights(self, work: Workload) -> str:
        config = work.preset.config
        # In a file, since generating weights takes longer than reading them, and each mode needs them again.
        path = self.folder / f"{hash(config)}.safetensors"
        if not path.exists():
            weights = initialize(config, SEED)  # already float32 values, so the file rounds nothing
            save_file(
                {name: np.asarray(array, np.float32, order="C") for name, array in weights.items()}, path
            )
        return str(path)

    def _take_turns(self, work: Workload) -> None:
        self.tell(f"{work.name}, {self.label}: warming up")
        for member in self._running():
            # A first step as long as a turn suffices as warm-up, unless it includes compilation.
            compiled = member.mode.execution.endswith("compiled")
            if compiled or member.entry["first_seconds"] < self.plan.slice:
                member.ask("repeat", seconds=self.plan.slice)
        for turn in range(self.plan.turns * self.plan.patience):
            running = self._running()
            # All backends get the same number of turns, so that temporary noise affects all of them.
            steady = all(settled([turn["seconds"] for turn in member.entry["turns"]]) for member in running)
            if turn >= self.plan.turns and (steady or time.perf_counter() > self.deadline):
                return
            self.tell(f"{work.name}, {self.label}: turn {turn + 1}")
            for member in running:
                if answer := member.ask("repeat", seconds=self.plan.slice):
                    member.entry["turns"].append(answer)
                self.keep(member.entry)

    def _running(self) -> list[Member]:
        return [member for member in self.members if member.entry["status"] == "measured"]


def judged(work: Workload, results: Mapping[str, Array]) -> dict[str, Any]:
    """An entry's status and error in tolerances."""
    expected = truth.expected(work)
    logits, batch = results.get("logits"), work.preset.batch
    if logits is not None and logits.shape[:1] == (batch,):
        results = {**results, "logits": logits[: len(expected.values["logits"])]}
    verdict = truth.judge(expected, results)
    nearest = verdict.nearest
    entry = {
        "checked_samples": truth.judged_samples(work),
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
