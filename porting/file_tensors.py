"""Tensors that lie in files.

Their dtypes and shapes are known, their numbers are read when they are asked for.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.errors import SpecError
from concord.spec.sources.layouts import contiguous

Bits = NDArray[Any]
"""Numbers as a file holds them; NumPy has no bfloat16 and no 8-bit floats, so their bits come as unsigned
integers."""

NUMPY: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
}
"""The dtypes that files may hold, by name, and the dtype of NumPy that holds their bits."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Those that weights may have."""

MOST_ENTRIES = 1 << 18
"""Entries of dictionaries in a file, each counted as often as it is met: a pickle of few bytes may have more
than there is time for."""


def shape_of(axes: Any) -> tuple[int, ...]:
    """Return what a file says is a shape.

    Raises:
        ValueError: if NumPy has no arrays of it, even where an axis is empty.
    """
    shape = tuple(axes) if isinstance(axes, (list, tuple)) else (None,)
    whole = len(shape) <= 32 and all(type(axis) is int and axis >= 0 for axis in shape)
    if not whole or math.prod(axis or 1 for axis in shape) > 1 << 40:
        raise ValueError(f"{repr(axes)[:60]} is no shape of a tensor")
    return shape


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes in a file."""
    return math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize


def widened(bits: Bits, dtype: str) -> Bits:
    """Return numbers from their bits: bfloat16 as float32, exactly; all else as it is."""
    if dtype != "bfloat16":
        return bits
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        dtype: one of :data:`NUMPY`.
        shape: as the file has it.
        bits: reads its numbers as they are stored, memory-mapped where that is possible; a new call reads
            anew.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Callable[[], Bits] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return size(self.dtype, self.shape)

    def data(self) -> memoryview | bytes:
        """Return its bytes in C order, the least significant byte of a number first."""
        bits = self.array()
        return bits.data.cast("B") if bits.size else b""

    def array(self) -> Bits:
        """Return its bits in C order."""
        return contiguous(np.asarray(self.bits(), NUMPY[self.dtype]))

    def sha256(self) -> str:
        """Return the digest of these bytes."""
        return hashlib.sha256(self.data()).hexdigest()

    @property
    def held(self) -> tuple[str, str]:
        """What it holds: its dtype, and the digest of its bits."""
        return self.dtype, self.sha256()


def sliced(mapped: mmap.mmap | bytes, begin: int, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a tensor of a file that is mapped, as a view of it; one of no elements too.

    Args:
        mapped: the file, or bytes.
        begin: the byte at which the tensor begins; whoever calls this has seen that it ends in the file.
    """

    def bits() -> Bits:
        if not math.prod(shape):
            return np.zeros(shape, NUMPY[dtype])
        return np.ndarray(shape, NUMPY[dtype], mapped, begin)

    return StoredTensor(dtype, shape, bits)


def in_memory(array: Bits, dtype: str | None = None) -> StoredTensor:
    """Return an array as a tensor of a file.

    Args:
        dtype: by default the array's own.
    """
    return StoredTensor(dtype or array.dtype.name, array.shape, lambda: array)


def digest(array: Bits) -> str:
    """Return the SHA-256 of the bits of an array, in C order."""
    return in_memory(array).sha256()


def of_framework(value: Any, name: str) -> StoredTensor:
    """Return an array of NumPy, whose dtype may be one that a framework adds, as a tensor of a file.

    Raises:
        SpecError: for a dtype that files of weights do not have.
    """
    array = np.asarray(value)
    if array.dtype.name not in NUMPY or array.dtype.byteorder == ">":
        raise SpecError(f"{name[:200]!r} has dtype {str(array.dtype)[:60]}, which is not known")
    return in_memory(array.view(NUMPY[array.dtype.name]), array.dtype.name)


def array_of(stored: StoredTensor) -> Any:
    """Return a tensor as an array of the dtypes that TensorFlow and JAX have."""
    import ml_dtypes

    bits = stored.array()
    return bits if bits.dtype.name == stored.dtype else bits.view(getattr(ml_dtypes, stored.dtype))


def tree(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as dictionaries in each other, by the parts of their names between dots."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found


def flat(tree: Any, tensor: Callable[[Any, str], StoredTensor] = of_framework) -> dict[str, StoredTensor]:
    """Return the arrays in dictionaries and lists, by names joined by dots; what is no array is passed over.

    Args:
        tensor: makes a tensor of an array and its name.

    Raises:
        SpecError: if there are too many, or two of one name.
    """
    found: dict[str, StoredTensor] = {}
    for count, (name, value) in enumerate(_entries(tree, "")):
        if count > MOST_ENTRIES:
            raise SpecError(f"it holds more than {MOST_ENTRIES} entries")
        if isinstance(value, StoredTensor) or hasattr(value, "dtype"):
            if name in found:
                raise SpecError(f"has two tensors that are called {name[:200]!r}")
            found[name] = value if isinstance(value, StoredTensor) else tensor(value, name)
    return found


def _entries(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield whatever lies in a tree, by its name."""
    yield name, tree
    if isinstance(tree, (dict, list, tuple)):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _entries(inner, f"{name}.{key}" if name else str(key))
