"""Checkpoints that are spoilt, thousands of each kind: read.

Or refused in lines that name the file, in bounded time and memory, and nothing is written.
"""

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

MANY = pytest.param(10_000, marks=pytest.mark.slow)
"""Spoilt files of each kind, and spoilt folders of Orbax, in the long campaign."""


def spoilt(kind, times, folder):
    format, names = FILES[kind]
    reader = read_as_it_is if format == "concord" else read
    return campaign(
        partial(written, format, carried=kind == "what is carried over"),
        reader,
        times,
        folder,
        names=names,
    )


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("times", [15, MANY])
def test_a_spoilt_checkpoint_is_read_or_refused(kind, times, tmp_path):
    tally = spoilt(kind, times, tmp_path)
    assert tally.wrong == []
    assert tally.counts["refused"]


@pytest.mark.parametrize("times", [8, MANY])
def test_a_spoilt_folder_of_orbax_is_read_or_refused(times, tmp_path):
    right, here = tmp_path / "right", tmp_path / "spoilt"
    for folder in (right, here):
        folder.mkdir()
    written(ORBAX, right)
    files = [str(path.relative_to(right)) for path in right.rglob("*") if path.is_file()]
    names = [name for name in files if not any(part in name for part in UNREAD)]
    tally = campaign(
        lambda folder: copytree(right, folder, dirs_exist_ok=True) and None, read, times, here, 1000, names
    )
    assert tally.wrong == []
    assert tally.counts["refused"]
