"""Train models that differ in one option, with several seeds.

``python examples/nndl/experiments.py depth DATA``

A difference within the spread of the seeds means nothing.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

from matching import Course, train
from matplotlib.figure import Figure

from concord import backends
from concord.exit_codes import end
from concord.spec.training.recipe import recipe

SIZES = {"d_model": 64, "num_heads": 4, "d_ff": 128, "num_layers": 2}

EXPERIMENTS = {  # models by name, with the fields in which they differ
    "depth": {"1 block": {"num_layers": 1}, "2 blocks": {"num_layers": 2}},
    "heads": {f"{count} heads": {"num_heads": count} for count in (1, 2, 4, 8, 16)},
    "norms": {
        "post-norm": {"norm_placement": "post", "final_norm": False},
        "pre-norm": {"norm_placement": "pre", "final_norm": False},
        "pre-norm, final norm": {"norm_placement": "pre", "final_norm": True},
    },
}


def draw(accuracies: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(6.0, 0.4 * len(accuracies) + 1.0), layout="constrained")
    axes = figure.subplots()
    for row, of_seeds in enumerate(accuracies.values()):
        axes.plot([100 * accuracy for accuracy in of_seeds], [row] * len(of_seeds), "o")
    axes.set_yticks(range(len(accuracies)), list(accuracies))
    axes.set(title="best dev accuracy of each seed", xlabel="percent")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("data", type=Path, help="a folder with train.tsv and dev.tsv")
    parser.add_argument("--backend", choices=backends.BUILT_IN, default="torch")
    parser.add_argument("--variant", default="nndl-paddle-api")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("accuracy.svg"))
    asked = parser.parse_args()
    how = recipe("adamw").replace(warmup_steps=asked.warmup)
    course = Course.of(asked.data, how, asked.epochs, asked.tokens, vocabulary=21128)
    accuracies: dict[str, list[float]] = {}
    with backends.open(asked.backend) as worker:
        for name, fields in EXPERIMENTS[asked.experiment].items():
            config = course.config(asked.variant, asked.tokens, **SIZES).replace(**fields)
            for seed in range(asked.seeds):
                accuracy = train(worker, course, config, seed, report=lambda line: None).accuracy
                accuracies.setdefault(name, []).append(accuracy)
                print(f"{name}, seed {seed}: {accuracy:.2%}", flush=True)
    for name, of_seeds in accuracies.items():
        spread = f" ± {100 * stdev(of_seeds):.2f}" if len(of_seeds) > 1 else ""
        print(f"{name:>24}  {100 * mean(of_seeds):.2f}{spread} %")
    draw(accuracies, asked.out)


if __name__ == "__main__":
    end(main)
