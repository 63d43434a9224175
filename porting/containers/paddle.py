"""PaddlePaddle's own files, ``.pdparams``: a pickle of NumPy arrays by name, read as in :mod:`concord.porting.pickles`."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from concord.porting.containers.torch import named, number, numbers, text
from concord.porting.located import located, mapped
from concord.porting.pickles.reader import look
from concord.porting.stored import NUMPY, Stored
from concord.spec.errors import SpecError
from concord.spec.files import opened, writing

SUFFIX = ".pdparams"

HELD = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes that PaddlePaddle has."""


def is_one(path: Path) -> bool:
    """Say whether a file is PaddlePaddle's, by its name and its first byte."""
    if not path.name.endswith(SUFFIX) or not path.is_file():
        return False
    with opened(path) as file:
        return file.read(1) == pickle.PROTO


def read(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file; nothing of its pickle is run. PaddlePaddle keeps bfloat16 as uint16, and has no tensors of that.

    Raises:
        SpecError: if it is no pickle of arrays, or would have code run.
    """
    found = [
        dataclasses.replace(one, dtype="bfloat16") if one.dtype == "uint16" else one
        for one in located(path, look)
    ]
    return mapped(path, found)


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one, as ``paddle.save`` writes a ``state_dict``.

    Raises:
        SpecError: if PaddlePaddle has no such dtype, or it cannot be written.
    """
    if wrong := [
        f"{name!r} has dtype {tensor.dtype}, which PaddlePaddle does not have"
        for name, tensor in tensors.items()
        if tensor.dtype not in HELD
    ]:
        raise SpecError(wrong)
    with writing(path) as put:
        put(pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.MARK)
        for name, tensor in tensors.items():
            for part in _array(name, tensor):
                put(part)
        put(pickle.SETITEMS + pickle.STOP)


def _array(name: str, tensor: Stored) -> Iterator[bytes | memoryview]:
    """Yield an array as NumPy has itself rebuilt: an empty one, and its state."""
    code = np.dtype(NUMPY[tensor.dtype])
    order = pickle.SHORT_BINUNICODE + b"\x01" + (b"<" if code.itemsize > 1 else b"|")
    yield (
        text(name)
        + named("numpy.core.multiarray", "_reconstruct")
        + named("numpy", "ndarray")
        + numbers((0,))
    )
    yield (
        pickle.SHORT_BINBYTES
        + b"\x01b"
        + pickle.TUPLE3
        + pickle.REDUCE
        + pickle.MARK
        + number(1)
        + numbers(tensor.shape)
    )
    yield (
        named("numpy", "dtype")
        + text(code.str[1:])
        + pickle.NEWFALSE
        + pickle.NEWTRUE
        + pickle.TUPLE3
        + pickle.REDUCE
    )
    minus = pickle.BININT + struct.pack("<i", -1)
    yield (
        pickle.MARK
        + number(3)
        + order
        + pickle.NONE * 3
        + minus * 2
        + number(0)
        + pickle.TUPLE
        + pickle.BUILD
    )
    content = tensor.data()
    yield pickle.NEWFALSE + pickle.BINBYTES8 + struct.pack("<Q", len(content))
    yield content
    yield pickle.TUPLE + pickle.BUILD
