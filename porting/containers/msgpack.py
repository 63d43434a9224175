"""Flax's msgpack: dictionaries in each other, and arrays as an extension of the format.

https://flax.readthedocs.io/en/latest/guides/training_techniques/use_checkpointing.html; the extension is that of ``flax.serialization``: type 1 is a
packed list of shape, dtype and bytes. An array of more than 2^30 bytes is a dictionary of pieces. Only headers are read here, by a walk over the
file that keeps no bytes; the numbers are memory-mapped.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.stored import NUMPY, Bits, Slice, Stored, are_sizes, size
from concord.spec.errors import SpecError, optional
from concord.spec.files import Write, opened, writing

SUFFIX = ".msgpack"

DEEPEST = 50
"""How deep dictionaries may lie in each other."""

MOST = 1 << 20
"""Entries of a file."""

LARGEST_PIECE = 1 << 30
"""Bytes of an array that are written in one piece, as Flax does."""

NDARRAY, SCALAR = 1, 3
"""The types of extensions that hold numbers."""

CHUNKED = "__msgpack_chunked_array__"


def is_one(path: Path) -> bool:
    """Say whether a file is one, by its name and its first byte: a dictionary."""
    if not path.name.endswith(SUFFIX) or not path.is_file():
        return False
    with opened(path) as file:
        first = file.read(1)
    return bool(first) and (first[0] & 0xF0 == 0x80 or first[0] in (0xDE, 0xDF))


def read(path: Path) -> dict[str, Stored]:
    """Return the arrays of a file; the names of dictionaries are joined by dots.

    Raises:
        SpecError: if it is no whole file of dictionaries and arrays.
    """
    with opened(path) as file:
        if not file.seek(0, 2):
            raise SpecError(f"{path}: is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    walk = _Walk(mapped)
    try:
        found = walk.value(0)
        if walk.place != len(mapped):
            raise ValueError(f"{len(mapped) - walk.place} bytes follow the dictionary")
        return dict(_tensors(found, ""))
    except (ValueError, struct.error, RecursionError, OverflowError) as error:
        raise SpecError(
            f"{path}: not a whole msgpack file of arrays: {error} (at byte {walk.place})"
        ) from None


class _Walk:
    """Goes over a file value by value; what is long stays in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place, self.count = data, 0, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.place + count > len(self.data):
            raise ValueError(f"it says that {count} bytes follow, but it ends before")
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, kind: str) -> Any:
        return struct.unpack(f">{kind}", self.take(struct.calcsize(f">{kind}")))[0]

    def value(self, depth: int) -> Any:
        """Return the next value: a dictionary, a list, a text, a number, or an array as a :class:`Stored`."""
        self.count += 1
        if depth > DEEPEST or self.count > MOST:
            raise ValueError(f"it lies more than {DEEPEST} deep, or has more than {MOST} entries")
        code = self.take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code < 0x90:
            return self.entries(code & 15, depth)
        if code < 0xA0:
            return [self.value(depth + 1) for _ in range(code & 15)]
        if code < 0xC0:
            return self.take(code & 31).decode()
        if code not in _OTHERS:
            raise ValueError(f"it has the code {code:#x}, which says nothing")
        return _OTHERS[code](self, depth)

    def entries(self, count: int, depth: int) -> dict[Any, Any]:
        if count > MOST:
            raise ValueError(f"a dictionary of {count} entries")
        found = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)):
                raise ValueError("a name is neither text nor number")
            if key in found:
                raise ValueError(f"the name {str(key)[:60]!r} is there twice")
            found[key] = self.value(depth + 1)
        return found

    def several(self, count: int, depth: int) -> list[Any]:
        if count > MOST:
            raise ValueError(f"a list of {count} entries")
        return [self.value(depth + 1) for _ in range(count)]

    def skip(self, count: int) -> tuple[int, int]:
        """Pass over bytes; return where they begin and end."""
        if self.place + count > len(self.data):
            raise ValueError(f"it says that {count} bytes follow, but it ends before")
        self.place += count
        return self.place - count, self.place

    def extension(self, count: int, depth: int) -> Any:
        kind = self.number("b")
        begin, end = self.skip(count)
        if kind not in (NDARRAY, SCALAR):
            return None
        self.place = begin
        found = self.value(depth + 1)
        if self.place != end or not isinstance(found, list) or len(found) != 3:
            raise ValueError("an array is no list of shape, dtype and bytes")
        return _array(self.data, *found)


def _array(data: mmap.mmap, shape: Any, dtype: Any, content: Any) -> Stored:
    if isinstance(dtype, str) and dtype in NUMPY and isinstance(content, tuple) and are_sizes(shape):
        begin, end = content
        if size(dtype, tuple(shape)) == end - begin:
            return Stored(dtype, tuple(shape), Slice(data, begin, dtype, tuple(shape)))
    raise ValueError(
        f"an array has shape {repr(shape)[:60]} and dtype {str(dtype)[:20]!r}, and not the bytes for them"
    )


