"""Train the course's text matching: ``python examples/nndl/train.py DATA --backend paddle``."""

import argparse
from functools import partial
from pathlib import Path

from matching import Course, save, train

from concord import backends
from concord.exit_codes import end
from concord.spec.errors import SpecError
from concord.spec.training.recipe import recipe

SIZES = ("d_model", "num_heads", "d_ff", "num_layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with train.tsv and dev.tsv")
    parser.add_argument("--backend", choices=backends.BUILT_IN, default="torch")
    parser.add_argument("--variant", default="nndl-paddle", help="nndl-paddle: 8.3; nndl-paddle-api: 8.4")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=21128)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("run"), help="a new folder; default: run")
    parser.add_argument("--force", action="store_true", help="replace the run in --out")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: the course's")
    asked = parser.parse_args()
    if asked.epochs < 1:
        raise SpecError(f"--epochs is {asked.epochs} but must be at least 1")
    if asked.out.exists() and not asked.force:
        raise SpecError(f"{asked.out}: already exists; --force replaces it")
    if asked.out.exists() and not (asked.out / "epochs.json").exists():
        raise SpecError(f"{asked.out} has no epochs.json; --force replaces only an earlier run")
    how = recipe("nndl-paddle").replace(learning_rate=asked.learning_rate)
    course = Course.of(asked.data, how, asked.epochs, asked.tokens, asked.vocabulary)
    sizes = {name: size for name in SIZES if (size := getattr(asked, name)) is not None}
    config, saved = course.config(asked.variant, asked.tokens, **sizes), partial(save, asked.out, course)
    with backends.open(asked.backend) as worker:
        result = train(worker, course, config, asked.seed, improved=saved)
    saved(result)  # with the figures of the epochs after the best one
    print(f"best dev accuracy {result.accuracy:.2%}; written: {asked.out}")


if __name__ == "__main__":
    end(main)
