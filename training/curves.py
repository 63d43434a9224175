"""What runs of training came to: curves of loss and accuracy, as a picture and on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from concord.conformance import doctor
from concord.conformance.layout import render
from concord.spec.errors import SpecError, collect
from concord.spec.files import read_as
from concord.training import checkpoint, figures
from concord.training.checkpoint import Best
from concord.training.log import COLUMNS, read_log
from concord.training.ordinary import RESULT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def curves(logs: Mapping[str, Sequence[Mapping[str, Any]]], suffix: str = ".svg") -> bytes:
    """Return a picture of loss and accuracy by step, several runs over each other.

    Args:
        logs: of each run, the lines of its log.
        suffix: of the file that it is for: ``.svg``, ``.png`` or ``.pdf``.

    Raises:
        SpecError: for another suffix, or if matplotlib is not installed.
    """
    if suffix not in (".svg", ".png", ".pdf"):
        raise SpecError(f"a picture's name ends in {suffix!r} but must end in .svg, .png or .pdf")
    return figures.saved(_figure(logs, list(PANELS), 9.0), suffix[1:])


def _figure(logs: Mapping[str, Sequence[Mapping[str, Any]]], panels: Sequence[str], width: float) -> Figure:
    """Return some panels beside each other: a colour for each run, a line for each column."""

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

    return figures.draw(paint, width, 3.3, logs)


def page(runs: Sequence[Path]) -> str:
    """Return the page of runs: one file that needs nothing else.

    Raises:
        SpecError: as :func:`of_runs` and :func:`curves` do.
    """
    logs, found = of_runs(runs), summaries(runs)
    name, best = max(
        ((name, one.best) for name, one in found.items()),
        key=lambda item: item[1].accuracy if item[1] else 0.0,
    )
    headline = (
        f"{name}: dev accuracy {best.accuracy:.2%} after {best.step} steps."
        if best
        else "Nothing was evaluated."
    )
    trained = [
        f"{name} with {one.backend}, {one.parameters:,} parameters, {one.steps} steps"
        for name, one in found.items()
    ]
    data = {
        "schema": "concord.training/1", "kind": "training", "title": ", ".join(logs), "exit_code": 0,
        "written": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": sum(one.seconds for one in found.values()), "machine": doctor.machine(),
    }  # fmt: skip
    return render(
        "training.html",
        data,
        Path(__file__).parent / "templates",
        headline=headline,
        tone="good",
        compared=[f"Trained: {'; '.join(trained)}."],
        sections={"curves": "Loss and accuracy", "runs": "Runs", "lines": "Logs"},
        pictures=[figures.inline(_figure(logs, [panel], 4.2), f"{panel} by step") for panel in PANELS],
        runs=found,
        headings=HEADINGS,
        logs=logs,
        columns=COLUMNS,
    )


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
    settings: dict[str, Any]
    recipe: dict[str, Any]

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
        settings={name: value for name, value in (vars(plan) if plan else {}).items() if value is not None},
        recipe=model.recipe.as_dict() if model.recipe else {},
    )


def summaries(runs: Sequence[Path]) -> dict[str, Summary]:
    """Return what runs came to, by name.

    Raises:
        SpecError: as :func:`of_runs` and :func:`summary` do.
    """
    return {name: summary(run, log) for run, (name, log) in zip(runs, of_runs(runs).items(), strict=True)}


def as_markdown(found: Mapping[str, Summary]) -> str:
    """Return the figures of runs as a Markdown table."""
    lines = [
        HEADINGS,
        ["---", "---", *["---:"] * (len(HEADINGS) - 3), "---"],
        *(one.row(name) for name, one in found.items()),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
