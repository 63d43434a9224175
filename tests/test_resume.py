"""Runs that are killed and go on: they end with the bits of one that was not."""

import signal
import time

import numpy as np
import pytest

from concord import backends
from concord.spec import runs
from concord.spec.files import TEMPORARY
from concord.training import checkpoint
from tests.test_ordinary import same, timeless
from tests.test_train_command import write_pairs
from tests.toys.running import BOUND, Running

STEPS, SAVED = 23, 3
"""Steps of a run, and between two of its checkpoints: epochs end elsewhere."""

MODEL = "--set d_model=6 --set num_heads=2 --set d_ff=7 --set num_layers=1 --set max_positions=11"
LINE = (
    f"train --variant nndl-paddle-api {MODEL} --vocabulary 13 --batch 5 --accumulation 2 --steps {STEPS} "
    f"--warmup 3 --dropout 0.1 --log-every 1 --save-every {SAVED} --evaluate-every 5 --threads 1 --seed 5"
)

MOMENTS = ("any", "any", "writing", "evaluated")
"""When a run is killed: at any time, while a checkpoint is written, or just after an evaluation."""


def start(backend, folder, run):
    """Begin a run, or go on with it."""
    place = folder / f"{run.name}-{time.time_ns()}"
    place.mkdir()
    line = f"{LINE} --backend {backend} --data {folder} --out {run}"
    return Running(place, f"train --resume {run}" if runs.steps(run) else line)


def count(run, what):
    """Return how often something stands in the log of a run, which has a line for each step."""
    log = run / "log.jsonl"
    return log.read_text().count(what) if log.exists() else 0


def writing(run):
    return run.exists() and any(path.name.startswith(TEMPORARY) for path in run.iterdir())


def kill(running, run, moment, generator):
    """Kill a run at some moment, two steps from its start; return whether it was still under way."""
    lines, evaluations, process = count(run, "\n"), count(run, "dev_loss"), running.process
    reached = {
        "any": lambda: True,
        "writing": lambda: writing(run),
        "evaluated": lambda: count(run, "dev_loss") > evaluations,
    }[moment]
    limit = time.monotonic() + BOUND
    while process.poll() is None and not (count(run, "\n") > lines + 1 and reached()):
        assert time.monotonic() < limit, "the run hangs"
        time.sleep(0.0005)
    if moment == "any":
        time.sleep(float(generator.exponential(0.15)))
    process.send_signal(signal.SIGKILL)
    return running.end() == -signal.SIGKILL


def ended(backend, folder, run):
    """Let a run come to its end."""
    assert start(backend, folder, run).end() == 0
    return checkpoint.read(run, "last")


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
    """Runs are killed until there were enough kills, each compared with one that was not killed."""
    open_worker(backend)  # skips where it is not installed
    write_pairs(tmp_path, train=29, dev=7)
    whole = ended(backend, tmp_path, tmp_path / "whole")
    assert whole.progress.step == STEPS
    generator, survived, number = np.random.default_rng(2026), 0, 0
    while survived < kills:
        run, number = tmp_path / f"run{number}", number + 1
        while survived < kills and not (runs.steps(run) and checkpoint.read(run, "last").progress.ended):
            if kill(start(backend, tmp_path, run), run, MOMENTS[survived % len(MOMENTS)], generator):
                survived += 1
                assert count(run, "\n") - checkpoint.read(run, "last").progress.step <= SAVED
        same(ended(backend, tmp_path, run), whole)
        assert timeless(run) == timeless(tmp_path / "whole")
