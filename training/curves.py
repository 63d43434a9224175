"""What runs of training came to: a table, and curves of loss, accuracy and learning rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from concord.spec.errors import collect
from concord.training import checkpoint, figures
from concord.training.log import read_log

PANELS = {
    "loss": {"loss": "loss", "dev_loss": "dev loss"},
    "accuracy": {"dev_accuracy": "dev accuracy"},
    "learning rate": {"learning_rate": "learning rate"},
}
"""What is drawn beside each other: columns of the log, and their names."""


def of_runs(runs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the logs of runs, by the shortest names that tell them apart.

    Raises:
        SpecError: listing every folder that has no log.
    """
    alike = Counter(run.name for run in runs)
    logs = collect(*(partial(read_log, run) for run in runs))
    return {run.name if alike[run.name] == 1 else str(run): log for run, log in zip(runs, logs, strict=True)}


def figure(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return loss, accuracy and learning rate by step, several runs over each other.

    Args:
        logs: of each run, the lines of its log.

    Raises:
        SpecError: if matplotlib is not installed.
    """

    def paint(made: Any) -> None:
        for axes, (title, columns) in zip(made.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            for name, log in logs.items():
                for column, words in columns.items():
                    points = [(row["step"], row[column]) for row in log if row.get(column) is not None]
                    if points:
                        axes.plot(*zip(*points, strict=True), label=f"{name}: {words}", marker=".")
            axes.set(title=title, xlabel="step")
            axes.grid(True)
            if axes.lines:
                axes.legend()

    return figures.draw(paint, 12.0, 3.3)


LESS = ("ended by", "MiB", "epochs", "parameters", "tokens/s", "at step", "seconds")
"""Of what is said of a run, what a narrow terminal goes without, the first first."""


def row(run: Path, name: str, log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what a run came to, by heading.

    Raises:
        SpecError: if it has no checkpoint that can be read.
    """
    model = checkpoint.read(run, "last")
    done, plan = model.progress, model.progress.plan

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:,.0f}"

    def logged(column: str) -> list[float]:
        return [row[column] for row in log if row.get(column) is not None]

    rates = logged("tokens_per_second")
    return {
        "run": name,
        "backend": plan.backend,
        "parameters": number(sum(array.size for array in model.weights.values())),
        "steps": str(done.step),
        "epochs": str(done.epoch),
        "seconds": f"{done.seconds:.0f}",
        "tokens/s": number(median(rates) if rates else None),
        "MiB": number(max(logged("memory_mib"), default=None)),
        "best dev accuracy": f"{100 * done.best.accuracy:.2f} %" if done.best else "–",
        "at step": str(done.best.step) if done.best else "–",
        "ended by": done.ended or "not over",
    }
