"""What runs of training came to: a table, and curves of loss and accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from concord.spec.errors import collect
from concord.spec.files import read_as
from concord.training import checkpoint, figures
from concord.training.checkpoint import Best
from concord.training.log import read_log
from concord.training.ordinary import RESULT

Logs = Mapping[str, Sequence[Mapping[str, Any]]]

PANELS = {
    "loss": (("loss", "loss", "-"), ("dev_loss", "dev loss", "--")),
    "accuracy": (("dev_accuracy", "dev accuracy", "-"),),
}
"""What is drawn beside each other: column of the log, its name, and the line."""


def of_runs(runs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the logs of runs, by the shortest names that tell them apart.

    Raises:
        SpecError: listing every folder that has no log.
    """
    alike = Counter(run.name for run in runs)
    logs = collect(*(partial(read_log, run) for run in runs))
    return {run.name if alike[run.name] == 1 else str(run): log for run, log in zip(runs, logs, strict=True)}


def figure(logs: Logs, panels: Sequence[str] = tuple(PANELS), width: float = 9.0) -> str:
    """Return loss and accuracy by step, several runs over each other.

    Args:
        logs: of each run, the lines of its log.
        panels: some of :data:`PANELS`, side by side.

    Raises:
        SpecError: if matplotlib is not installed.
    """

    def paint(made: Any) -> None:
        for axes, title in zip(made.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name, (colour, _) in figures.sequence(list(logs)).items():
                for column, words, style in PANELS[title]:
                    points = [(row["step"], row[column]) for row in logs[name] if row.get(column) is not None]
                    if points:
                        axes.plot(
                            *zip(*points, strict=True),
                            style,
                            color=colour,
                            label=f"{name}: {words}",
                            linewidth=1.2,
                            marker="." if len(points) == 1 else None,
                        )
            axes.set(title=title, xlabel="step")
            axes.grid(True)
            if axes.lines:
                axes.legend()

    return figures.draw(paint, width, 3.3)


@dataclass(frozen=True)
class Summary:
    """What a run came to in few figures; None for what is not known."""

    backend: str
    parameters: int
    steps: int
    epochs: int
    seconds: float
    tokens_per_second: float | None
    memory_mib: float | None
    best: Best | None
    test: Best | None
    ended: str

    def row(self, name: str) -> list[str]:
        """Return the figures of a run as text, one for each of :data:`HEADINGS`."""

        def share(found: Best | None) -> str:
            return f"{100 * found.accuracy:.2f} %" if found else "–"

        rates = (
            f"{value:,.0f}".replace(",", " ") if value is not None else "–"
            for value in (self.tokens_per_second, self.memory_mib)
        )
        parameters = f"{self.parameters:,}".replace(",", " ")
        return [
            name,
            self.backend,
            parameters,
            str(self.steps),
            f"{self.epochs}",
            f"{self.seconds:.0f}",
            *rates,
            share(self.best),
            f"{self.best.step}" if self.best else "–",
            share(self.test),
            self.ended,
        ]


HEADINGS = (
    "run",
    "backend",
    "parameters",
    "steps",
    "epochs",
    "seconds",
    "tokens/s",
    "MiB",
    "best dev accuracy",
    "at step",
    "test accuracy",
    "ended by",
)
LESS = ("ended by", "MiB", "epochs", "parameters", "tokens/s", "at step", "seconds")
"""Of these, what a narrow terminal goes without, the first first."""


def summary(run: Path, log: Sequence[Mapping[str, Any]]) -> Summary:
    """Return what a run came to.

    Raises:
        SpecError: if it has no checkpoint that can be read.
    """
    model = checkpoint.read(run, "last")
    progress, plan = model.progress, model.progress.plan
    rates, sizes = (
        [row[name] for row in log if row.get(name) is not None]
        for name in ("tokens_per_second", "memory_mib")
    )
    return Summary(
        backend=plan.backend if plan else "–",
        parameters=sum(array.size for array in model.weights.values()),
        steps=progress.step,
        epochs=progress.epoch,
        seconds=progress.seconds,
        tokens_per_second=median(rates) if rates else None,
        memory_mib=max(sizes, default=None),
        best=progress.best,
        test=read_as(run / RESULT, Best) if (run / RESULT).exists() else None,
        ended=progress.ended or "not over",
    )


def summaries(runs: Sequence[Path]) -> dict[str, Summary]:
    """Return what runs came to, by name.

    Raises:
        SpecError: as :func:`of_runs` and :func:`summary` do.
    """
    return {name: summary(run, log) for run, (name, log) in zip(runs, of_runs(runs).items(), strict=True)}
