"""Ordinary training: what is made of a plan, and that an interrupted run ends as one that was not."""

import dataclasses

import numpy as np
import pytest

from concord import spec
from concord.spec import runs
from concord.spec.training.recipe import Recipe
from concord.spec.training.schedules import learning_rate
from concord.training import checkpoint
from concord.training.checkpoint import Progress, TrainingCheckpoint
from concord.training.data import Corpus, Labels, TextEncoder, fitted
from concord.training.log import read_log
from concord.training.metrics import measure
from concord.training.ordinary import fit
from concord.training.plan import TrainingPlan
from tests.conftest import small_config
from tests.test_lockstep import ADAMW
from tests.toys.checkpoints import in_bytes
from tests.toys.stepping import Infinite, Right
from tests.toys.surroundings import refusal

RECIPE = Recipe(**ADAMW).replace(learning_rate=0.02, total_steps=13)
LABELS = Labels(("bad", "good", "so so"))
ENCODER = TextEncoder.of("characters", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij"], small_config())
CONFIG = fitted(small_config(d_model=6, d_ff=7, num_layers=1), ENCODER, LABELS)


def corpus(count, seed):
    """Return samples of five tokens."""
    batch = spec.example_batch(CONFIG, batch=count, tokens=5, seed=seed, padding="none")
    return Corpus(
        ids=batch.input_ids.ravel().astype(np.int32),
        starts=np.arange(count + 1) * 5,
        segment_ids=np.zeros(5 * count, np.int8),
        labels=batch.labels,
        numbers=np.arange(count),
        truncated=np.zeros(count, np.int32),
        files=("",),
    )


SAMPLES = {"train": corpus(14, 3), "dev": corpus(7, 99)}
"""Five batches of three, the last of which is small: three steps of an epoch."""


def beginning(**fields):
    usual = {"backend": "numpy", "steps": 11, "batch": 3, "log_every": 2, "save_every": 2, "seed": 7}
    progress = Progress(plan=TrainingPlan(**{**usual, **fields}))
    weights = spec.initialize(CONFIG, seed=1)
    return TrainingCheckpoint(CONFIG, weights, LABELS, ENCODER, RECIPE, progress=progress)


def after(steps):
    """Return what halts training after so many steps."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps - 1


def same(one, other):
    for name in ("weights", "state"):
        found, wanted = getattr(one, name), getattr(other, name)
        assert in_bytes(found) == in_bytes(wanted)
    timeless = {"seconds": 0.0, "log": 0, "recent": []}
    assert dataclasses.replace(one.progress, **timeless) == dataclasses.replace(other.progress, **timeless)


def timeless(run):
    """Return the lines of a log without what depends on the machine."""
    measured = {"seconds", "tokens_per_second", "memory_mib"}
    return [{name: row[name] for name in row.keys() - measured} for row in read_log(run)]


def test_training_makes_the_steps_of_its_recipe_and_keeps_the_best(tmp_path):
    last = fit(Right(), beginning(), SAMPLES, tmp_path)
    assert (last.progress.step, last.progress.epoch, last.progress.position) == (11, 3, 4)
    assert last.progress.ended == "11 steps"
    same(checkpoint.read(tmp_path, "last"), last)
    rows = read_log(tmp_path)
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 8, 9, 10, 11]
    for row in rows:
        assert "loss" not in row or row["learning_rate"] == learning_rate(RECIPE, row["step"] - 1)
    found = {row["step"]: (row["dev_accuracy"], -row["dev_loss"]) for row in rows if "dev_loss" in row}
    assert list(found) == [3, 6, 9, 11]
    best = last.progress.best
    assert (best.step, (best.accuracy, -best.loss)) == max(found.items(), key=lambda item: item[1])
    assert runs.steps(tmp_path) == sorted({best.step, 11})


@pytest.mark.parametrize("halts", [[1, 4], [2, 3], [5, 6]])
def test_interrupted_run_ends_with_the_same_bits_and_the_same_log(tmp_path, halts):
    whole = fit(Right(), beginning(), SAMPLES, tmp_path / "whole")
    run, start = tmp_path / "run", beginning()
    for steps in halts:
        halted = fit(Right(), start, SAMPLES, run, halted=after(steps))
        start = checkpoint.read(run, "last")
        same(start, halted)
        # What a kill leaves behind: lines of steps that are lost, and half of one.
        with (run / "log.jsonl").open("a") as file:
            file.write("lost\n{")
    same(fit(Right(), start, SAMPLES, run), whole)
    assert timeless(run) == timeless(tmp_path / "whole")


def test_patience_and_epochs_end_a_run(tmp_path):
    still = RECIPE.replace(learning_rate=0.0)
    frozen = dataclasses.replace(beginning(steps=None, patience=2), recipe=still)
    assert fit(Right(), frozen, SAMPLES, tmp_path / "a").progress.ended == "no improvement in 2 evaluations"
    assert checkpoint.read(tmp_path / "a", "last").progress.epoch == 3
    assert checkpoint.read(tmp_path / "a").progress.step == 3
    assert fit(Right(), beginning(steps=None, epochs=2), SAMPLES, tmp_path / "b").progress.step == 6


def test_loss_that_is_not_finite_ends_a_run_and_leaves_its_checkpoint(tmp_path):
    (said,) = refusal(fit, Infinite(), beginning(), SAMPLES, tmp_path)
    assert said.startswith("the loss of step 6 is inf: training has diverged")
    assert said.endswith(f"the last checkpoint is {runs.step_folder(tmp_path, 4)}")
    assert checkpoint.read(tmp_path, "last").progress.step == 4


@pytest.mark.parametrize(("classes", "ignored"), [(3, 1), (1, None)])
def test_evaluation_is_the_mean_loss_of_the_specification(classes, ignored):
    config = CONFIG.replace(num_classes=classes, ignore_label=ignored)
    weights, batch = spec.initialize(config, seed=2), spec.example_batch(config, batch=7, tokens=5, seed=4)
    truth = spec.reference(config, weights, batch)
    found = measure(lambda given: truth.logits, config, [(np.arange(7), batch)])
    assert abs(found.loss - float(truth.loss)) <= 8 * np.spacing(float(truth.loss))
    counted = batch.labels != ignored
    assert found.accuracy == float((spec.predict(config, truth.logits) == batch.labels)[counted].mean())
