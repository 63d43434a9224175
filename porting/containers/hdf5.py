"""HDF5 files of Keras: groups in each other, and datasets.

``.keras`` is an archive with one and the model's configuration.

Links that lead elsewhere, to another name or another file, are refused, and so are datasets in pieces or
compressed: Keras writes none.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from concord.porting.file_tensors import StoredTensor, of_framework
from concord.spec.errors import SpecError, optional
from concord.spec.files import refusing

BFLOAT16 = "bfloat16"

WEIGHTS = "model.weights.h5"
"""The member of an archive of Keras that holds the weights."""

MODEL = "tf_model"
"""What a model of Hugging Face is called in what is written."""


def load(path: Path | IO[bytes]) -> dict[str, StoredTensor]:
    """Return the datasets of a file by their paths."""
    with optional("an HDF5 file", "porting"):
        import h5py

    return dict(_datasets(h5py.File(path, "r"), ""))


def load_keras(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of an archive by their paths; its configuration may name code, and stays unread."""
    # Without a name: nothing is left of it, however this process ends.
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename == WEIGHTS]
        if len(entries) != 1:
            raise SpecError(
                f"the archive has {len(entries)} members that are called {WEIGHTS} but must have one"
            )
        if entries[0].compress_type != zipfile.ZIP_STORED:
            raise SpecError(f"its member {WEIGHTS!r} is compressed; Keras' is not")
        with archive.open(entries[0]) as member:
            shutil.copyfileobj(member, copy)
    return load(copy)


def load_models(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of a model of Hugging Face, as Keras 2 wrote them.

    ``<layer>/<model>/<name>:0``, by their names alone.

    The name of the model, which nobody chose, is left out, and that of the layer with it.
    """
    found: dict[str, StoredTensor] = {}
    for name, stored in load(path).items():
        short = "/".join(name.split("/")[2:]).removesuffix(":0") or name
        if short in found:
            raise SpecError(f"has two weights that are called {short[:200]!r}")
        found[short] = stored
    return found


def _datasets(group: Any, name: str) -> Iterator[tuple[str, StoredTensor]]:
    import h5py

    for key in group:
        inner = f"{name}/{key}" if name else key
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise SpecError(f"{inner[:200]!r} is a link that leads elsewhere")
        member = group[key]
        if isinstance(member, h5py.Group):
            yield from _datasets(member, inner)
        elif isinstance(member, h5py.Dataset):
            yield inner, _dataset(member, inner)


def _dataset(member: Any, name: str) -> StoredTensor:
    elsewhere = member.is_virtual or member.external or member.chunks is not None
    if elsewhere or member.id.get_storage_size() != member.size * member.dtype.itemsize:
        raise SpecError(
            f"{name[:200]!r} lies in another file, in pieces, or compressed; Keras writes it here, in one"
        )
    if member.dtype == np.dtype("V2") and member.attrs.get("dtype") == BFLOAT16:
        return StoredTensor(BFLOAT16, member.shape, lambda: member[()].view(np.uint16))
    described = of_framework(np.empty(0, member.dtype), name)
    return StoredTensor(described.dtype, member.shape, partial(np.asarray, member))


def _put(group: Any, name: str, tensor: StoredTensor) -> None:
    """Write a tensor into a group; Keras says in an attribute that two bytes are bfloat16."""
    array = tensor.array()
    dataset = group.create_dataset(name, data=array.view("V2") if tensor.dtype == BFLOAT16 else array)
    if tensor.dtype == BFLOAT16:
        dataset.attrs["dtype"] = BFLOAT16


def _created(path: Path) -> Any:
    with optional("to write HDF5", "porting"):
        import h5py
    return h5py.File(path, "w", track_order=True)


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors, one by one, each at its path."""
    with refusing(path), _created(path) as file:
        for name, tensor in tensors.items():
            _put(file, name, tensor)


def save_models(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write weights as Keras 2 did: a group for each layer of the model, which lists its weights' names."""
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(name.partition("/")[0], []).append(name)
    with refusing(path), _created(path) as file:
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.15.0"
        for layer, names in layers.items():
            group = file.create_group(layer, track_order=True)
            group.attrs["weight_names"] = [f"{MODEL}/{name}:0".encode() for name in names]
            for name in names:
                _put(group, f"{MODEL}/{name}:0", tensors[name])


def save_keras(path: Path, tensors: Mapping[str, StoredTensor], members: Mapping[str, str]) -> None:
    """Write the weights into an archive.

    Args:
        members: what else Keras wants in it, to make the model from it.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save(Path(folder) / WEIGHTS, tensors)
        with refusing(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.write(Path(folder) / WEIGHTS, WEIGHTS)
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), content)
