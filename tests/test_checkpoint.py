"""Checkpoints: whole or not there, read back bit for bit, and refused in words."""

import dataclasses
import json

import numpy as np
import pytest

from concord import spec
from concord.spec import runs
from concord.spec.errors import SpecError
from concord.spec.folders import write_folder
from concord.spec.training.recipe import recipe
from concord.training import checkpoint
from concord.training.checkpoint import Best, Progress, TrainingCheckpoint
from concord.training.data import Labels, TextEncoder, fitted
from concord.training.plan import TrainingPlan
from tests.toys.checkpoints import in_bytes
from tests.toys.surroundings import refusal


def trained(config, step=7, dtype="float32"):
    encoder, labels = TextEncoder.learn(["好 书 好 书", "書"], config), Labels(("neg", "pos", "否"))
    config = fitted(config, encoder, labels)
    weights = {name: array.astype(dtype) for name, array in spec.initialize(config, seed=5).items()}
    generator = np.random.default_rng(step)
    state = {
        f"{moment}.{name}": generator.standard_normal(weights[name].shape).astype(dtype)
        for moment in ("first_moment", "second_moment")
        for name in spec.trainable(config)
    }
    progress = Progress(
        step=step,
        epoch=1,
        position=3,
        best=Best(step, 0.5, 0.75),
        log=13,
        plan=TrainingPlan(backend="torch", epochs=2, seed=11, data="a.tsv", columns=["text_a", "label"]),
    )
    return TrainingCheckpoint(config, weights, labels, encoder, recipe("nndl-paddle"), state, progress)


def test_checkpoint_comes_back_bit_for_bit(variant_config, tmp_path):
    given = trained(variant_config)
    checkpoint.write(tmp_path / "c", given)
    found = checkpoint.read(tmp_path / "c")
    for name in ("config", "recipe", "labels", "progress"):
        assert getattr(found, name) == getattr(given, name)
    assert found.encoder.files() == given.encoder.files()
    assert list(found.weights) == list(given.weights)
    for name in ("weights", "state"):
        assert in_bytes(getattr(found, name)) == in_bytes(getattr(given, name))


def test_parts_that_do_not_fit_are_listed_together(small, tmp_path):
    given = trained(small())
    weights = {**given.weights, "classifier.bias": np.zeros(5), "extra": np.zeros(3)}
    state = {
        name: array for name, array in given.state.items() if name != "first_moment.classifier.weight"
    } | {"momentum.classifier.bias": np.zeros(3)}
    wrong = dataclasses.replace(given, weights=weights, state=state, labels=Labels(("a", "b")))
    assert refusal(checkpoint.write, tmp_path / "c", wrong) == [
        "'classifier.bias' has shape (5,) but must be (3,) [clause=WGT-2]",
        "'extra' is unexpected: the configuration has no such parameter [clause=WGT-1]",
        "there are 2 labels but must be 3, as 'num_classes' says",
        "'momentum.classifier.bias' is unexpected: the recipe keeps no such state",
        "'first_moment.classifier.weight' is missing but is required after 7 steps",
    ]
    assert not (tmp_path / "c").exists()


def test_files_that_were_changed_are_named_all_of_them(small, tmp_path):
    folder = tmp_path / "c"
    checkpoint.write(folder, trained(small()))
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "weights.safetensors").write_bytes(content)
    (folder / "labels.json").write_text('["a", "b", "c"]')
    (folder / "recipe.toml").unlink()
    refused = refusal(checkpoint.read, folder)
    assert [problem.partition(": ")[0] for problem in refused] == [
        str(folder / name) for name in ("labels.json", "recipe.toml", "weights.safetensors")
    ]
    contents = json.loads((folder / "contents.json").read_text()) | {"format": "concord.checkpoint/2"}
    (folder / "contents.json").write_text(json.dumps(contents))
    with pytest.raises(SpecError, match="must be 'concord\\.checkpoint/1'"):
        checkpoint.read(folder)


def test_run_gives_its_best_or_last_whole_checkpoint(small, tmp_path):
    given = trained(small())
    with pytest.raises(SpecError, match="is neither a checkpoint nor a run that has one"):
        checkpoint.read(tmp_path)
    for step in (5, 7, 100_000_007):
        progress = dataclasses.replace(given.progress, step=step, best=Best(5, 0.5, 0.75))
        checkpoint.write(runs.step_folder(tmp_path, step), dataclasses.replace(given, progress=progress))
    runs.step_folder(tmp_path, 100_000_009).mkdir()
    write_folder(tmp_path / ".concord-0011223344556677", {"config.toml": b""})
    assert [checkpoint.read(tmp_path, which).progress.step for which in ("best", "last")] == [5, 100_000_007]
    checkpoint.tidy(tmp_path, {5, 100_000_007})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-100000007"]
