"""Train models that differ in one thing on the same data, with several seeds, and compare them.

Every run is an ordinary one: a second call goes on where the first was interrupted, and ``concord show
curves`` reads it.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure

from concord import backends, spec
from concord.spec.errors import SpecError
from concord.spec.training.recipe import recipe
from concord.training import checkpoint, figures
from concord.training.beginning import again, begin
from concord.training.ordinary import fit
from concord.training.plan import TrainingPlan

Models = Mapping[str, spec.EncoderConfig]

SIZES = {"d_model": 64, "num_heads": 4, "d_ff": 128, "num_layers": 2}


def compare(about: str, models: Callable[[spec.EncoderConfig], Models]) -> None:
    """Read the command line, train each model with each seed, and print accuracies and their spread.

    Args:
        about: the docstring of the program.
        models: returns the models by name, given a configuration that they share.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("data", type=Path, help="a folder with train, dev and test")
    parser.add_argument("--backend", choices=backends.BUILT_IN, default="torch")
    parser.add_argument("--variant", choices=spec.variants(), default="nndl-paddle-api")
    parser.add_argument("--tokenization", default="characters")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("experiment"))
    try:
        train(parser.parse_args(), models)
    except SpecError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def train(asked: argparse.Namespace, models: Callable[[spec.EncoderConfig], Models]) -> None:
    """Train each model with each seed, and print accuracies and their spread.

    Raises:
        SpecError: if the data or the options describe no training.
    """
    plan = TrainingPlan(
        backend=asked.backend,
        data=str(asked.data.absolute()),
        steps=asked.steps,
        tokenization=asked.tokenization,
        tokens=asked.tokens,
    )
    how = recipe("adamw").replace(warmup_steps=asked.warmup)
    shared = spec.variant(asked.variant, **SIZES, max_positions=asked.tokens + 2)
    found: dict[str, list[float]] = {}
    with backends.open(asked.backend) as worker:
        for (name, config), seed in product(models(shared).items(), range(asked.seeds)):
            run = asked.out / f"{name.replace(' ', '-')}-{seed}"
            if run.exists():
                start = checkpoint.read(run, "last")
                corpora = again(start)
            else:
                start, corpora = begin(config, how, replace(plan, seed=seed))
                run.mkdir(parents=True)
            best = fit(worker, start, corpora, run).progress.best
            assert best is not None, "there are no dev samples"
            found.setdefault(name, []).append(best.accuracy)
            print(f"{name}, seed {seed}: {best.accuracy:.2%} after {best.step} steps", flush=True)
    for name, accuracies in found.items():
        spread = f" ± {100 * stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        print(f"{name:>24}  {100 * mean(accuracies):.2f}{spread} %")
    figure = figures.draw(lambda empty: paint(empty, found), width=6.0, height=0.4 * len(found) + 1.0)
    (asked.out / "accuracy.svg").write_text(figure, encoding="utf-8")


def paint(figure: Figure, found: Mapping[str, list[float]]) -> None:
    """Draw the accuracy of every seed, a row for each model."""
    axes = figure.subplots()
    for row, accuracies in enumerate(found.values()):
        axes.plot([100 * accuracy for accuracy in accuracies], [row] * len(accuracies), "o")
    axes.set_yticks(range(len(found)), list(found))
    axes.set(title="best dev accuracy of each seed", xlabel="percent")
