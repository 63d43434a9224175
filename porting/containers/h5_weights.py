"""HDF5 files of models of Hugging Face on TensorFlow, as Keras 2 wrote weights: a group for each layer of the model, which lists its weights' names.

A dataset is ``<layer>/<model>/<name>:0``; the name of the model, which nobody chose, is left out here, and that of the layer with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from concord.porting.containers import h5
from concord.porting.containers.h5 import is_one as is_one
from concord.porting.stored import Stored
from concord.spec.errors import SpecError, optional
from concord.spec.files import refusing

MODEL = "tf_model"
"""What the model is called in what is written."""


def read(path: Path) -> dict[str, Stored]:
    """Return the weights of a file by the names that the model gives them, without ``:0``.

    Raises:
        SpecError: as :func:`concord.porting.containers.h5.read`, and if two weights bear one name.
    """
    found: dict[str, Stored] = {}
    for name, stored in h5.read(path).items():
        short = "/".join(name.split("/")[2:]).removesuffix(":0") or name
        if short in found:
            raise SpecError(f"{path}: has two weights that are called {short!r}")
        found[short] = stored
    return found


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write weights, one by one.

    Raises:
        SpecError: if it cannot be written.
    """
    with optional("to write HDF5", "porting"):
        import h5py

    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault(name.partition("/")[0], []).append(name)
    with refusing(path), h5py.File(path, "w", track_order=True) as file:
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.15.0"
        for layer, names in layers.items():
            group = file.create_group(layer, track_order=True)
            group.attrs["weight_names"] = [f"{MODEL}/{name}:0".encode() for name in names]
            for name in names:
                h5.put(group, f"{MODEL}/{name}:0", tensors[name])
