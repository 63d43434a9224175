"""Other people's files, opened by their own libraries in a process of its own, with limits.

Frameworks that are needed for a kind of file are imported there alone.

What is read comes back through a safetensors file that nobody else sees, which is mapped; what is written
goes there by another.
"""

from __future__ import annotations

import atexit
import glob
import importlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from concord.backends.process import Process
from concord.backends.wire import WorkerFailure
from concord.backends.worker import environment
from concord.porting.containers import safetensors
from concord.porting.stored import NUMPY, StoredTensor, in_memory, size
from concord.spec.errors import SpecError
from concord.spec.files import opened

TIME_LIMIT = 60.0
"""Seconds that a file may take, four times as many with a framework, and one more for so many bytes."""

BYTES_A_SECOND = 10 << 20

MEMORY_LIMIT = 1 << 30
"""Bytes that the process may hold beside the numbers of a file; four times as many where a framework is in
it."""

GROWTH = 8
"""How many times the bytes of a file its numbers may take; frameworks may hold as many, since they compress
and copy."""

DEEPEST, MOST = 50, 1 << 18
"""How deep dictionaries may lie in each other, and how many entries there may be, each counted as often as it
is met."""

Load = Callable[[Path], Mapping[str, StoredTensor]]
Save = Callable[..., None]


class Refused(ValueError):
    """A file that is not read: what it asks for, and why."""


def read(load: Load, path: Path, framework: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a file, or folder.

    Args:
        load: a function of a module, which reads them; it may raise whatever it likes.
        framework: that it imports, by the extra that it comes with: ``tf`` or ``jax``; empty: none.

    Raises:
        SpecError: if it is refused, or takes more time or memory than any file of weights.
    """
    if not path.is_dir():
        with opened(path):  # for the message
            pass
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "tensors.safetensors"
        names = _ask(load, path, between, framework, {})
        found = safetensors.read(between)  # mapped: the file may go
        return {name: found[name] for name in names}


def write(save: Save, path: Path, tensors: Mapping[str, StoredTensor], framework: str, **about: Any) -> None:
    """Write tensors.

    Args:
        save: a function of a module, which writes them.
        about: what it takes besides, as JSON has it.

    Raises:
        SpecError: if it cannot, or the framework is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "tensors.safetensors"
        safetensors.write(between, tensors)
        _ask(save, path, between, framework, about)


_processes: dict[tuple[int, str], Process] = {}
"""The processes of this one, by its number and the framework in them: they take a second to start, or
many."""


@atexit.register
def _end() -> None:
    """End the processes of this one; a process that was forked from it ends none of them."""
    for (parent, _), process in _processes.items():
        if parent == os.getpid():
            process.close()


def _ask(act: Load | Save, path: Path, between: Path, framework: str, about: Mapping[str, Any]) -> list[str]:
    """Have a function called there; return the names of what it has read."""
    lies = between if between.exists() else path
    data = lies.parent.glob(f"{glob.escape(lies.stem)}.data-*") if framework else ()  # of TensorFlow
    files = [file for file in lies.rglob("*") if file.is_file()] if lies.is_dir() else [lies, *data]
    length = sum(file.stat().st_size for file in files)
    given = [act.__module__, act.__name__, str(path.absolute()), str(between), length, framework, about]
    key = (os.getpid(), framework)
    try:
        kept = _processes.pop(key, None)
        process = kept or Process(time_limit=0, memory_limit=1)
        process.time_limit = TIME_LIMIT * (4 if framework else 1) + length / BYTES_A_SECOND
        process.memory_limit = MEMORY_LIMIT * (4 if framework else 1) + GROWTH * length
        if not kept:
            process.start(f"{__name__}:Aside", environment("cpu", None))
        said = process.call(0, "answer", *given)
        _processes[key] = process
    except WorkerFailure as failure:
        raise SpecError(f"{path}: cannot be read as a file of tensors: {failure.detail}") from None
    if "refused" in said:
        raise SpecError(f"{path}: {said['refused']}")
    return list(said["names"])


# In the process.


class Aside:
    """What the process does."""

    def answer(
        self,
        module: str,
        name: str,
        source: str,
        there: str,
        length: int,
        framework: str,
        about: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what the parent is told: the names of what was read, or why nothing was."""
        act, path, between = getattr(importlib.import_module(module), name), Path(source), Path(there)
        if not framework:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            with suppress(OSError, ValueError):  # the parent watches too
                resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_LIMIT + GROWTH * length, hard))
        try:
            if between.exists():
                act(path, safetensors.read(between), **about)
                return {"names": []}
            found = dict(act(path))
            total = sum(size(stored.dtype, stored.shape) for stored in found.values())
            if not framework and total > GROWTH * length + MEMORY_LIMIT // 16:
                raise Refused(f"its tensors take {total} bytes, but it has {length}")
            safetensors.write(between, found)
            return {"names": list(found)}
        except SpecError as error:
            return {"refused": error.problems[0].removeprefix(f"{path}: ")}
        except Refused as error:
            return {"refused": f"not a file of tensors that is read: {error}"}
        except MemoryError:
            return {"refused": "not a file of tensors that is read: it takes more memory than its numbers do"}
        except Exception as error:  # of whatever kind a spoilt file makes a library raise
            said = " ".join(str(error).split())[:300]
            return {"refused": f"not a whole file of tensors: {type(error).__name__}: {said}"}


def stored_of(value: Any, name: str) -> StoredTensor:
    """Return an array of NumPy, whose dtype may be one that a framework adds, as a tensor of a file.

    Raises:
        Refused: for a dtype that files of weights do not have.
    """
    array = np.asarray(value)
    if array.dtype.name not in NUMPY or array.dtype.byteorder == ">":
        raise Refused(f"{name[:200]!r} has dtype {str(array.dtype)[:60]}, which is not known")
    return in_memory(array.view(NUMPY[array.dtype.name]), array.dtype.name)


def array_of(stored: StoredTensor) -> Any:
    """Return a tensor as an array of the dtypes that TensorFlow and JAX have."""
    import ml_dtypes

    bits = stored.array()
    return bits if bits.dtype.name == stored.dtype else bits.view(getattr(ml_dtypes, stored.dtype))


def tree(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as dictionaries in each other, by the parts of their names between dots."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found


def flat(value: Any, stored: Callable[[Any, str], StoredTensor] = stored_of) -> dict[str, StoredTensor]:
    """Return the arrays in dictionaries and lists, by names joined by dots; what is no array is passed over.

    Args:
        stored: makes a tensor of a file from an array and its name.

    Raises:
        Refused: if there are too many, too deep, or two of one name.
    """
    found: dict[str, StoredTensor] = {}
    for count, (name, one) in enumerate(_walk(value, "", 0)):
        if count > MOST:
            raise Refused(f"it holds more than {MOST} entries")
        if isinstance(one, StoredTensor) or hasattr(one, "dtype"):
            if name in found:
                raise Refused(f"has two tensors that are called {name[:200]!r}")
            found[name] = one if isinstance(one, StoredTensor) else stored(one, name)
    return found


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield whatever lies in a value, and it."""
    if depth > DEEPEST:
        raise Refused(f"its dictionaries lie more than {DEEPEST} deep in each other")
    yield name, value
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(key, (str, int)):
                raise Refused("a name is neither text nor number")
            yield from _walk(inner, f"{name}.{key}" if name else str(key), depth + 1)
