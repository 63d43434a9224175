"""PyTorch's own files and PaddlePaddle's: pickles, that is, programs.

Of which nothing is run but what makes arrays.

Whatever class or function a pickle names is refused if it is not listed in :data:`ALLOWED`, where those of
PyTorch are replaced.
Written without either: a pickle of PyTorch that ``torch.load`` reads with ``weights_only=True``.
"""

from __future__ import annotations

import codecs
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from concord.porting.containers.aside import Refused, flat
from concord.porting.stored import NUMPY, Stored, elements, shape_of
from concord.spec.errors import SpecError
from concord.spec.files import refusing

STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""What PyTorch calls storages, and the dtype of what they hold."""

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What a file of PyTorch before 1.6 begins with, each as a pickle."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""What checkpoints of training loops keep the weights under, beside what else they keep."""

BESIDE = ("optimizer", "scheduler", "ema", "epoch")
"""How the names of that begin."""

PADDLE = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes that PaddlePaddle has."""


@dataclass(eq=False)
class _Storage:
    """Numbers that tensors of PyTorch are views of."""

    kind: str
    count: int
    read: Callable[[], bytes]


def _tensor(storage: _Storage, begin: int, shape: Any, stride: Any, *more: Any) -> Stored:
    """Return what PyTorch's function makes; ``more``: gradients and hooks.

    And of the third version the dtype.
    """
    if not isinstance(storage, _Storage) or len(shape) != len(stride):
        raise Refused("a tensor has no storage, or another number of axes than of strides")
    dtype = more[2] if len(more) > 2 else storage.kind
    kind, shape = np.dtype(NUMPY[dtype]), shape_of(shape)
    steps = tuple(step * kind.itemsize for step in stride)
    last = begin + sum((axis - 1) * step for axis, step in zip(shape, stride, strict=True))
    if elements(shape) and (min(begin, *stride, 0) < 0 or last >= storage.count):
        raise Refused(f"a tensor of shape {shape} reaches beyond its storage of {storage.count} elements")

    def bits() -> Any:
        if not elements(shape):
            return np.zeros(shape, kind)
        return np.ndarray(shape, kind, storage.read(), begin * kind.itemsize, steps)

    return Stored(dtype, shape, bits)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes as Python 2 spells them."""
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"it spells bytes in {encoding[:40]!r}")
    return codecs.encode(text, "latin1")


@dataclass(frozen=True)
class _Made:
    """A function that a pickle may call, and not change."""

    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __setstate__(self, state: Any) -> None:
        raise Refused("it changes a function")


def _first(tensor: Any, *_: Any) -> Any:
    """Return what is wrapped."""
    return tensor


def _nothing(*_: Any) -> None:
    """Stand in for what is no tensor, does no harm, and stands beside tensors."""


def _function(reduced: Any) -> Callable[..., Any]:
    """Return what NumPy makes an array with."""
    found: Callable[..., Any] = reduced[0]
    return found


ALLOWED: Mapping[str, Any] = {
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    **dict.fromkeys(("torch.UntypedStorage", "torch.storage.UntypedStorage"), "uint8"),
    **{f"torch.{name}": name for name in NUMPY},
    **{f"torch._utils._rebuild_tensor{version}": _Made(_tensor) for version in ("", "_v2", "_v3")},
    **{f"torch._utils._rebuild_parameter{more}": _Made(_first) for more in ("", "_with_state")},
    "torch.nn.parameter.Parameter": _Made(_first),
    "torch.Size": tuple,
    "torch.device": _Made(_nothing),
    "argparse.Namespace": SimpleNamespace,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")
        for kind in (set, bytes, bytearray)
    },
    "_codecs.encode": _Made(_encoded),
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": _Made(lambda code, *_: np.dtype(code, copy=True)),  # a pickle may change it
    **{
        f"numpy.{core}.{name}": _Made(function)
        for core in ("core", "_core")
        for name, function in (
            ("multiarray._reconstruct", _function(np.zeros(1).__reduce__())),
            ("numeric._frombuffer", _function(np.zeros(1).__reduce_ex__(5))),
            ("multiarray.scalar", _nothing),
        )
    },
}
"""All that a pickle may name, and what is taken for it."""


