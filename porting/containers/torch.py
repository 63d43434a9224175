"""PyTorch's own files, ``.pt`` and ``.bin``: an archive with a pickle and the storages, not compressed; or, before 1.6, five pickles and the storages.

Read as in :mod:`concord.porting.pickles`; the numbers are memory-mapped. Written without PyTorch: a pickle that ``torch.load`` reads with
``weights_only=True``.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from concord.porting.containers import shards
from concord.porting.located import located, mapped
from concord.porting.pickles.reader import look
from concord.porting.pickles.tensors import STORAGES
from concord.porting.stored import Stored, elements
from concord.spec.errors import SpecError
from concord.spec.files import opened, refusing

INDEX = f"pytorch_model.bin{shards.INDEX}"
"""The index of a checkpoint in several files, beside them."""

ROOT = "archive"

ALIGNMENT = 64
"""Bytes that storages begin at a multiple of, as PyTorch writes them."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""What checkpoints of training loops keep the weights under, beside what else they keep."""


def is_one(path: Path) -> bool:
    """Say whether a file is PyTorch's, by its name and its first bytes: an archive, or a pickle; or by its name the index of several."""
    if path.name.endswith(f".bin{shards.INDEX}"):
        return path.is_file()
    if not path.name.endswith((".pt", ".pth", ".bin", ".ckpt")) or not path.is_file():
        return False
    with opened(path) as file:
        return file.read(4)[:2] in (b"PK", b"\x80\x02")


def read(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, or of all files that an index names; nothing of their pickles is run.

    Raises:
        SpecError: if it is no pickle of tensors, or would have code run; if an index and its files do not agree.
    """
    return shards.read(path, _single) if shards.is_index(path) else _single(path)


def _single(path: Path) -> dict[str, Stored]:
    return unwrapped(mapped(path, located(path, look)))


def unwrapped(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return tensors without the name that a training loop keeps all weights under."""
    for wrapper in WRAPPERS:
        inner = [name for name in tensors if name.startswith(f"{wrapper}.")]
        others = [name for name in tensors if name not in inner]
        if inner and all(name.startswith(("optimizer", "scheduler", "ema", "epoch")) for name in others):
            return {
                name.removeprefix(f"{wrapper}.") if name in inner else name: tensors[name] for name in tensors
            }
    return tensors


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one, as ``torch.save`` writes a ``state_dict``.

    Raises:
        SpecError: if PyTorch has no storage of a dtype, or it cannot be written.
    """
    codes = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
    if wrong := [
        f"{name!r} has dtype {tensor.dtype}, which has no storage in PyTorch"
        for name, tensor in tensors.items()
        if tensor.dtype not in codes
    ]:
        raise SpecError(wrong)
    with refusing(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _member(archive, "data.pkl", b"".join(_pickle(tensors, codes)))
        _member(archive, "byteorder", b"little")
        for number, tensor in enumerate(tensors.values()):
            _member(archive, f"data/{number}", tensor.data())
        _member(archive, "version", b"3\n")


def _member(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"{ROOT}/{name}")  # of 1980: the same bytes each time
    entry.file_size = len(content)
    begin = (archive.fp.tell() if archive.fp else 0) + 30 + len(entry.filename) + 4
    padding = -begin % ALIGNMENT
    entry.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # as PyTorch fills up
    with archive.open(entry, "w") as member:
        member.write(content)


def text(value: str) -> bytes:
    """Return a text as a pickle has it."""
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """Return a whole number, not negative, as a pickle has it."""
    if value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x09" + value.to_bytes(9, "little")


def numbers(values: tuple[int, ...]) -> bytes:
    """Return a tuple of whole numbers as a pickle has it."""
    return pickle.MARK + b"".join(map(number, values)) + pickle.TUPLE


def named(module: str, name: str) -> bytes:
    """Return the name of a class or function as a pickle has it."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _pickle(tensors: Mapping[str, Stored], codes: Mapping[str, str]) -> Iterator[bytes]:
    empty = named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    yield pickle.PROTO + b"\x02" + empty + pickle.MARK
    for key, (name, tensor) in enumerate(tensors.items()):
        storage = (
            text("storage")
            + named("torch", codes[tensor.dtype])
            + text(str(key))
            + text("cpu")
            + number(elements(tensor.shape))
        )
        stride = tuple(elements(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
        yield text(name) + named("torch._utils", "_rebuild_tensor_v2") + pickle.MARK
        yield pickle.MARK + storage + pickle.TUPLE + pickle.BINPERSID
        yield (
            number(0)
            + numbers(tensor.shape)
            + numbers(stride)
            + pickle.NEWFALSE
            + empty
            + pickle.TUPLE
            + pickle.REDUCE
        )
    yield pickle.SETITEMS + pickle.STOP
