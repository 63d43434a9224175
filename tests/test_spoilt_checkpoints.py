"""Checkpoints that are spoilt, thousands of each kind: read.

Or refused in lines that name the file, in bounded time and memory, and nothing is written.
"""

import time
from functools import partial
from shutil import copytree

import pytest

from tests.toys.checkpoints import SENTENCES, SHARDS, read, read_as_it_is, written
from tests.toys.spoiling import campaign

INDEX = "model.safetensors.index.json"

FILES = {
    "safetensors, this project's own": ("concord", ("weights.safetensors",)),
    "safetensors": ("hugging-face", ("model.safetensors",)),
    "safetensors in two files": (
        SHARDS,
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ),
    "torch": ("torch", ("model.pt",)),
    "torch, by names of Hugging Face": ("hugging-face-bin", ("pytorch_model.bin",)),
    "paddle": ("paddle", ("model.pdparams",)),
    "h5": ("keras-h5", ("model.weights.h5",)),
    "h5 of Keras 2": ("hugging-face-tf", ("tf_model.h5",)),
    "keras": ("keras", ("model.keras",)),
    "TensorFlow": ("tensorflow", ("model.ckpt.index",)),
    "TensorFlow 1": ("google-bert", ("bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001")),
    "msgpack": ("jax-msgpack", ("model.msgpack",)),
    "msgpack, by names of Hugging Face": ("hugging-face-flax", ("flax_model.msgpack",)),
    "config.json": ("hugging-face", ("config.json",)),
    "config.toml": ("torch-safetensors", ("config.toml",)),
    "config.toml, this project's own": ("concord", ("config.toml",)),
    "contents.json": ("concord", ("contents.json",)),
    "the index of several files": (SHARDS, (INDEX,)),
    "modules.json": (SENTENCES, ("modules.json", "1_Pooling/config.json")),
    "part.json": ("torch-safetensors", ("part.json",)),
    "what is carried over": ("torch-safetensors", ("labels.json", "tokenizer.json", "vocab.txt")),
}
"""Each kind of file: a format that has it, and what it is called there."""

ORBAX = "jax-orbax"

UNREAD = ("ocdbt.process", "commit_success")
"""What of a folder of Orbax nobody reads."""

EACH, FOLDERS = 10_000, 10_000
"""Spoilt files of each kind in the long campaign, and spoilt folders of Orbax."""


def spoilt(kind, times, folder, first=0):
    format, names = FILES[kind]
    reader = read_as_it_is if format == "concord" else read
    return campaign(
        partial(written, format, carried=kind == "what is carried over"),
        reader,
        times,
        folder,
        first=first,
        names=names,
    )


def told(kind, tally, started):
    print(f"{kind}: {dict(tally.counts)} in {time.monotonic() - started:.0f} s")


@pytest.mark.parametrize("kind", FILES)
def test_a_spoilt_checkpoint_is_read_or_refused(kind, tmp_path):
    tally = spoilt(kind, 15, tmp_path)
    assert tally.wrong == []
    assert tally.counts["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_thousands_of_spoilt_checkpoints_are_read_or_refused(kind, tmp_path):
    started = time.monotonic()
    tally = spoilt(kind, EACH, tmp_path, first=1000)
    told(kind, tally, started)
    assert tally.wrong == []


@pytest.mark.parametrize("times", [8, pytest.param(FOLDERS, marks=pytest.mark.slow)])
def test_a_spoilt_folder_of_orbax_is_read_or_refused(times, tmp_path):
    started = time.monotonic()
    right, here = tmp_path / "right", tmp_path / "spoilt"
    for folder in (right, here):
        folder.mkdir()
    written(ORBAX, right)
    files = [str(path.relative_to(right)) for path in right.rglob("*") if path.is_file()]
    names = [name for name in files if not any(part in name for part in UNREAD)]
    tally = campaign(
        lambda folder: copytree(right, folder, dirs_exist_ok=True) and None, read, times, here, 1000, names
    )
    told(ORBAX, tally, started)
    assert tally.wrong == []
    assert tally.counts["refused"]
