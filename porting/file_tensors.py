"""Tensors in files, with known dtype and shape, read on request."""

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

# NumPy lacks bfloat16 and 8-bit floats, so their bits are unsigned integers.
Bits = NDArray[Any]

# The dtypes of files, and the NumPy dtype of their bits; little-endian in every format.
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

FLOATS = ("float64", "float32", "float16", "bfloat16")  # those of weights

# Maximum entries of nested dictionaries, including repetitions. A pickle of a few bytes may refer to the same
# dictionary many times, and thus expand without practical limit.
MOST_ENTRIES = 1 << 18


def shape_of(axes: Any) -> tuple[int, ...]:
    """The shape stated by a file.

    Raises:
        ValueError: if it is not valid for a NumPy array.
    """
    shape = tuple(axes) if isinstance(axes, (list, tuple)) else (None,)
    # Before version 2, NumPy arrays had at most 32 axes. Sizes are limited even if another axis is 0.
    valid = len(shape) <= 32 and all(type(axis) is int and axis >= 0 for axis in shape)
    if not valid or math.prod(axis or 1 for axis in shape) > 1 << 40:
        raise ValueError(f"{repr(axes)[:60]} is not a tensor shape")
    return shape


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes."""
    return math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize


def widened(bits: Bits, dtype: str) -> Bits:
    """Convert bfloat16 exactly to float32; other dtypes are unchanged."""
    if dtype != "bfloat16":
        return bits
    # bfloat16 is the upper half of a float32.
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, read again by each call of ``bits``, memory-mapped if possible."""

    dtype: str
    shape: tuple[int, ...]
    bits: Callable[[], Bits] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return size(self.dtype, self.shape)

    def data(self) -> memoryview | bytes:
        """Bytes in C order, little-endian."""
        bits = self.array()
        return bits.data.cast("B") if bits.size else b""  # an empty view cannot be cast

    def array(self) -> Bits:
        """Bits in C order."""
        return contiguous(np.asarray(self.bits(), NUMPY[self.dtype]))

    def sha256(self) -> str:
        """Digest of :meth:`data`."""
        return hashlib.sha256(self.data()).hexdigest()

    @property
    def held(self) -> tuple[str, str]:
        """Dtype and digest, which are equal for tensors with the same bits."""
        return self.dtype, self.sha256()


def sliced(mapped: mmap.mmap | bytes, begin: int, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """View mapped bytes as a tensor. The caller checks bounds."""

    def bits() -> Bits:
        if not math.prod(shape):
            return np.zeros(shape, NUMPY[dtype])
        return np.ndarray(shape, NUMPY[dtype], mapped, begin)

    return StoredTensor(dtype, shape, bits)


def in_memory(array: Bits, dtype: str | None = None) -> StoredTensor:
    """Wrap an array whose bits may represent a different dtype."""
    return StoredTensor(dtype or array.dtype.name, array.shape, lambda: array)


def digest(array: Bits) -> str:
    """SHA-256 of an array's bits, in C order."""
    return in_memory(array).sha256()


def of_framework(value: Any, name: str) -> StoredTensor:
    """Wrap an array whose dtype may extend NumPy."""
    array = np.asarray(value)
    if array.dtype.name not in NUMPY or array.dtype.byteorder == ">":
        raise SpecError(f"{name[:200]!r} has dtype {str(array.dtype)[:60]}, which is not known")
    return in_memory(array.view(NUMPY[array.dtype.name]), array.dtype.name)


def array_of(stored: StoredTensor) -> Any:
    """An array with dtypes of ``ml_dtypes``, for TensorFlow and JAX."""
    import ml_dtypes

    bits = stored.array()
    return bits if bits.dtype.name == stored.dtype else bits.view(getattr(ml_dtypes, stored.dtype))


def tree(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Nest tensors in dictionaries at the dots of their names."""
    root: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = root
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor
    return root


def flat(tree: Any, tensor: Callable[[Any, str], StoredTensor] = of_framework) -> dict[str, StoredTensor]:
    """Arrays in nested dictionaries and lists by dotted names, skipping other values."""
    tensors: dict[str, StoredTensor] = {}
    for count, (name, value) in enumerate(_entries(tree, "")):
        if count > MOST_ENTRIES:
            raise SpecError(f"it holds more than {MOST_ENTRIES} entries")
        if isinstance(value, StoredTensor) or hasattr(value, "dtype"):
            if name in tensors:
                raise SpecError(f"has two tensors called {name[:200]!r}")
            tensors[name] = value if isinstance(value, StoredTensor) else tensor(value, name)
    return tensors


def _entries(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, tree
    if isinstance(tree, (dict, list, tuple)):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _entries(inner, f"{name}.{key}" if name else str(key))
