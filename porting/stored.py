"""A tensor that lies in a file.

Its dtype and shape are known, its numbers are read when they are asked for.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

LARGEST_SHAPE, MOST_AXES = 1 << 40, 32
"""Elements of a tensor, as if none of its axes were empty, and its axes: a shape that says more is wrong."""


def shape_of(said: Any) -> tuple[int, ...]:
    """Return what a file says is a shape.

    Raises:
        ValueError: if it is none.
    """
    shape = tuple(said) if isinstance(said, (list, tuple)) else (None,)
    whole = len(shape) <= MOST_AXES and all(type(axis) is int and axis >= 0 for axis in shape)
    if not whole or math.prod(axis or 1 for axis in shape) > LARGEST_SHAPE:
        raise ValueError(f"{repr(said)[:60]} is no shape of a tensor")
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
