"""Reading a bundle."""

from __future__ import annotations

import mmap
from pathlib import Path

from concord.porting.containers.bundle.index import entries
from concord.porting.containers.bundle.messages import DTYPES, STRING, fields, shape_of
from concord.porting.stored import Slice, Stored, are_sizes, size
from concord.spec.errors import SpecError, optional
from concord.spec.files import LARGEST, opened, read_bytes

SUFFIX = ".index"

OURS = "/.ATTRIBUTES/VARIABLE_VALUE"

MOST_SHARDS = 1 << 16


def is_one(path: Path) -> bool:
    """Say whether a file is the index of a bundle, by its name and that of its data beside it."""
    return (
        path.name.endswith(SUFFIX)
        and path.is_file()
        and any(path.parent.glob(f"{_escaped(path.name.removesuffix(SUFFIX))}.data-*-of-*"))
    )


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def read(path: Path) -> dict[str, Stored]:
    """Return the tensors of a bundle; texts, such as TensorFlow's graph of objects, are passed over.

    Args:
        path: the index.

    Raises:
        SpecError: if it is no whole bundle, or keeps tensors in slices.
    """
    content = read_bytes(path, LARGEST)
    with optional("a checkpoint of TensorFlow", "porting"):
        import google_crc32c  # noqa: F401 - of checksums
    try:
        listed = entries(content)
        header = dict(fields(listed.pop(b"", b"")))
        shards, order = int(header.get(1, 1)), header.get(2, 0)
        if not 1 <= shards <= MOST_SHARDS or order != 0:
            raise ValueError(f"it has {shards} data files, or numbers in another order of bytes")
        files: dict[int, mmap.mmap] = {}
        found = {
            key.decode(): _entry(path, files, shards, key.decode(), value) for key, value in listed.items()
        }
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path}: not a whole index of a checkpoint: {error}") from None
    return {name: stored for name, stored in found.items() if stored is not None}


def _entry(path: Path, files: dict[int, mmap.mmap], shards: int, name: str, value: bytes) -> Stored | None:
    """Return a tensor; None for texts."""
    given = dict(fields(value))
    kind, shard, begin, length = (int(given.get(field, 0)) for field in (1, 3, 4, 5))
    if kind == STRING:
        return None
    if kind not in DTYPES:
        raise ValueError(f"{name!r} has the dtype number {kind}, which is not known")
    if 7 in given:
        raise ValueError(f"{name!r} is kept in slices; save it from one device")
    shape, dtype = shape_of(given.get(2, b"")), DTYPES[kind]
    if not are_sizes(shape) or size(dtype, shape) != length:
        raise ValueError(f"{name!r} has shape {shape} of {dtype}, which takes other than {length} bytes")
    if shard >= shards:
        raise ValueError(f"{name!r} lies in data file {shard} of {shards}")
    if shard not in files:
        with opened(
            path.with_name(f"{path.name.removesuffix(SUFFIX)}.data-{shard:05d}-of-{shards:05d}")
        ) as file:
            files[shard] = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else mmap.mmap(-1, 1)
            )
    if begin + length > len(files[shard]):
        raise ValueError(f"{name!r} reaches beyond the end of its data file")
    return Stored(dtype, shape, Slice(files[shard], begin, dtype, shape))
