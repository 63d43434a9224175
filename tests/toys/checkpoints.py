"""Small right checkpoints of every format, to be spoilt."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np

from concord import porting, spec
from concord.porting import registry
from concord.porting.containers.container import INDEX
from concord.porting.file_tensors import in_memory
from concord.spec import checkpoints
from concord.spec.errors import SpecError
from concord.spec.files import sha256_of

# A prime or twice a prime for each axis, so that only square tensors look like their transpose.
SIZES = {
    "vocab_size": 29,
    "d_model": 14,
    "num_heads": 2,
    "d_ff": 17,
    "num_classes": 3,
    "num_layers": 2,
    "max_positions": 13,
}

CONFIG = spec.variant("bert", **SIZES)


def drawn(config=CONFIG, part="model", seed=3):
    weights = spec.initialize(config, seed=seed, part=part)
    return {name: array.astype(np.float32) for name, array in weights.items()}


WEIGHTS = drawn()


def in_bytes(weights):
    return {name: array.tobytes() for name, array in weights.items()}


def bits(checkpoint):
    return in_bytes((porting.read(checkpoint) if isinstance(checkpoint, Path) else checkpoint).weights())


def saved(path, form, config=CONFIG, weights=None, part="model", files=None, **how):
    """Write a checkpoint, by default of random weights, and return its folder."""
    weights = drawn(config, part) if weights is None else weights
    porting.write(porting.from_weights(config, weights, part, files), path, form, **how)
    return path


SHARDS = "hugging-face in two files"

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shards(folder, form="hugging-face"):
    """Split a file's tensors into two files with an index."""
    path, container = folder / registry.find_format(form).weights[0], registry.find_format(form).container
    tensors = {name: in_memory(np.array(stored.array())) for name, stored in container.read(path).items()}
    names = [f"{path.stem}-0000{number}-of-00002{path.suffix}" for number in (1, 2)]
    places = {name: names[number % 2] for number, name in enumerate(tensors, 1)}
    for shard in names:
        container.write(folder / shard, {name: tensors[name] for name in tensors if places[name] == shard})
    (folder / f"{path.name}{INDEX}").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    path.unlink()


class RunsCode:
    """Creates a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


CARRIED = {
    "labels.json": b'{"format": "concord.labels/1", "names": ["a", "b", "c"]}',
    "tokenizer.json": b'{"version": "1.0"}',
    "vocab.txt": b"[PAD]\na\n",
}

# A sentence embedding of the same sizes has these weights.
POOLED = {name: array for name, array in WEIGHTS.items() if not name.startswith(("pooler", "classifier"))}

SENTENCES = "sentence-transformers"


def written(format, folder, carried=False):
    """Write a right checkpoint, with `carried` also labels and tokenizer files."""
    form = registry.find_format("hugging-face" if format == SHARDS else format)
    model = (
        (dataclasses.replace(CONFIG, pooler="none"), POOLED, "pooled")
        if form.modules
        else (CONFIG, WEIGHTS, "model")
    )
    saved(folder / "in", form.name, *model, CARRIED if carried else {})
    if format == SHARDS:
        shards(folder / "in")
    for path in (folder / "in").iterdir():
        path.rename(folder / path.name)
    (folder / "in").rmdir()
    for path in folder.rglob("commit_success.txt"):  # Orbax writes the folder's name into it
        path.write_text("successful")


def read(folder):
    checkpoint = porting.read(folder)
    checkpoint.checked()
    for entry in checkpoint.ledger:
        assert len(entry.sha256()) == 64


def read_as_it_is(folder):
    """Read a checkpoint whose digests match what was spoilt, as an attacker would write them."""
    path = folder / checkpoints.CONTENTS
    content = path.read_bytes()
    try:
        data = json.loads(content)
        data["sha256"] = {name: sha256_of(folder / name) for name in data["sha256"]}
        path.write_text(json.dumps(data))
    except (SpecError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
        pass  # this is the spoilt file
    try:
        read(folder)
    finally:
        path.write_bytes(content)
