"""TensorFlow's checkpoints (an index and data files), through TensorFlow."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from concord.porting.file_tensors import NUMPY, Bits, StoredTensor, array_of, of_framework
from concord.spec.errors import SpecError, optional

SUFFIX, TF2 = ".index", "/.ATTRIBUTES/VARIABLE_VALUE"  # the latter is the suffix of every TensorFlow 2 key


def is_index(path: Path) -> bool:
    """Whether a file is an index, by name and data files."""
    pattern = f"{glob.escape(path.name.removesuffix(SUFFIX))}.data-*-of-*"
    return path.name.endswith(SUFFIX) and path.is_file() and any(path.parent.glob(pattern))


def load(path: Path) -> Mapping[str, StoredTensor]:
    """Tensors of a checkpoint."""
    with optional("a TensorFlow checkpoint", "tf"):
        import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path.with_suffix("")))
    shapes, tensors = reader.get_variable_to_shape_map(), {}
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if dtype == tf.string:  # such as the object graph
            continue
        if dtype.name not in NUMPY:
            raise SpecError(f"{name[:200]!r} has dtype {dtype.name}, which is not known")
        tensors[name] = StoredTensor(dtype.name, tuple(shapes[name]), partial(_bits, reader, name))
    return tensors


def _bits(reader: object, name: str) -> Bits:
    return of_framework(np.asarray(reader.get_tensor(name)), name).bits()  # type: ignore[attr-defined]


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors, and for TensorFlow 2 keys their object graph."""
    with optional("writing a TensorFlow checkpoint", "tf"):
        import tensorflow as tf

    prefix = str(path.with_suffix(""))
    if not all(name.endswith(TF2) for name in tensors):
        arrays = [array_of(tensor) for tensor in tensors.values()]
        slices = [""] * len(tensors)
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=list(tensors), shape_and_slices=slices, tensors=arrays)
        return
    # tf.train.Checkpoint.restore finds variables by this graph instead of their keys.
    root = tf.train.Checkpoint()
    for name, tensor in tensors.items():
        *outer, last = name.removesuffix(TF2).split("/")
        place = root
        for part in outer:
            if not hasattr(place, part):
                setattr(place, part, tf.train.Checkpoint())
            place = getattr(place, part)
        setattr(place, last, tf.Variable(array_of(tensor)))
    root.write(prefix)
