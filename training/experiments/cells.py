"""An experiment as cells, each an ordinary run of training: what is finished is kept, and what was begun goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from concord.backends.interface import Unsupported
from concord.backends.pool import Pool, Seat
from concord.backends.worker import Worker, WorkerFailure
from concord.conformance.campaign import Settings
from concord.conformance.fuzz.sets import Dask, dask
from concord.spec import runs
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import read_json, write_text
from concord.spec.training.recipe import Recipe
from concord.training import checkpoint
from concord.training.beginning import Texts, again, begin, source
from concord.training.checkpoint import Best
from concord.training.curves import summary
from concord.training.log import read_log
from concord.training.ordinary import RESULT, fit
from concord.training.plan import Plan

DESCRIPTION = "experiment.json"

Halted = Callable[[], bool]

Reached = Callable[[str, int, str], None]
"""Called with who is at work, how many cells are done, and what was done last."""

GLANCE = 2.0
"""Seconds between two looks at a cluster."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment.

    Attributes:
        way: the name of its model.
        seed: what weights, order and dropout follow from.
        config: of the model; vocabulary and classes become those of the data.
        folder: of the run.
    """

    way: str
    seed: int
    config: EncoderConfig
    folder: Path

    @property
    def name(self) -> str:
        """A name for progress."""
        return f"{self.way}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    """What a cell came to.

    Attributes:
        status: ``"done"``, ``"halted"``, or why there is no result.
        detail: one line of explanation.
        dev, test: the best evaluation, and what the best model does on the test samples.
        curve: for each evaluation its step, loss and accuracy.
    """

    way: str
    seed: int
    status: str
    detail: str = ""
    parameters: int = 0
    steps: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    dev: Best | None = None
    test: Best | None = None
    curve: tuple[tuple[int, float, float], ...] = ()


Take = Callable[[Trained], None]
"""Called with what each cell came to."""


@dataclass(frozen=True)
class Experiment:
    """What is compared, and how each model is trained.

    Attributes:
        name: one of :data:`concord.training.experiments.ways.EXPERIMENTS`.
        ways: the models by name.
        seeds: how many runs each has, from seed 0 on.
        out: the folder of all runs.
    """

    name: str
    ways: Mapping[str, EncoderConfig]
    seeds: int
    recipe: Recipe
    plan: Plan
    texts: Texts
    out: Path

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise SpecError(f"--seeds is {self.seeds} but must be at least 1")
        if self.plan.files is None or self.plan.files.dev is None:
            raise SpecError(
                "there are no samples to evaluate on: give --data a folder with train and dev, or --dev"
            )

    def cells(self) -> list[Cell]:
        """Return the cells: every model once, then every model again with the next seed."""
        return [
            Cell(way, seed, config, self.out / f"{_plain(way)}-seed-{seed}")
            for seed in range(self.seeds)
            for way, config in self.ways.items()
        ]

    def claim(self) -> None:
        """Note what is in the folder, or make sure that it is the same experiment; the number of seeds may change.

        Raises:
            SpecError: if it holds another one, or cannot be written.
        """
        plain = {
            "experiment": self.name, "ways": {way: config.as_dict() for way, config in self.ways.items()}, "recipe": self.recipe.as_dict(),
            "plan": {name: value for name, value in dataclasses.asdict(self.plan).items() if name != "threads"},
            "texts": {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self.texts).items()},
        }  # fmt: skip
        plain = json.loads(json.dumps(plain))
        path = self.out / DESCRIPTION
        if not path.exists():
            self.out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(plain, indent=1) + "\n")
            return
        found = read_json(path)
        if found != plain:
            other = [key for key in plain if not isinstance(found, dict) or found.get(key) != plain[key]]
            raise SpecError(
                f"{path}: describes another experiment: {', '.join(other)} differ{'s' if len(other) == 1 else ''}; give another --out, or the same options"
            )


def _plain(way: str) -> str:
    return "".join(sign if sign.isalnum() or sign == "-" else "-" for sign in way).replace("--", "-")


def outcome(cell: Cell) -> Trained | None:
    """Return what a cell came to, if it has been begun.

    Raises:
        SpecError: if its files are corrupt.
    """
    if not runs.steps(cell.folder):
        return None
    log = read_log(cell.folder)
    found = summary(cell.folder, log)
    over = found.ended != "not over"
    curve = tuple(
        (int(row["step"]), float(row["dev_loss"]), float(row["dev_accuracy"]))
        for row in log
        if row.get("dev_loss") is not None
    )
    return Trained(
        cell.way,
        cell.seed,
        "done" if over else "halted",
        "" if over else f"after {found.steps} steps",
        found.parameters,
        found.steps,
        found.seconds,
        found.tokens_per_second,
        found.best,
        found.test,
        curve,
    )


def finished(experiment: Experiment, cell: Cell) -> bool:
    """Return whether a cell needs nothing more."""
    found = outcome(cell)
    tested = (
        experiment.plan.files is None or experiment.plan.files.test is None or (cell.folder / RESULT).exists()
    )
    return found is not None and found.status == "done" and tested


def train(experiment: Experiment, cell: Cell, worker: Worker, halted: Halted = lambda: False) -> None:
    """Train a cell, from where it has come to.

    Raises:
        SpecError, WorkerFailure, Unsupported: as :func:`concord.training.ordinary.fit` does.
    """
    if runs.steps(cell.folder):
        start = checkpoint.read(cell.folder, "last")
        corpora = again(start)
    else:
        start, corpora = begin(cell.config, experiment.recipe, experiment.plan, experiment.texts, cell.seed)
        cell.folder.mkdir(parents=True, exist_ok=True)
    fit(worker, start, source(start, corpora), cell.folder, halted)


def attempt(experiment: Experiment, cell: Cell, seat: Seat, halted: Halted = lambda: False) -> Trained:
    """Train a cell on a seat, if it is not finished; what fails is a result too."""
    try:
        if not finished(experiment, cell):
            if halted():
                return outcome(cell) or Trained(cell.way, cell.seed, "halted", "not begun")
            seat.do(lambda worker: train(experiment, cell, worker, halted))
        found = outcome(cell)
        assert found is not None
        return found
    except Unsupported as reason:
        return Trained(cell.way, cell.seed, "unsupported", str(reason))
    except SpecError as error:
        return Trained(cell.way, cell.seed, "refused", error.problems[0])
    except WorkerFailure as failure:
        return Trained(cell.way, cell.seed, failure.status, failure.detail)


def conduct(
    experiment: Experiment,
    settings: Settings,
    parallel: int = 1,
    scheduler: str | None = None,
    reached: Reached = lambda name, done, now: None,
    halted: Halted = lambda: False,
) -> list[Trained]:
    """Train every cell, and return what each came to, in their order.

    Args:
        settings: of workers.
        parallel: cells at a time, each in a worker of its own.
        scheduler: of Dask, in place of this machine; its workers have to see the same files under the same names.
        halted: asked now and then; once it says True, what is under way is kept as far as it has come, and nothing else is begun.

    Raises:
        SpecError: if the folder holds another experiment, or no scheduler answers.
    """
    experiment.claim()
    cells, found, busy = experiment.cells(), dict[tuple[str, int], Trained](), threading.Lock()
    reached(experiment.name, 0, "")

    def take(trained: Trained) -> None:
        with busy:
            found[trained.way, trained.seed] = trained
            reached(experiment.name, len(found), f"{trained.way}, seed {trained.seed}: {trained.status}")

    if scheduler is not None:
        _on_dask(experiment, cells, settings, scheduler, take, halted)
    else:
        _here(experiment, cells, settings, min(parallel, len(cells)), take, halted)
    return [found[cell.way, cell.seed] for cell in cells]


def _here(
    experiment: Experiment, cells: list[Cell], settings: Settings, width: int, take: Take, halted: Halted
) -> None:
    """Train cells, so many at a time, on a pool of workers that go from one to the next."""
    how = replace(settings, threads=settings.threads or max(1, (os.cpu_count() or 1) // width))
    waiting = SimpleQueue[Cell]()
    for cell in cells:
        waiting.put(cell)

    def work(seat: Seat) -> None:
        with suppress(Empty):
            while not pool.stopped:
                cell = waiting.get_nowait()
                seat.refresh()
                take(attempt(experiment, cell, seat, lambda: pool.stopped or halted()))

    with Pool(width) as pool:
        pool.map(work, [pool.seat(partial(how.open, experiment.plan.backend)) for _ in range(width)])


def _on_dask(
    experiment: Experiment, cells: list[Cell], settings: Settings, scheduler: str, take: Take, halted: Halted
) -> None:
    """Train cells on a cluster."""
    place = Dask(scheduler, settings)
    try:
        pending: set[Future[Trained]] = {
            place.executor.submit(_in_cluster, experiment, cell, settings, place.event) for cell in cells
        }
        while pending:
            # In short waits: Ctrl-C does not wake a thread that waits without end, if another one gets the signal.
            done, pending = wait(pending, timeout=GLANCE, return_when=FIRST_COMPLETED)
            for one in done:
                take(one.result())
            if halted():
                place.halt()
    finally:
        place.halt()
        place.close()


def _in_cluster(experiment: Experiment, cell: Cell, settings: Settings, event: str) -> Trained:
    asked = [0.0, False]

    def halted() -> bool:
        if time.monotonic() - asked[0] > GLANCE:
            asked[:] = [time.monotonic(), dask().Event(event).is_set()]
        return bool(asked[1])

    seat = Seat(partial(settings.open, experiment.plan.backend))
    try:
        return attempt(experiment, cell, seat, halted)
    finally:
        seat.close()
