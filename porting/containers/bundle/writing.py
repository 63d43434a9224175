"""Writing a bundle."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from concord.porting.containers.bundle.index import crc32c, masked, table
from concord.porting.containers.bundle.messages import DTYPES, STRING, graph, message, number
from concord.porting.containers.bundle.reading import OURS, SUFFIX
from concord.porting.stored import Stored
from concord.spec.errors import SpecError, optional
from concord.spec.files import Write, write_bytes, writing

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

PIECE = 1 << 24
"""Bytes that a checksum is made of at once."""


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one; where they bear the keys of TensorFlow 2, with the graph of objects by which it finds them.

    Args:
        path: the index; the data file is put beside it.

    Raises:
        SpecError: if TensorFlow has no such dtype, or it cannot be written.
    """
    with optional("to write a checkpoint of TensorFlow", "porting"):
        import google_crc32c

    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    if wrong := [
        f"{name!r} has dtype {tensor.dtype}, which TensorFlow's checkpoints do not have"
        for name, tensor in tensors.items()
        if tensor.dtype not in kinds
    ]:
        raise SpecError(wrong)
    listed = {b"": message(f1=1, f3=message(f1=1))}
    reached = 0
    with writing(path.with_name(f"{path.name.removesuffix(SUFFIX)}.data-00000-of-00001")) as put:
        for name, tensor in sorted(tensors.items()):
            check = 0
            for piece in _pieces(tensor):
                check = google_crc32c.extend(check, piece)
                put(piece)
            shape = message(f2=[message(f1=axis) for axis in tensor.shape])
            listed[name.encode()] = message(
                f1=kinds[tensor.dtype], f2=shape, f4=reached, f5=tensor.size, x6=masked(check)
            )
            reached += tensor.size
        if tensors and all(name.endswith(OURS) for name in tensors):
            listed[GRAPH.encode()] = _text(
                put, graph({name.removesuffix(OURS): name for name in tensors}), reached
            )
    write_bytes(path, table(listed))


def _pieces(tensor: Stored) -> Iterator[bytes]:
    data = tensor.data()
    for begin in range(0, len(data), PIECE):
        yield bytes(data[begin : begin + PIECE])


def _text(put: Write, content: bytes, begin: int) -> bytes:
    """Write a text, and return its entry: its length, a checksum of that, then the text; the checksum of all takes the length as four bytes."""
    import google_crc32c

    short = struct.pack("<I", len(content))
    lengths, of_length = number(len(content)), struct.pack("<I", crc32c(short))
    put(lengths + of_length + content)
    check = masked(google_crc32c.value(short + of_length + content))
    return message(f1=STRING, f2=b"", f4=begin, f5=len(lengths) + 4 + len(content), x6=check)
