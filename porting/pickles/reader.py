"""A file of PyTorch or PaddlePaddle, looked at in a process of its own: its pickles, and where what they speak of lies."""

from __future__ import annotations

import mmap
import struct
import zipfile
from pathlib import Path

from concord.porting.located import Found, Refused
from concord.porting.pickles.machine import LONG, Machine
from concord.porting.pickles.tensors import tensors
from concord.porting.stored import NUMPY, elements

LARGEST_PICKLE = 1 << 26
"""Bytes of the pickle in an archive of PyTorch, which has no numbers in it."""

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What a file of PyTorch before 1.6 begins with, each as a pickle."""


def look(path: Path) -> list[Found]:
    """Return the tensors of a pickle, and where in the file their numbers lie; for :func:`concord.porting.located.located`.

    Raises:
        Refused: if it is no pickle of tensors, or would have code run.
    """
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise Refused("it is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[:4] == b"PK\x03\x04":
        return _archive(path, mapped)
    machine = Machine(mapped)
    first = machine.run()
    return _legacy(mapped, machine) if first == MAGIC else tensors(first)


def _archive(path: Path, mapped: mmap.mmap) -> list[Found]:
    """Read an archive of PyTorch: a pickle, and a member for each storage."""
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused(
                f"the archive has {len(pickles)} members that are called data.pkl but must have one"
            )
        if "constants.pkl" in "".join(members):
            raise Refused("it is a compiled model of TorchScript, which is code; save its state_dict()")
        root = pickles[0].removesuffix("data.pkl")
        content = _content(archive, members[pickles[0]])
        order = (
            archive.read(members[f"{root}byteorder"])[:10]
            if f"{root}byteorder" in members and members[f"{root}byteorder"].file_size < LONG
            else b"little"
        )
        if order.strip() != b"little":
            raise Refused(f"its numbers are in the order {order!r} but must be in 'little'")
    places = {
        name.removeprefix(f"{root}data/"): member_place(entry, mapped)
        for name, entry in members.items()
        if name.startswith(f"{root}data/")
    }
    return [_in_file(found, places) for found in tensors(Machine(content).run())]


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > LARGEST_PICKLE:
        raise Refused(f"its pickle has {entry.file_size} bytes but may have {LARGEST_PICKLE}")
    with archive.open(entry) as file:
        return file.read(LARGEST_PICKLE)


def member_place(entry: zipfile.ZipInfo, mapped: mmap.mmap) -> tuple[int, int]:
    """Return where a member begins in the file, and how many bytes it has."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise Refused(f"its member {entry.filename[:60]!r} is compressed; PyTorch's are not")
    name, extra = struct.unpack("<HH", mapped[entry.header_offset + 26 : entry.header_offset + 30])
    begin = entry.header_offset + 30 + name + extra
    if begin + entry.file_size > len(mapped):
        raise Refused(f"its member {entry.filename[:60]!r} reaches beyond the end of the file")
    return begin, entry.file_size


def _legacy(mapped: mmap.mmap, machine: Machine) -> list[Found]:
    """Read a file of PyTorch before 1.6: five pickles, then the storages one after the other, each behind the number of its elements."""
    if machine.run() != PROTOCOL:
        raise Refused(f"its protocol is another than {PROTOCOL}")
    machine.run()  # about the system
    found = tensors(machine.run())
    keys, place = machine.run(), machine.place
    widths = {one.storage: np_width(one.dtype) for one in found}
    places = {}
    for key in keys if isinstance(keys, list) else []:
        count = struct.unpack("<q", mapped[place : place + 8])[0]
        length = count * widths.get(str(key), 0)
        if count < 0 or str(key) not in widths or place + 8 + length > len(mapped):
            raise Refused(
                f"its storage {str(key)[:40]!r} belongs to no tensor, or reaches beyond the end of the file"
            )
        places[str(key)] = (place + 8, length)
        place += 8 + length
    return [_in_file(one, places) for one in found]


def np_width(dtype: str) -> int:
    """Return how many bytes a number takes."""
    return int(NUMPY[dtype][2:])


def _in_file(found: Found, places: dict[str, tuple[int, int]]) -> Found:
    """Return a tensor with the byte of the file at which it begins."""
    if not found.storage:
        return found
    if found.storage not in places:
        raise Refused(
            f"{found.name!r} lies in the storage {found.storage[:40]!r}, which the file does not have"
        )
    begin, length = places[found.storage]
    width = np_width(found.dtype)
    last = found.begin + sum(
        (size - 1) * step for size, step in zip(found.shape, found.stride or (), strict=True)
    )
    if elements(found.shape) and (last + 1) * width > length:
        raise Refused(f"{found.name!r} reaches beyond its storage of {length} bytes")
    return Found(found.name, found.dtype, found.shape, found.stride, "", begin + found.begin * width, length)
