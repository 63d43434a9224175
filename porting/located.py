"""Tensors that another process has found in a file: what a library in C, or a pickle, could do harm with is looked at there."""

from __future__ import annotations

import importlib
import json
import mmap
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from concord.backends.process import ROOT, Process, WorkerFailure
from concord.porting.stored import NUMPY, Bits, Slice, Stored, elements
from concord.spec.errors import SpecError
from concord.spec.files import LARGEST, opened

TIME_LIMIT = 120.0
"""Seconds that looking at a file may take."""

MEMORY_LIMIT = 1 << 30
"""Bytes that the process may hold: numbers stay in the file, and names and shapes are few."""

DELIMITER = "\n"


class Refused(ValueError):
    """A file that is not read: what it asks for, and why."""


@dataclass(frozen=True)
class Found:
    """A tensor of a file, and where its numbers lie.

    Attributes:
        name: under which it stands, those of the dictionaries that it is in before it.
        dtype: one of :data:`concord.porting.stored.NUMPY`.
        shape: of the tensor.
        stride: elements from one to the next along each axis; None: in C order.
        storage: the key of what it lies in, as long as it is not known where that is; then ``begin`` and ``length`` count elements of it.
        begin: the byte of the file.
        length: bytes of the file.
        text: whether its bytes are spelled as text in utf-8 (:class:`concord.porting.pickles.machine.Span`).
        inline: its bytes themselves, in hexadecimal digits, where they are few.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    storage: str
    begin: int
    length: int
    text: bool = False
    inline: str = ""


def located(path: Path, look: Callable[[Path], list[Found]]) -> list[Found]:
    """Return the tensors of a file, looked at in a process of its own: no framework, little memory, an end.

    Args:
        look: a function of a module; it raises :class:`Refused`.

    Raises:
        SpecError: if it is refused, or takes more time or memory than any file of weights.
    """
    with opened(path):  # for the message
        pass
    try:
        with Process(local=True, time_limit=TIME_LIMIT, memory_limit=MEMORY_LIMIT) as process:
            process.start(None, "", lambda: None)
            target = DELIMITER.join((look.__module__, look.__name__, str(path.absolute())))
            settings = {
                "root": str(ROOT),
                "environment": {},
                "appended": {},
                "target": target,
                "serve": f"{__name__}:serve",
            }
            said = json.loads(process.exchange(settings))
    except WorkerFailure as failure:
        raise SpecError(f"{path}: cannot be read as a file of tensors: {failure.detail}") from None
    return understood(said, path)


def understood(said: dict[str, Any], path: Path) -> list[Found]:
    """Return the tensors of an answer.

    Raises:
        SpecError: if it says that there are none.
    """
    if "refused" in said:
        raise SpecError(f"{path}: {said['refused']}")
    return [
        Found(
            **{**entry, "shape": tuple(entry["shape"]), "stride": entry["stride"] and tuple(entry["stride"])}
        )
        for entry in said["tensors"]
    ]


def serve(channel: Any, target: str) -> None:
    """Answer once, in that process.

    Args:
        channel: of execnet.
        target: module, function and file.
    """
    module, name, path = target.split(DELIMITER, 2)
    with suppress(OSError, ValueError):  # the parent watches too
        resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_LIMIT + Path(path).stat().st_size,) * 2)
    said = json.dumps(answer(Path(path), getattr(importlib.import_module(module), name)))
    channel.send(
        said
        if len(said) <= LARGEST
        else json.dumps(
            {"refused": f"what it says of its tensors takes {len(said)} bytes but may take {LARGEST}"}
        )
    )


def answer(path: Path, look: Callable[[Path], list[Found]]) -> dict[str, Any]:
    """Return what the parent is told: the tensors, or why there are none."""
    try:
        return {"tensors": [asdict(found) for found in look(path)]}
    except Refused as error:
        return {"refused": f"not a file of tensors that is read: {error}"}
    except MemoryError:
        raise
    except Exception as error:  # of whatever kind a spoilt file makes a library raise
        return {
            "refused": f"not a whole file of tensors: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        }


def mapped(path: Path, found: list[Found]) -> dict[str, Stored]:
    """Return tensors whose place in a file is known.

    Raises:
        SpecError: if two bear one name, or one lies beyond the end of the file.
    """
    with opened(path) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors: dict[str, Stored] = {}
    for one in found:
        if one.name in tensors:
            raise SpecError(f"{path}: has two tensors that are called {one.name!r}")
        if not one.inline and one.begin + one.length > len(content):
            raise SpecError(f"{path}: {one.name!r} reaches beyond the end of the file")
        tensors[one.name] = Stored(one.dtype, one.shape, _bits(content, one))
    return tensors


def _bits(content: mmap.mmap, found: Found) -> Callable[[], Bits]:
    if found.inline or found.text:
        return _Spelled(content, found)
    return Slice(content, found.begin, found.dtype, found.shape, found.stride)


class _Spelled:
    """Reads a tensor whose bytes are spelled as text, or stand in the words of a pickle."""

    def __init__(self, content: mmap.mmap, found: Found) -> None:
        self.content, self.found = content, found

    def __call__(self) -> Bits:
        """Return the tensor."""
        one = self.found
        raw = (
            bytes.fromhex(one.inline)
            if one.inline
            else self.content[one.begin : one.begin + one.length].decode("utf-8").encode("latin-1")
        )
        if len(raw) != elements(one.shape) * int(NUMPY[one.dtype][2:]):
            raise SpecError(f"{one.name!r} has shape {one.shape} of {one.dtype} but {len(raw)} bytes")
        return Slice(raw, 0, one.dtype, one.shape, one.stride)()
