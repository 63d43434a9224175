"""``concord train`` and ``concord show curves``, as somebody types them."""

import json

import numpy as np
import pytest

from concord.training import checkpoint
from concord.training.log import read_log
from tests.toys.surroundings import EACH_BACKEND

SIZES = "--set d_model=16 --set num_heads=2 --set d_ff=32 --set num_layers=2 --set max_positions=16"


def write_pairs(folder, **counts):
    """Write pairs in the layout of LCQMC: they are alike if both are of the same four characters.

    Args:
        counts: how many, by split.
    """
    generator, kinds = np.random.default_rng(5), ("甲乙丙丁", "戊己庚辛")

    def text(kind):
        return "".join(generator.choice(list(kinds[kind]), generator.integers(2, 6)))

    for split, count in (counts or {"train": 601, "dev": 97, "test": 101}).items():
        lines = [f"{text(a)}\t{text(b)}\t{int(a == b)}" for a, b in generator.integers(0, 2, (count, 2))]
        (folder / f"{split}.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *lines]) + "\n")
    return folder


def line(backend, run, words):
    """Return a command line that trains a small model."""
    model = f"--variant bert --vocabulary 20 --batch 29 {SIZES}"
    return f"train --backend {backend} {model} --threads 1 --out {run} {words}"


def learn_pairs(open_worker, entered, backend, folder):
    open_worker(backend)  # skips where it is not installed
    run, how = folder / "run", "--epochs 7 --dropout 0 --learning-rate 5e-3 --warmup 20"
    said, errors = entered(line(backend, run, f"--data {write_pairs(folder)} {how}"))
    assert not errors
    assert "7 epochs" in said
    assert f"the best checkpoint: {run}/step-" in said
    assert f'next: concord predict {run} "a text"' in said
    entered(f"predict {run} --evaluate {folder / 'test.tsv'} --json {folder / 'test.json'}")
    found = json.loads((folder / "test.json").read_text())
    assert found["accuracy"] > 0.9  # of 101 pairs; by chance fewer than 0.7
    return run


def test_pairs_are_learnt_and_shown(open_worker, entered, tmp_path):
    run = learn_pairs(open_worker, entered, "torch", tmp_path)
    picture = tmp_path / "curves.svg"
    said, errors = entered(f"show curves {run} {run} --out {picture}")
    best = checkpoint.read(run, "last").progress.best
    assert not errors
    assert f"written: {picture}" in said
    assert f"{100 * best.accuracy:.2f} %" in said
    assert "dev accuracy" in picture.read_text()
    assert {row["step"] for row in read_log(run) if "dev_accuracy" in row} == {
        21 * epoch for epoch in range(1, 8)
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_every_framework_learns_pairs(open_worker, entered, tmp_path, backend):
    learn_pairs(open_worker, entered, backend, tmp_path)


def test_what_cannot_be_trained_is_refused_in_lines(refused, tmp_path):
    data, none = f"--data {write_pairs(tmp_path)}", tmp_path / "none"

    def refusal(words):
        return refused(line("torch", tmp_path / "run", words))

    assert refusal(f"{data} --backend jax")[0].startswith("--backend is given 2 times but must be")
    assert refusal("")[0].startswith("--data is not given")
    assert refusal(f"{data} --set num_heads=3")[0].startswith(
        "'d_model' is 16 but must be divisible by 'num_heads', which is 3"
    )
    assert refusal(f"{data} --recipe adamm")[0].startswith("unknown recipe 'adamm': did you mean 'adamw'")
    assert refusal(f"{data} --resume {none}")[0] == f"{none}: no such folder"
    assert refusal(f"{data} --steps 5 --warmup 5") == [
        "the run has 5 steps but must have more than the 5 in which its learning rate rises: --warmup "
        "takes fewer [clause=OPT-9]"
    ]
    assert refusal(f"{data} --dropout-by me --batch 0 --save-every 0") == [
        "--batch is 0 but must be at least 1",
        "--save-every is 0 but must be at least 1",
        "--dropout-by is 'me' but must be spec or native",
    ]
    assert not (tmp_path / "run").exists()
