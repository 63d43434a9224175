"""Other people's files, opened by their own libraries in a process of its own, with limits.

Frameworks that are needed for a kind of file are imported there alone, and a spoilt file may kill a library.
What is read comes back through a safetensors file that nobody else sees, which is mapped; what is written
goes there by another.
"""

from __future__ import annotations

import atexit
import glob
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from concord.backends.process import Process
from concord.backends.wire import WorkerFailure
from concord.backends.worker import environment
from concord.porting.containers import safetensors
from concord.porting.file_tensors import StoredTensor
from concord.spec.errors import SpecError, refuse
from concord.spec.files import opened

TIME_LIMIT, BYTES_A_SECOND = 60.0, 10 << 20
"""Seconds that a file may take, four times as many with a framework, and one more for so many bytes."""

MEMORY_LIMIT, GROWTH = 1 << 30, 8
"""Bytes that the process may hold, four times as many with a framework, and so many times those of the file:
frameworks compress and copy."""

Load = Callable[[Path], Mapping[str, StoredTensor]]
Save = Callable[..., None]


def read(load: Load, path: Path, framework: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a file, or folder.

    Args:
        load: a function of a module, which reads them; it may raise whatever it likes.
        framework: that it imports, by the extra that it comes with; empty: none.

    Raises:
        SpecError: if it is refused, or takes more time or memory than any file of weights.
    """
    if not path.is_dir():
        with opened(path):  # for the message
            pass
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "tensors.safetensors"
        names = _ask("read", load, path, between, path, framework)
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
        _ask("write", save, path, between, between, framework, **about)


_processes: dict[tuple[int, str], Process] = {}
"""The processes of this one, by its number and the framework in them: they take a second to start, or
many."""


@atexit.register
def _end() -> None:
    """End the processes of this one; a process that was forked from it ends none of them."""
    for (parent, _), process in _processes.items():
        if parent == os.getpid():
            process.close()


def _ask(
    method: str, act: Load | Save, path: Path, between: Path, source: Path, framework: str, **about: Any
) -> Any:
    """Have a function called in the process that has a framework.

    Args:
        source: what is read by it, whose size sets the limits.
    """
    data = source.parent.glob(f"{glob.escape(source.stem)}.data-*")  # of TensorFlow
    files = [file for file in source.rglob("*") if file.is_file()] if source.is_dir() else [source, *data]
    length, factor = sum(file.stat().st_size for file in files), 4 if framework else 1
    key, function = (os.getpid(), framework), f"{act.__module__}:{act.__name__}"
    kept = _processes.pop(key, None)  # one whose answer nobody waited for is not asked again
    process = kept or Process(time_limit=0, memory_limit=1)
    process.time_limit = TIME_LIMIT * factor + length / BYTES_A_SECOND
    process.memory_limit = MEMORY_LIMIT * factor + GROWTH * length
    answer, problems = None, list[str]()
    try:
        if not kept:
            process.start(f"{__name__}:Library", environment("cpu", None))
        answer = process.call(0, method, function, str(path.absolute()), str(between), **about)
    except SpecError as error:
        problems = [line.removeprefix(f"{path.absolute()}: ") for line in error.problems]
    except WorkerFailure as failure:
        problems = [f"no library can {method} it as a file of tensors: {failure.detail}"]
    if not process.dead:
        _processes[key] = process
    refuse([f"{path}: {problem}" for problem in problems])
    return answer


class Library:
    """What the process does."""

    def read(self, function: str, path: str, between: str) -> list[str]:
        """Read a file; return the names of its tensors."""
        tensors = dict(_function(function)(Path(path)))
        safetensors.write(Path(between), tensors)
        return list(tensors)

    def write(self, function: str, path: str, between: str, **about: Any) -> None:
        """Write a file."""
        _function(function)(Path(path), safetensors.read(Path(between)), **about)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
