"""Flax's msgpack files: nested dictionaries of arrays (``flax.serialization``).

Extension type 1 has shape, dtype and bytes. Arrays beyond 2^30 bytes are dictionaries of pieces.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.file_tensors import NUMPY, Bits, StoredTensor, flat, shape_of, size, sliced, tree
from concord.spec.errors import SpecError, optional, refuse
from concord.spec.files import Write, writing

# msgpack stores the size of an extension in 32 bits, and an array's header takes some bytes.
LARGEST = (1 << 32) - (1 << 10)

NDARRAY, SCALAR = 1, 3  # extension types for numbers

CHUNKED = "__msgpack_chunked_array__"


def load(path: Path) -> dict[str, StoredTensor]:
    """Arrays of a file by dotted names."""
    with optional("a msgpack file", "porting"):
        import msgpack

    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(
            file,
            max_buffer_size=max(path.stat().st_size, 1 << 20),
            strict_map_key=False,
            ext_hook=_extension,
            object_pairs_hook=_entries,
        )
        content = unpacker.unpack()
        if unpacker.tell() != path.stat().st_size:
            raise SpecError(f"{path.stat().st_size - unpacker.tell()} bytes follow the dictionary")
    return flat(content)


def _entries(pairs: list[tuple[Any, Any]]) -> Any:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise SpecError(
            f"the name {next(str(name) for name in names if names.count(name) > 1)[:60]!r} appears twice"
        )
    return _joined(entries) if CHUNKED in entries else entries


def _extension(code: int, payload: bytes) -> StoredTensor | None:
    import msgpack

    if code not in (NDARRAY, SCALAR):
        return None
    shape, dtype, content = msgpack.unpackb(payload)
    return _array(shape, dtype, content)


def _array(shape: Any, dtype: str, content: bytes) -> StoredTensor:
    shape = shape_of(shape)
    if dtype not in NUMPY or size(dtype, shape) != len(content):
        description = f"shape {shape} and dtype {str(dtype)[:20]!r}"
        raise SpecError(f"an array has {description} but the wrong number of bytes")
    return sliced(content, 0, dtype, shape)


def _joined(entries: Mapping[str, Any]) -> StoredTensor:
    shape, chunks = shape_of([*entries["shape"].values()]), list(entries["chunks"].values())
    dtype, count = chunks[0].dtype, sum(math.prod(piece.shape) for piece in chunks)
    if count != math.prod(shape) or any(piece.dtype != dtype for piece in chunks):
        raise SpecError(
            f"an array stored in pieces has shape {shape}, but its pieces hold {count} elements or differ in "
            "dtype"
        )

    def bits() -> Bits:
        return np.concatenate([piece.bits().reshape(-1) for piece in chunks]).reshape(shape)

    return StoredTensor(dtype, shape, bits)


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors one by one as nested dictionaries."""
    with optional("writing msgpack", "porting"):
        import msgpack

    refuse(
        [
            f"{name!r} has {tensor.size} bytes but must have at most {LARGEST}"
            for name, tensor in tensors.items()
            if tensor.size > LARGEST
        ]
    )
    with writing(path) as put:
        _put(put, msgpack.Packer(), tree(tensors))


def _put(put: Write, packer: Any, value: Any) -> None:
    if isinstance(value, dict):
        put(packer.pack_map_header(len(value)))
        for key, inner in value.items():
            put(packer.pack(key))
            _put(put, packer, inner)
    elif isinstance(value, StoredTensor):
        # Written manually, as bin 32 (0xc6) in ext 32 (0xc9): the packer would copy an array's bytes several
        # times.
        head = packer.pack_array_header(3) + packer.pack(value.shape) + packer.pack(value.dtype)
        head += b"\xc6" + struct.pack(">I", value.size)
        put(b"\xc9" + struct.pack(">Ib", len(head) + value.size, NDARRAY) + head)
        put(value.data())
    else:
        put(packer.pack(value))
