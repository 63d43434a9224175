"""Keras' HDF5 files, and its ``.keras`` archives, which contain one.

Links and chunked or compressed datasets, which Keras never writes, are refused: they could read other files
or expand beyond the file's size.
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

WEIGHTS = "model.weights.h5"  # the member of an archive

MODEL = "tf_model"  # Hugging Face's name for a model's group


def load(path: Path | IO[bytes]) -> dict[str, StoredTensor]:
    """Datasets of a file by path."""
    with optional("an HDF5 file", "porting"):
        import h5py

    return dict(_datasets(h5py.File(path, "r"), ""))


def load_keras(path: Path) -> dict[str, StoredTensor]:
    """Weights of an archive, without its configuration, which may name code."""
    # An unnamed file disappears, however this process ends.
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise SpecError(f"{error}; it may be incomplete") from None
    with archive:
        entries = [entry for entry in archive.infolist() if entry.filename == WEIGHTS]
        if len(entries) != 1:
            raise SpecError(f"the archive has {len(entries)} members called {WEIGHTS} but must have one")
        if entries[0].compress_type != zipfile.ZIP_STORED:
            raise SpecError(f"its member {WEIGHTS!r} is compressed; Keras does not compress it")
        with archive.open(entries[0]) as member:
            shutil.copyfileobj(member, copy)
    return load(copy)


def load_models(path: Path) -> dict[str, StoredTensor]:
    """Weights of a Hugging Face model in Keras 2."""
    tensors: dict[str, StoredTensor] = {}
    for name, stored in load(path).items():
        # Paths are <layer>/<model>/<name>:0, where Keras generated the names of layer and model.
        short = "/".join(name.split("/")[2:]).removesuffix(":0") or name
        if short in tensors:
            raise SpecError(f"has two weights called {short[:200]!r}")
        tensors[short] = stored
    return tensors


def _datasets(group: Any, name: str) -> Iterator[tuple[str, StoredTensor]]:
    import h5py

    for key in group:
        inner = f"{name}/{key}" if name else key
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise SpecError(f"{inner[:200]!r} is a link that points elsewhere")
        member = group[key]
        if isinstance(member, h5py.Group):
            yield from _datasets(member, inner)
        elif isinstance(member, h5py.Dataset):
            yield inner, _dataset(member, inner)


def _dataset(member: Any, name: str) -> StoredTensor:
    elsewhere = member.is_virtual or member.external or member.chunks is not None
    # Storage smaller than the data means compression, or values that were never written.
    if elsewhere or member.id.get_storage_size() != member.size * member.dtype.itemsize:
        raise SpecError(
            f"{name[:200]!r} is in another file, chunked or compressed; Keras writes it to this file, in one "
            "block"
        )
    # HDF5 lacks bfloat16, so Keras stores two opaque bytes and names the dtype in an attribute.
    if member.dtype == np.dtype("V2") and member.attrs.get("dtype") == BFLOAT16:
        return StoredTensor(BFLOAT16, member.shape, lambda: member[()].view(np.uint16))
    dtype = of_framework(np.empty(0, member.dtype), name).dtype
    return StoredTensor(dtype, member.shape, partial(np.asarray, member))


def _put(group: Any, name: str, tensor: StoredTensor) -> None:
    array = tensor.array()
    dataset = group.create_dataset(name, data=array.view("V2") if tensor.dtype == BFLOAT16 else array)
    if tensor.dtype == BFLOAT16:
        dataset.attrs["dtype"] = BFLOAT16


def _created(path: Path) -> Any:
    with optional("writing HDF5", "porting"):
        import h5py
    return h5py.File(path, "w", track_order=True)  # h5py would sort by name: layer 10 before layer 2


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write each tensor at its path."""
    with refusing(path), _created(path) as file:
        for name, tensor in tensors.items():
            _put(file, name, tensor)


def save_models(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write weights in the form of Keras 2."""
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(name.partition("/")[0], []).append(name)
    with refusing(path), _created(path) as file:
        # Keras 2 finds layers and weights by these attributes.
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.15.0"
        for layer, names in layers.items():
            group = file.create_group(layer, track_order=True)
            group.attrs["weight_names"] = [f"{MODEL}/{name}:0".encode() for name in names]
            for name in names:
                _put(group, f"{MODEL}/{name}:0", tensors[name])


def save_keras(path: Path, tensors: Mapping[str, StoredTensor], members: Mapping[str, str]) -> None:
    """Write weights to an archive, with the other ``members`` from which Keras builds the model."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save(Path(folder) / WEIGHTS, tensors)
        # Keras stores its members uncompressed; load_keras refuses compressed ones.
        with refusing(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.write(Path(folder) / WEIGHTS, WEIGHTS)
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), content)