class _Reader(pickle.Unpickler):
    """Reads a pickle that names nothing but what is allowed."""

    def __init__(self, file: IO[bytes], storage: Callable[[str, str, int], _Storage] | None = None) -> None:
        super().__init__(file, encoding="latin1")
        self.storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what is taken for a class or function; nobody looks for it."""
        if f"{module}.{name}" not in ALLOWED:
            said = f"{module}.{name}"[:100]
            raise Refused(f"it asks for {said!r}, which no file of weights needs; nothing of it was run")
        return ALLOWED[f"{module}.{name}"]

    def persistent_load(self, saved_id: Any) -> Any:
        """Return a storage of PyTorch."""
        what, dtype, key, _, count = saved_id[:5]
        if what != "storage" or dtype not in NUMPY or self.storage is None or not isinstance(count, int):
            raise Refused("it asks for what is no storage of a known dtype")
        return self.storage(str(key), dtype, count)


def load_torch(path: Path) -> Mapping[str, Stored]:
    """Return the tensors of a file of PyTorch: an archive with a pickle and a member for each storage.

    Or pickles and storages.
    """
    with path.open("rb") as file:
        archived = file.read(4) == b"PK\x03\x04"
    return _unwrapped(flat(_archive(path) if archived else _legacy(path)))


def _archive(path: Path) -> Any:
    archive = zipfile.ZipFile(path)
    members = {entry.filename: entry for entry in archive.infolist()}
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Refused(f"the archive has {len(pickles)} members that are called data.pkl but must have one")
    if any("constants.pkl" in name for name in members):
        raise Refused("it is a compiled model of TorchScript, which is code; save its state_dict()")
    if compressed := [name for name, entry in members.items() if entry.compress_type != zipfile.ZIP_STORED]:
        raise Refused(f"its member {compressed[0][:60]!r} is compressed; PyTorch's are not")
    root = pickles[0].removesuffix("data.pkl")
    order = archive.read(f"{root}byteorder").strip() if f"{root}byteorder" in members else b"little"
    if order != b"little":
        raise Refused(f"its numbers are in the order {order[:10]!r} but must be in 'little'")
    content = lru_cache(1)(archive.read)  # one tensor after the other is read of a storage

    def storage(key: str, dtype: str, count: int) -> _Storage:
        name = f"{root}data/{key}"
        if name not in members:
            raise Refused(f"it lies in the storage {key[:40]!r}, which the file does not have")
        return _Storage(dtype, count, lambda: content(name))

    with archive.open(pickles[0]) as file:
        return _Reader(file, storage).load()


def _legacy(path: Path) -> Any:
    """Read five pickles, then the storages one after the other, each behind the number of its elements.

    Or PaddlePaddle's one pickle.
    """
    file = path.open("rb")
    if not file.peek(1):
        raise Refused("it is empty")
    storages: dict[str, _Storage] = {}

    def storage(key: str, dtype: str, count: int) -> _Storage:
        return storages.setdefault(key, _Storage(dtype, count, lambda: b""))

    first = _Reader(file, storage).load()
    if not (isinstance(first, int) and first == MAGIC):
        return first
    if _Reader(file).load() != PROTOCOL:
        raise Refused(f"its protocol is another than {PROTOCOL}")
    _Reader(file).load()  # about the system
    found = _Reader(file, storage).load()
    for key in _Reader(file).load():
        count, one = struct.unpack("<q", file.read(8))[0], storages.get(str(key))
        if one is None or count < one.count:
            raise Refused(f"its storage {str(key)[:40]!r} belongs to no tensor, or has {count} elements")
        length = count * np.dtype(NUMPY[one.kind]).itemsize
        one.read = partial(_span, file, file.tell(), length)
        file.seek(length, 1)
    return found


def _span(file: IO[bytes], begin: int, length: int) -> bytes:
    file.seek(begin)
    return file.read(length)


def _unwrapped(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return tensors without the name that a training loop keeps all weights under."""
    for wrapper in WRAPPERS:
        inner = {name for name in tensors if name.startswith(f"{wrapper}.")}
        if inner and all(name in inner or name.startswith(BESIDE) for name in tensors):
            return {
                name.removeprefix(f"{wrapper}.") if name in inner else name: tensor
                for name, tensor in tensors.items()
            }
    return tensors


