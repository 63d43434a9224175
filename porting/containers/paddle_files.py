"""PaddlePaddle's own files: pickles of arrays, of which nothing is run but what makes arrays.

PaddlePaddle's own reader would run whatever they name, and so is not asked.
"""

from __future__ import annotations

import codecs
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.file_tensors import NUMPY, StoredTensor, flat
from concord.spec.errors import SpecError
from concord.spec.files import refusing

LACKS = ("float8_e4m3fn", "float8_e5m2", "uint64", "uint32", "uint16")
"""Dtypes that PaddlePaddle does not have."""


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes as Python 2 spells them."""
    if encoding not in ("latin1", "latin-1"):
        raise SpecError(f"it spells bytes in {encoding[:40]!r}")
    return codecs.encode(text, "latin1")


RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
FROM_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]
"""What NumPy makes an array with."""

ALLOWED: Mapping[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    **{f"{module}.bytes": bytes for module in ("builtins", "__builtin__")},
    "_codecs.encode": _encoded,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": lambda code, *_: np.dtype(code, copy=True),  # a pickle may change it
    **{
        f"numpy.{core}.{name}": function
        for core in ("core", "_core")
        for name, function in (
            ("multiarray._reconstruct", RECONSTRUCT),
            ("numeric._frombuffer", FROM_BUFFER),
            ("multiarray.scalar", lambda *_: None),
        )
    },
}
"""All that a pickle may name, and what is taken for it."""


class _Reader(pickle.Unpickler):
    """Reads a pickle that names nothing but what is allowed."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what is taken for a class or function; nobody looks for it."""
        asked = f"{module}.{name}"
        if asked not in ALLOWED:
            raise SpecError(
                f"it asks for {asked[:100]!r}, which no file of weights needs; nothing of it was run"
            )
        return ALLOWED[asked]


def load(path: Path) -> Mapping[str, StoredTensor]:
    """Return the arrays of a file, which keeps bfloat16 as uint16 and has no tensors of that."""
    with path.open("rb") as file:
        found = flat(_Reader(file, encoding="latin1").load())
    return {
        name: StoredTensor("bfloat16", one.shape, one.bits) if one.dtype == "uint16" else one
        for name, one in found.items()
    }


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors as ``paddle.save`` writes a ``state_dict``."""
    with refusing(path), path.open("wb") as file:
        pickler = pickle.Pickler(file, 4)
        pickler.fast = True  # remembers, and so holds, no array
        pickler.dump(
            {name: np.asarray(tensor.bits(), NUMPY[tensor.dtype]) for name, tensor in tensors.items()}
        )