_OTHERS: dict[int, Callable[[_Walk, int], Any]] = {
    0xC0: lambda w, d: None,
    0xC2: lambda w, d: False,
    0xC3: lambda w, d: True,
    0xC4: lambda w, d: w.skip(w.number("B")),
    0xC5: lambda w, d: w.skip(w.number("H")),
    0xC6: lambda w, d: w.skip(w.number("I")),
    0xC7: lambda w, d: w.extension(w.number("B"), d),
    0xC8: lambda w, d: w.extension(w.number("H"), d),
    0xC9: lambda w, d: w.extension(w.number("I"), d),
    0xCA: lambda w, d: w.number("f"),
    0xCB: lambda w, d: w.number("d"),
    0xCC: lambda w, d: w.number("B"),
    0xCD: lambda w, d: w.number("H"),
    0xCE: lambda w, d: w.number("I"),
    0xCF: lambda w, d: w.number("Q"),
    0xD0: lambda w, d: w.number("b"),
    0xD1: lambda w, d: w.number("h"),
    0xD2: lambda w, d: w.number("i"),
    0xD3: lambda w, d: w.number("q"),
    0xD4: lambda w, d: w.extension(1, d),
    0xD5: lambda w, d: w.extension(2, d),
    0xD6: lambda w, d: w.extension(4, d),
    0xD7: lambda w, d: w.extension(8, d),
    0xD8: lambda w, d: w.extension(16, d),
    0xD9: lambda w, d: w.take(w.number("B")).decode(),
    0xDA: lambda w, d: w.take(w.number("H")).decode(),
    0xDB: lambda w, d: w.take(w.number("I")).decode(),
    0xDC: lambda w, d: w.several(w.number("H"), d),
    0xDD: lambda w, d: w.several(w.number("I"), d),
    0xDE: lambda w, d: w.entries(w.number("H"), d),
    0xDF: lambda w, d: w.entries(w.number("I"), d),
}
"""What a code means that says no length itself: https://github.com/msgpack/msgpack/blob/master/spec.md."""


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Stored]]:
    """Yield the arrays in dictionaries, by name; what is no array is passed over."""
    if isinstance(value, Stored):
        yield name, value
    elif isinstance(value, dict):
        if CHUNKED in value:
            yield name, _joined(value)
            return
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))


def _joined(entries: Mapping[Any, Any]) -> Stored:
    """Return an array that is kept in pieces, as ``flax.serialization`` does with long ones."""
    shape, chunks = (
        list(entries[key].values()) if isinstance(entries.get(key), dict) else []
        for key in ("shape", "chunks")
    )
    if not chunks or not all(isinstance(piece, Stored) for piece in chunks) or not are_sizes(shape):
        raise ValueError("an array of pieces has no shape, or no pieces")
    dtype, count = chunks[0].dtype, sum(math.prod(piece.shape) for piece in chunks)
    if count != math.prod(shape) or any(piece.dtype != dtype for piece in chunks):
        raise ValueError(f"an array of pieces has shape {repr(shape)[:60]} but {count} elements")

    def bits() -> Bits:
        return np.concatenate([piece.bits().reshape(-1) for piece in chunks]).reshape(shape)

    return Stored(dtype, tuple(shape), bits)


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one, as ``flax.serialization.msgpack_serialize`` writes dictionaries in each other.

    Raises:
        SpecError: if it cannot be written.
    """
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor
    with writing(path) as put:
        _put(put, tree)


def _put(put: Write, value: Any) -> None:
    with optional("to write msgpack", "porting"):
        import msgpack

    packer = msgpack.Packer()
    if isinstance(value, dict):
        put(packer.pack_map_header(len(value)))
        for key, inner in value.items():
            put(packer.pack(key))
            _put(put, inner)
        return
    if not isinstance(value, Stored):
        put(packer.pack(value))
        return
    if value.size > LARGEST_PIECE:
        _put(put, _pieces(value))
        return
    head = (
        packer.pack_array_header(3)
        + packer.pack(list(value.shape))
        + packer.pack(value.dtype)
        + b"\xc6"
        + struct.pack(">I", value.size)
    )
    put(b"\xc9" + struct.pack(">Ib", len(head) + value.size, NDARRAY) + head)
    put(value.data())


def _pieces(value: Stored) -> dict[str, Any]:
    flat, width = value.bits().reshape(-1), np.dtype(NUMPY[value.dtype]).itemsize
    step = LARGEST_PIECE // width
    chunks = [flat[begin : begin + step] for begin in range(0, len(flat), step)]
    pieces = {
        str(n): Stored(value.dtype, chunk.shape, partial(np.asarray, chunk)) for n, chunk in enumerate(chunks)
    }
    return {
        CHUNKED: True,
        "shape": {str(n): length for n, length in enumerate(value.shape)},
        "chunks": pieces,
    }