def load_paddle(path: Path) -> Mapping[str, Stored]:
    """Return the arrays of a file of PaddlePaddle, which keeps bfloat16 as uint16.

    And has no tensors of that.
    """
    found = flat(_legacy(path))
    return {
        name: Stored("bfloat16", one.shape, one.bits) if one.dtype == "uint16" else one
        for name, one in found.items()
    }


def _of_dtypes(tensors: Mapping[str, Stored], known: Mapping[str, str] | tuple[str, ...], whose: str) -> None:
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype not in known]:
        raise SpecError(
            [f"{name!r} has dtype {tensors[name].dtype}, which {whose} does not have" for name in wrong]
        )


def write_paddle(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors as ``paddle.save`` writes a ``state_dict``.

    Raises:
        SpecError: if PaddlePaddle has no such dtype, or it cannot be written.
    """
    _of_dtypes(tensors, PADDLE, "PaddlePaddle")
    with refusing(path), path.open("wb") as file:
        pickler = pickle.Pickler(file, 4)
        pickler.fast = True  # remembers, and so holds, no array
        pickler.dump(
            {name: np.asarray(tensor.bits(), NUMPY[tensor.dtype]) for name, tensor in tensors.items()}
        )


ALIGNMENT = 64
"""Bytes that storages begin at a multiple of, as PyTorch writes them."""


def write_torch(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, one by one, as ``torch.save`` writes a ``state_dict``.

    Raises:
        SpecError: if PyTorch has no storage of a dtype, or it cannot be written.
    """
    codes = {dtype: f"{name}Storage" for name, dtype in STORAGES.items()}
    _of_dtypes(tensors, codes, "PyTorch")
    with refusing(path), zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _member(archive, "data.pkl", b"".join(_state(tensors, codes)))
        _member(archive, "byteorder", b"little")
        for number, tensor in enumerate(tensors.values()):
            _member(archive, f"data/{number}", tensor.data())
        _member(archive, "version", b"3\n")


def _member(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"archive/{name}")  # of 1980: the same bytes each time
    entry.file_size = len(content)
    begin = (archive.fp.tell() if archive.fp else 0) + 30 + len(entry.filename) + 4
    padding = -begin % ALIGNMENT
    entry.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # as PyTorch fills up
    with archive.open(entry, "w") as member:
        member.write(content)


def _state(tensors: Mapping[str, Stored], codes: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the pickle, opcode by opcode: Python's own writes no names of classes that are not imported."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    empty = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
    yield pickle.PROTO + b"\x02" + empty + pickle.MARK
    for key, (name, tensor) in enumerate(tensors.items()):
        stride = tuple(elements(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
        kind = f"ctorch\n{codes[tensor.dtype]}\n".encode()
        count = plain(elements(tensor.shape))
        yield plain(name) + b"ctorch._utils\n_rebuild_tensor_v2\n" + pickle.MARK + pickle.MARK
        yield (
            plain("storage") + kind + plain(str(key)) + plain("cpu") + count + pickle.TUPLE + pickle.BINPERSID
        )
        yield (
            plain(0)
            + plain(tensor.shape)
            + plain(stride)
            + pickle.NEWFALSE
            + empty
            + pickle.TUPLE
            + pickle.REDUCE
        )
    yield pickle.SETITEMS + pickle.STOP
