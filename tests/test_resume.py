"""Runs that are killed and go on: they end with the bits of one that was not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from concord import backends
from concord.spec import runs
from concord.spec.files import TEMPORARY
from concord.training import checkpoint
from tests.toys.checkpoints import in_bytes
from tests.toys.surroundings import ROOT

STEPS, SAVED = 23, 3
"""Steps of a run, and between two of its checkpoints: epochs end elsewhere."""

PATIENCE = 300.0
"""Seconds after which a run hangs."""

MOMENTS = ("any", "any", "writing", "evaluated")
"""When a run is killed: at any time, while a checkpoint is written, or just after an evaluation."""


def write_samples(folder):
    """Write samples of which the characters say the class."""
    generator = np.random.default_rng(17)
    for split, count in (("train", 29), ("dev", 7)):
        labels = generator.integers(0, 2, count)
        lines = [
            "".join(generator.choice(list("甲乙丙丁" if label else "戊己庚辛"), 7)) + f"\t{label}"
            for label in labels
        ]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def command(backend, samples, run):
    """Return what begins a run, or goes on with it."""
    if runs.steps(run):
        return ["--resume", str(run)]
    sizes = {"d_model": 6, "num_heads": 2, "d_ff": 7, "num_layers": 1, "max_positions": 11}
    named = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    counts = {
        "batch": 5,
        "accumulation": 2,
        "steps": STEPS,
        "warmup": 3,
        "dropout": 0.1,
        "log-every": 1,
        "save-every": SAVED,
        "evaluate-every": 5,
        "threads": 1,
        "seed": 5,
    }
    options = [word for name, value in counts.items() for word in (f"--{name}", str(value))]
    return [
        *f"--backend {backend} --variant nndl-paddle-api --vocabulary 13 --data".split(),
        str(samples),
        "--out",
        str(run),
        *named,
        *options,
    ]


def start(backend, samples, run):
    arguments = [sys.executable, "-m", "concord", "train", *command(backend, samples, run)]
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def logged(run):
    """Return the whole lines of a log."""
    with contextlib.suppress(FileNotFoundError):
        return [
            json.loads(line)
            for line in (run / "log.jsonl").read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
    return []


def writing(run):
    with contextlib.suppress(FileNotFoundError):
        return any(name.startswith(TEMPORARY) for name in os.listdir(run))
    return False


def until(reached, running):
    """Wait for something, or for the end of a run."""
    limit = time.monotonic() + PATIENCE
    while not reached() and running.poll() is None:
        assert time.monotonic() < limit, "the run hangs"
        time.sleep(0.0005)


def kill(running, run, moment, generator):
    """Kill a run at some moment; return whether it was still under way."""
    before = len(logged(run))
    until(lambda: len(logged(run)) > before + 1 and (generator.random() > 0.5 or moment == "any"), running)
    evaluations = sum("dev_loss" in row for row in logged(run))
    if moment == "writing":
        until(lambda: writing(run), running)
    elif moment == "evaluated":
        until(lambda: sum("dev_loss" in row for row in logged(run)) > evaluations, running)
    else:
        time.sleep(float(generator.exponential(0.15)))
    alive = running.poll() is None
    running.send_signal(signal.SIGKILL)
    running.wait()
    return alive


def ended(backend, samples, run):
    """Let a run come to its end."""
    running = start(backend, samples, run)
    assert running.wait(PATIENCE) == 0
    return checkpoint.read(run, "last")


def endure(backend, folder, kills, seed):
    """Kill runs until there were enough kills, and compare each with one that was not killed."""
    samples = write_samples(folder)
    whole = ended(backend, samples, folder / "whole")
    assert whole.progress.step == STEPS
    generator, survived, number = np.random.default_rng(seed), 0, 0
    while survived < kills:
        run, number = folder / f"run{number}", number + 1
        while survived < kills and not (runs.steps(run) and checkpoint.read(run, "last").progress.ended):
            if kill(start(backend, samples, run), run, MOMENTS[survived % len(MOMENTS)], generator):
                survived += 1
                lost = (
                    max((row["step"] for row in logged(run)), default=0)
                    - checkpoint.read(run, "last").progress.step
                )
                assert lost <= SAVED
        same(ended(backend, samples, run), whole)
        assert [stripped(row) for row in logged(run)] == [stripped(row) for row in logged(folder / "whole")]


def same(found, wanted):
    for one, other in ((found.weights, wanted.weights), (found.state, wanted.state)):
        assert in_bytes(one) == in_bytes(other)
    for name in ("step", "epoch", "position", "samples", "best", "unimproved", "ended"):
        assert getattr(found.progress, name) == getattr(wanted.progress, name), name


def stripped(row):
    """Return a line of a log without what depends on the machine."""
    return {
        name: value
        for name, value in row.items()
        if name not in ("seconds", "tokens_per_second", "memory_mib")
    }


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        pytest.param("torch", 1, marks=pytest.mark.xdist_group("torch")),
        *(
            pytest.param(name, 50, marks=[pytest.mark.xdist_group(name), pytest.mark.slow])
            for name in backends.BUILT_IN
        ),
    ],
)
def test_killed_run_ends_with_the_same_bits(open_worker, backend, kills, tmp_path):
    open_worker(backend)  # skips where it is not installed
    endure(backend, tmp_path, kills, seed=2026)
