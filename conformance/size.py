"""What judging models of real size costs: time, and the largest memory of the process that judges.

``python -m concord.conformance.size [NAME …]`` prints a line for each. The run that is judged is the reference's own in float32; it is made
in another process, and the memory for it, the weights and NumPy itself is part of what is reported.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from concord.backends.interface import Run
from concord.conformance.judging import judge
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, variant
from concord.spec.files import section
from concord.spec.parameters import Weights, parameters, shape_of
from concord.spec.reference import compute


@dataclass(frozen=True)
class Size:
    """A model and a batch.

    Attributes:
        shape: fields of the configuration.
        batch, tokens: sizes of the batch.
        gradients: whether they are judged too, those by taps among them.
    """

    shape: dict[str, int]
    batch: int
    tokens: int
    gradients: bool


MINILM = {
    "vocab_size": 30522,
    "d_model": 384,
    "num_heads": 12,
    "d_ff": 1536,
    "num_layers": 6,
    "max_positions": 512,
    "num_classes": 2,
}
BASE = {**MINILM, "d_model": 768, "d_ff": 3072, "num_layers": 12}
LARGE = {**MINILM, "d_model": 1024, "num_heads": 16, "d_ff": 4096, "num_layers": 24}

SIZES = {
    "minilm": Size(MINILM, 8, 64, gradients=True),
    "bert-base": Size(BASE, 2, 64, gradients=True),
    "bert-base-forward": Size(BASE, 8, 128, gradients=False),
    "bert-large-forward": Size(LARGE, 1, 128, gradients=False),
}
"""What can be measured, by name."""


def problem(size: Size) -> tuple[EncoderConfig, Weights, Batch]:
    """Return a model with random weights of a trained model's size, and sentences of several lengths."""
    config = variant("bert", **size.shape)
    random = np.random.default_rng(0)
    weights = {}
    for name, parameter in parameters(config).items():
        drawn = 0.04 * random.standard_normal(shape_of(config, parameter), np.float32)
        weights[name] = 1 + drawn if "norm" in name and name.endswith("weight") else drawn
    return (
        config,
        weights,
        example_batch(config, batch=size.batch, tokens=size.tokens, seed=0, padding="ragged"),
    )


def make(size: Size, path: Path) -> None:
    """Write a run of a model to a file."""
    config, weights, batch = problem(size)
    truth = compute(config, weights, batch, Arithmetic("float32"), size.gradients, dtype="float32")
    taps = {f"taps/{name}": array for name, array in truth.taps.items()}
    gradients = {f"gradients/{name}": array for name, array in truth.gradients.items()}
    by_taps = {f"by taps/{name}": array for name, array in truth.tap_gradients.items()}
    save_file(
        {name: np.asarray(array, order="C") for name, array in {**taps, **gradients, **by_taps}.items()}, path
    )


def measure(name: str, size: Size, path: Path) -> str:
    """Judge a run that was written to a file, and return what that took."""
    config, weights, batch = problem(size)
    arrays = load_file(path)
    taps = section(arrays, "taps/")
    wanted = ("taps", "gradients") if size.gradients else ("taps",)
    run = Run(
        taps["logits"],
        taps["loss"],
        taps,
        section(arrays, "gradients/"),
        "numpy",
        requested=wanted,
        tap_gradients=section(arrays, "by taps/"),
    )
    started = time.perf_counter()
    verdict = judge(config, weights, batch, run)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    count = sum(array.size for array in weights.values()) / 1e6
    what = "taps, loss, gradients" if size.gradients else "taps, loss"
    return f"{name}: {count:.0f} M parameters, {size.batch} x {size.tokens} tokens, {what}: {verdict.status}, {seconds:.0f} s, {peak:.2f} GiB"


def main(arguments: list[str]) -> None:
    """Measure each size in a process of its own."""
    if arguments[:1] == ["--make"]:
        make(SIZES[arguments[1]], Path(arguments[2]))
    elif arguments[:1] == ["--judge"]:
        print(measure(arguments[1], SIZES[arguments[1]], Path(arguments[2])), flush=True)
    else:
        for name in arguments or SIZES:
            with tempfile.TemporaryDirectory() as folder:
                for step in ("--make", "--judge"):
                    subprocess.run(
                        [
                            sys.executable,
                            "-m",
                            "concord.conformance.size",
                            step,
                            name,
                            str(Path(folder) / "run.safetensors"),
                        ],
                        check=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
