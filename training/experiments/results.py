"""What an experiment came to: means and their spread over seeds, as data, a table, a picture and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from concord.conformance import codec, record
from concord.conformance.layout import render
from concord.training import figures
from concord.training.experiments.cells import Experiment, Trained
from concord.training.experiments.ways import EXPERIMENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "experiment"
HEADINGS = (
    "model",
    "parameters",
    "seeds",
    "accuracy",
    "spread",
    "least",
    "most",
    "loss",
    "at step",
    "seconds",
    "tokens/s",
)
LESS = ("least", "most", "at step", "tokens/s", "parameters", "seconds")
"""Of these, what a narrow terminal goes without, the first first."""


@dataclass(frozen=True)
class Stored:
    """What a record of an experiment holds besides what every record has.

    Attributes:
        experiment: its name.
        seconds: of all runs together.
        backend: that trained.
        tested: whether all runs that are done were tested.
        plan: how each was trained.
        recipe: and by which steps.
        ways: name of a model to its configuration.
        runs: what each came to.
    """

    exit_code: int
    experiment: str
    seconds: float
    backend: str
    tested: bool
    plan: dict[str, Any]
    recipe: dict[str, Any]
    ways: dict[str, dict[str, Any]]
    runs: tuple[Trained, ...]


@dataclass(frozen=True)
class Summary:
    """What all seeds of a model came to together.

    Attributes:
        parameters: of the model.
        accuracies: of each seed that is done: on the test samples if there are any, else the best evaluation.
        losses, steps, seconds, rates: of each, of the same evaluation; seconds of the whole run, tokens in a second.
        lacking: why others have no result.
    """

    parameters: int
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    rates: tuple[float, ...]
    lacking: tuple[str, ...]

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, by one less than there are; None of a single one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def row(self, name: str) -> list[str]:
        """Return the figures as text, one for each of :data:`HEADINGS`."""
        if not self.accuracies:
            return [name, "–", "0", *["–"] * (len(HEADINGS) - 3)]
        percent = [
            _percent(value)
            for value in (fmean(self.accuracies), self.spread, min(self.accuracies), max(self.accuracies))
        ]
        rate = f"{fmean(self.rates):,.0f}".replace(",", " ") if self.rates else "–"
        return [
            name,
            f"{self.parameters:,}".replace(",", " "),
            str(len(self.accuracies)),
            *percent,
            f"{fmean(self.losses):.4f}",
            f"{fmean(self.steps):.0f}",
            f"{fmean(self.seconds):.0f}",
            rate,
        ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def on_test(found: Sequence[Trained]) -> bool:
    """Return whether all that is done was tested."""
    done = [trained for trained in found if trained.status == "done"]
    return bool(done) and all(trained.test for trained in done)


def summaries(found: Sequence[Trained]) -> dict[str, Summary]:
    """Return what each model came to, by its name."""
    tested, ways = on_test(found), list(dict.fromkeys(trained.way for trained in found))
    result = {}
    for way in ways:
        mine = [trained for trained in found if trained.way == way]
        done = [
            (trained, best)
            for trained in mine
            if trained.status == "done" and (best := trained.test if tested else trained.dev)
        ]
        result[way] = Summary(
            parameters=max((trained.parameters for trained in mine), default=0),
            accuracies=tuple(best.accuracy for _, best in done),
            losses=tuple(best.loss for _, best in done),
            steps=tuple(best.step for _, best in done),
            seconds=tuple(trained.seconds for trained, _ in done),
            rates=tuple(
                trained.tokens_per_second for trained, _ in done if trained.tokens_per_second is not None
            ),
            lacking=tuple(
                f"seed {trained.seed}: {trained.status}{': ' if trained.detail else ''}{trained.detail}"
                for trained in mine
                if trained.status != "done"
            ),
        )
    return result


def exit_code(found: Sequence[Trained]) -> int:
    """0: every run is done; 3: one is not, or there is none."""
    return 0 if found and all(trained.status == "done" for trained in found) else 3


def headline(found: Sequence[Trained]) -> str:
    """Say in a sentence which model did best, and whether that is more than the spread over seeds."""
    ranked = sorted(
        ((fmean(one.accuracies), name, one) for name, one in summaries(found).items() if one.accuracies),
        key=lambda entry: -entry[0],
    )
    if not ranked:
        return "No run is done."
    first, name, one = ranked[0]
    said = f"{name}: accuracy {_percent(first)}"
    if len(ranked) == 1:
        return f"{said}."
    second, other, two = ranked[1]
    spread = max((value for value in (one.spread, two.spread) if value is not None), default=None)
    ahead = (
        f"{said}, {_percent(first - second)[:-2]} points before {other}"
        if first > second
        else f"{said}, as {other} has"
    )
    if spread is None:
        return f"{ahead}; one seed says nothing of the spread."
    return f"{ahead}; the spread over seeds is {100 * spread:.2f} points" + (
        ", so that they are not told apart." if first - second <= spread else "."
    )


def as_data(experiment: Experiment, found: Sequence[Trained]) -> dict[str, Any]:
    """Return an experiment as JSON data."""
    plan = experiment.plan
    body = {
        "exit_code": exit_code(found),
        "experiment": experiment.name,
        "seconds": sum(trained.seconds for trained in found),
        "backend": plan.backend,
        "tested": on_test(found),
        "plan": {name: value for name, value in dataclasses.asdict(plan).items() if value is not None},
        "recipe": experiment.recipe.as_dict(),
        "ways": {way: config.as_dict() for way, config in experiment.ways.items()},
        "runs": list(found),
    }
    return record.record(body, KIND, f"{experiment.name}: {EXPERIMENTS[experiment.name]}")


def figure(
    found: Sequence[Trained], width: float = 9.0, panels: Sequence[str] = ("accuracy", "curves")
) -> Figure:
    """Return a figure: the accuracy of each seed with mean and range, and the accuracy while training.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    ways = list(dict.fromkeys(trained.way for trained in found))

    def paint(made: Any) -> None:
        axes = np.atleast_1d(made.subplots(1, len(panels)))
        for place, panel in zip(axes, panels, strict=True):
            (_accuracies if panel == "accuracy" else _curves)(place, found)

    return figures.draw(paint, width, max(2.6, 0.28 * len(ways) + 2.0), ways)


