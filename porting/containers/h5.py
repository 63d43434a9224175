"""HDF5 files of Keras: groups in each other, and datasets, whose numbers are memory-mapped.

The library that reads the format is written in C: it looks at a file in a process of its own (:mod:`concord.porting.located`). Links that lead elsewhere, to
another name or another file, are refused, and so are datasets that are kept in pieces or compressed: Keras writes none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from concord.porting.located import Found, Refused, located, mapped
from concord.porting.stored import NUMPY, Stored, size
from concord.spec.errors import SpecError, optional
from concord.spec.files import opened, refusing

SUFFIXES = (".h5", ".hdf5")

SIGNATURE = b"\x89HDF\r\n\x1a\n"

DEEPEST = 50
"""How deep groups may lie in each other."""

MOST = 1 << 16
"""Members of a file's groups, each counted as often as it is met: a group may be a member of itself."""

BFLOAT16 = "bfloat16"


def is_one(path: Path) -> bool:
    """Say whether a file is one, by its name and its first bytes."""
    if not path.name.endswith(SUFFIXES) or not path.is_file():
        return False
    with opened(path) as file:
        return file.read(8) == SIGNATURE


def read(path: Path) -> dict[str, Stored]:
    """Return the datasets of a file by their paths.

    Raises:
        SpecError: if it is no whole file, or has links that lead elsewhere, or datasets that are kept in pieces.
    """
    return mapped(path, located(path, look))


def look(path: Path | IO[bytes]) -> list[Found]:
    """Return the datasets of a file, which may be open already, and where their numbers lie; for :func:`concord.porting.located.located`.

    Raises:
        Refused: if it has links that lead elsewhere, or datasets that cannot be mapped.
    """
    with optional("an HDF5 file", "porting"):
        import h5py

    try:
        with h5py.File(path, "r") as file:
            return list(_datasets(file, "", 0, itertools.count()))
    except OSError as error:
        raise Refused(f"{' '.join(str(error).split())[:200]}") from None


def _datasets(group: Any, name: str, depth: int, met: Iterator[int]) -> Iterator[Found]:
    import h5py

    for key in group:
        if depth > DEEPEST or next(met) >= MOST:
            raise Refused(f"its groups lie more than {DEEPEST} deep, or have more than {MOST} members")
        inner = f"{name}/{key}" if name else key
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise Refused(f"{inner[:200]!r} is a link that leads elsewhere")
        member = group[key]
        if isinstance(member, h5py.Group):
            yield from _datasets(member, inner, depth + 1, met)
        elif isinstance(member, h5py.Dataset):
            yield _dataset(member, inner)


def _dataset(member: Any, name: str) -> Found:
    dtype = (
        BFLOAT16
        if member.dtype == np.dtype("V2") and member.attrs.get("dtype") == BFLOAT16
        else member.dtype.name
    )
    if dtype not in NUMPY or member.dtype.byteorder == ">":
        raise Refused(f"{name!r} has dtype {str(member.dtype)[:60]}, which is not known")
    if member.is_virtual or member.external:
        raise Refused(f"{name!r} lies in another file")
    shape, begin = tuple(map(int, member.shape)), member.id.get_offset()
    if begin is None and 0 in shape:
        begin = 0
    if begin is None or member.chunks is not None:
        if member.size * member.dtype.itemsize > 64 or member.chunks is not None:
            raise Refused(f"{name!r} is kept in pieces, or compressed; Keras keeps what it writes in one")
        return Found(name, dtype, shape, None, "", 0, 0, inline=np.asarray(member[()]).tobytes().hex())
    return Found(name, dtype, shape, None, "", int(begin), size(dtype, shape))


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one, each at its path.

    Raises:
        SpecError: if it cannot be written.
    """
    with optional("to write HDF5", "porting"):
        import h5py

    with refusing(path), h5py.File(path, "w", track_order=True) as file:
        for name, tensor in tensors.items():
            put(file, name, tensor)


def put(group: Any, name: str, tensor: Stored) -> None:
    """Write a tensor into a group; Keras says in an attribute that two bytes are bfloat16."""
    if tensor.dtype.startswith("float8"):
        raise SpecError(f"{name!r} has dtype {tensor.dtype}, which Keras does not keep")
    array = tensor.array()
    dataset = group.create_dataset(name, data=array.view("V2") if tensor.dtype == BFLOAT16 else array)
    if tensor.dtype == BFLOAT16:
        dataset.attrs["dtype"] = BFLOAT16
