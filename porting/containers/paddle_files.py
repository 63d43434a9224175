"""PaddlePaddle's files: pickles, in which only code that builds arrays may run."""

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

LACKS = ("float8_e4m3fn", "float8_e5m2", "uint64", "uint32", "uint16")  # dtypes


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    # Pickles of protocol 2 encode bytes as Latin-1 text; no pickle of arrays uses another codec.
    if encoding not in ("latin1", "latin-1"):
        raise SpecError(f"it encodes bytes as {encoding[:40]!r}")
    return codecs.encode(text, "latin1")


# The functions that rebuild a NumPy array in pickles of protocol 2 to 4, and of protocol 5.
RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
FROM_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]

# All names that a pickle may refer to. NumPy 2 renames its core to ``_core``, and files of both versions
# exist.
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


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in ALLOWED:
            raise SpecError(
                f"it requests {path[:100]!r}, which no weight file needs; none of its code was run"
            )
        return ALLOWED[path]


def load(path: Path) -> Mapping[str, StoredTensor]:
    """Arrays of a file."""
    with path.open("rb") as file:
        tensors = flat(_Reader(file, encoding="latin1").load())
    return {
        # paddle.save stores bfloat16 as uint16, which PaddlePaddle's tensors do not support.
        name: StoredTensor("bfloat16", tensor.shape, tensor.bits) if tensor.dtype == "uint16" else tensor
        for name, tensor in tensors.items()
    }


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors as ``paddle.save`` writes a ``state_dict``."""
    with refusing(path), path.open("wb") as file:
        pickler = pickle.Pickler(file, 4)
        pickler.fast = True  # its memo would keep every array in memory
        pickler.dump(
            {name: np.asarray(tensor.bits(), NUMPY[tensor.dtype]) for name, tensor in tensors.items()}
        )
