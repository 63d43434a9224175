"""Opening untrusted files with their own libraries, in a limited process.

A corrupt file may crash a C library. Tensors pass through a temporary safetensors file, which the parent
maps.
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
from concord.spec.errors import SpecError, located, refuse
from concord.spec.files import opened

# Seconds for any file, and the bytes that add another second; importing a framework takes several seconds.
TIME_LIMIT, BYTES_A_SECOND = 60.0, 10 << 20

# Bytes of memory for any file, and an additional multiple of its size, since libraries decompress and copy. A
# framework gets four times the first.
MEMORY_LIMIT, GROWTH = 1 << 30, 8

Load = Callable[[Path], Mapping[str, StoredTensor]]
Save = Callable[..., None]


def read(load: Load, path: Path, framework: str = "") -> dict[str, StoredTensor]:
    """Run ``load`` on a path in a framework's process.

    Raises:
        SpecError: if the library refuses the file, crashes, or exceeds a limit.
    """
    if not path.is_dir():
        with opened(path):  # a missing file is refused before a process starts
            pass
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "tensors.safetensors"
        names = _ask("read", load, path, between, path, framework)
        tensors = safetensors.read(between)  # mapped, so the file may be deleted now
        # Restore the library's order: safetensors sorts tensors by the size of their dtype.
        return {name: tensors[name] for name in names}


def write(save: Save, path: Path, tensors: Mapping[str, StoredTensor], framework: str, **about: Any) -> None:
    """Run ``save`` on tensors in a framework's process."""
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "tensors.safetensors"
        safetensors.write(between, tensors)
        _ask("write", save, path, between, between, framework, **about)


# Processes by parent process id and framework. They are reused, because a framework takes seconds to start.
_processes: dict[tuple[int, str], Process] = {}


@atexit.register
def _end() -> None:
    # A forked child inherits this table, but must not end its parent's processes.
    for (parent, _), process in _processes.items():
        if parent == os.getpid():
            process.close()


def _ask(
    method: str, act: Load | Save, path: Path, between: Path, source: Path, framework: str, **about: Any
) -> Any:
    # The size of the input determines the limits; TensorFlow's data are in files next to its index.
    shards = source.parent.glob(f"{glob.escape(source.stem)}.data-*")
    files = [file for file in source.rglob("*") if file.is_file()] if source.is_dir() else [source, *shards]
    length, factor = sum(file.stat().st_size for file in files), 4 if framework else 1
    key, function = (os.getpid(), framework), f"{act.__module__}:{act.__name__}"
    previous = _processes.pop(key, None)  # after an interrupt, an earlier call's answer must not be read
    process = previous or Process(time_limit=0, memory_limit=1)
    process.time_limit = TIME_LIMIT * factor + length / BYTES_A_SECOND
    process.memory_limit = MEMORY_LIMIT * factor + GROWTH * length
    answer, problems = None, list[str]()
    try:
        if not previous:
            process.start(f"{__name__}:Library", environment("cpu", None))
        answer = process.call(0, method, function, str(path.absolute()), str(between), **about)
    except SpecError as error:
        problems = [line.removeprefix(str(path.absolute())).lstrip(": ") for line in error.problems]
    except WorkerFailure as failure:
        problems = [f"no library can {method} it as a file of tensors: {failure.detail}"]
    if not process.dead:
        _processes[key] = process
    with located(str(path)):
        refuse(problems)
    return answer


class Library:
    """The service of the isolated process."""

    def read(self, function: str, path: str, between: str) -> list[str]:
        """Convert a file to safetensors; return its names in order."""
        tensors = dict(_function(function)(Path(path)))
        safetensors.write(Path(between), tensors)
        return list(tensors)

    def write(self, function: str, path: str, between: str, **about: Any) -> None:
        """Convert a safetensors file to another format."""
        _function(function)(Path(path), safetensors.read(Path(between)), **about)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    resolved: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return resolved
