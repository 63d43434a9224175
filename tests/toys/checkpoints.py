"""Small right checkpoints of every format, for tests that spoil them."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np

from concord import porting, spec
from concord.porting import registry
from concord.porting.bugs.files import sharded
from concord.porting.containers.pickles import MAGIC, PROTOCOL
from concord.spec import checkpoints
from concord.spec.errors import SpecError
from concord.spec.files import sha256_of

SIZES = {
    "vocab_size": 29,
    "d_model": 14,
    "num_heads": 2,
    "d_ff": 17,
    "num_classes": 3,
    "num_layers": 1,
    "max_positions": 13,
}
CONFIG = spec.variant("bert", **SIZES)
WEIGHTS = {name: array.astype(np.float32) for name, array in spec.initialize(CONFIG, seed=3).items()}

SHARDS, OLD_TORCH = "hugging-face in two files", "torch before 1.6"

CARRIED = {
    "labels.json": b'{"format": "concord.labels/1", "names": ["a", "b", "c"]}',
    "tokenizer.json": b'{"version": "1.0"}',
    "vocab.txt": b"[PAD]\na\n",
}

POOLED = {name: array for name, array in WEIGHTS.items() if not name.startswith(("pooler", "classifier"))}
"""Those of the same sizes that a sentence embedding is made with."""

SENTENCES = "sentence-transformers"


def form_of(format: str) -> registry.Format:
    """Return a format; some are written in more than one way."""
    return registry.known({SHARDS: "hugging-face", OLD_TORCH: "torch"}.get(format, format))


def written(format: str, folder: Path, carried: bool = False) -> None:
    """Write a right checkpoint.

    Args:
        carried: whether with what is carried over beside the weights.
    """
    form = form_of(format)
    model = (
        (dataclasses.replace(CONFIG, pooler="none"), POOLED, "pooled")
        if form.modules
        else (CONFIG, WEIGHTS, "model")
    )
    porting.write(porting.from_weights(*model, CARRIED if carried else {}), folder / "in", form.name)
    if format == SHARDS:
        sharded(lambda _, shards: shards)(folder / "in", form)
    if format == OLD_TORCH:
        (folder / "in" / form.weights[0]).write_bytes(before_archives(folder / "in" / form.weights[0]))
    for path in (folder / "in").iterdir():
        path.rename(folder / path.name)
    (folder / "in").rmdir()


def before_archives(path: Path) -> bytes:
    """Return a file of PyTorch as it was before 1.6: five pickles, then the storages."""
    with zipfile.ZipFile(path) as archive:
        keys = sorted(name.rpartition("/")[2] for name in archive.namelist() if "/data/" in name)
        storages = [archive.read(f"archive/data/{key}") for key in keys]
        content = archive.read("archive/data.pkl")
    about = {
        "protocol_version": PROTOCOL,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    head = [pickle.dumps(value, 2) for value in (MAGIC, PROTOCOL, about)]
    return b"".join(
        (
            *head,
            content,
            pickle.dumps(keys, 2),
            *(struct.pack("<q", len(storage) // 4) + storage for storage in storages),
        )
    )


def read(folder: Path) -> None:
    """Read all that there is to read."""
    checkpoint = porting.read(folder)
    checkpoint.checked()
    for entry in checkpoint.ledger:
        assert len(entry.sha256) == 64


def read_as_it_is(folder: Path) -> None:
    """Read one of this project's own, whose digests are made those of what is spoilt.

    Somebody who wants to do harm writes them too.
    """
    path = folder / checkpoints.CONTENTS
    said = path.read_bytes()
    try:
        data = json.loads(said)
        data["sha256"] = {name: sha256_of(folder / name) for name in data["sha256"]}
        path.write_text(json.dumps(data))
    except (SpecError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
        pass  # that file is the spoilt one
    try:
        read(folder)
    finally:
        path.write_bytes(said)