def _accuracies(axes: Any, found: Sequence[Trained]) -> None:
    known = summaries(found)
    for place, (name, (colour, _)) in enumerate(figures.sequence(list(known)).items()):
        values = known[name].accuracies
        if values:
            shares = [100 * value for value in values]
            axes.plot(
                [min(shares), max(shares)],
                [place, place],
                color=colour,
                linewidth=5,
                alpha=0.25,
                solid_capstyle="round",
            )
            axes.plot(shares, [place] * len(shares), "o", color=colour, markersize=3.5, alpha=0.8)
            axes.plot([fmean(shares)], [place], "|", color=colour, markersize=13, markeredgewidth=2)
    axes.set_yticks(range(len(known)), list(known))
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set(
        title=f"{'test' if on_test(found) else 'best dev'} accuracy of each seed, and mean", xlabel="percent"
    )
    axes.grid(True, axis="x")


def _curves(axes: Any, found: Sequence[Trained]) -> None:
    for name, (colour, line) in figures.sequence(
        list(dict.fromkeys(trained.way for trained in found))
    ).items():
        for number, trained in enumerate(one for one in found if one.way == name and one.curve):
            steps, _, shares = zip(*trained.curve, strict=True)
            axes.plot(
                steps,
                [100 * share for share in shares],
                color=colour,
                linestyle=line,
                linewidth=1.0,
                alpha=0.85,
                marker="." if len(steps) == 1 else None,
                label=None if number else name,
            )
    axes.set(title="dev accuracy while training", xlabel="step", ylabel="percent")
    axes.grid(True)
    if axes.lines:
        axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def page(data: Mapping[str, Any]) -> str:
    """Return a record of an experiment as HTML.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    found = codec.understood(Stored, data).runs
    record.confirm(data, exit_code(found))
    known = summaries(found)
    seeds = max((len(one.accuracies) for one in known.values()), default=0)
    differing = sorted(
        {
            field
            for one in data["ways"].values()
            for other in data["ways"].values()
            for field in {*one, *other}
            if one.get(field) != other.get(field)
        }
    )
    return render(
        "experiment.html",
        data,
        Path(__file__).parents[1] / "templates",
        headline=headline(found),
        tone="good" if data["exit_code"] == 0 else "broken",
        compared=[
            f"{len(known)} models, {seeds} seed{'' if seeds == 1 else 's'} each, on the same data by {data['backend']}; the accuracy is {'that of the best checkpoint on the test samples' if data['tested'] else 'the best on the dev samples'}."
        ],
        sections={"picture": "Picture", "table": "Table", "runs": "Runs", "models": "Models"},
        accuracies=figures.inline(figure(found, 4.2, ("accuracy",)), "Accuracy of each seed"),
        curves=figures.inline(figure(found, 4.2, ("curves",)), "Accuracy while training"),
        headings=HEADINGS,
        rows=[one.row(name) for name, one in known.items()],
        lacking=[f"{name}, {why}" for name, one in known.items() for why in one.lacking],
        found=found,
        percent_of=_percent,
        differing=differing,
    )
