"""Folders of Orbax, as JAX programs write them: read and written by Orbax itself, in a process of its own.

What is read comes back through a safetensors file that nobody else sees, which is mapped; what is written goes there by another.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from concord.backends.process import ROOT, Process, WorkerFailure
from concord.backends.worker import environment
from concord.porting.containers import safetensors
from concord.porting.located import DELIMITER, MEMORY_LIMIT
from concord.porting.stored import NUMPY, Stored, in_memory
from concord.spec.errors import SpecError

METADATA = "_METADATA"

TIME_LIMIT = 600.0
"""Seconds that Orbax may take, JAX's start included."""

SHARE = 8
"""How many times the bytes of the numbers Orbax may hold, over what JAX takes."""


def is_one(path: Path) -> bool:
    """Say whether a folder is one."""
    return (
        path.is_dir()
        and (path / METADATA).is_file()
        and any((path / mark).exists() for mark in ("manifest.ocdbt", "_sharding", "_CHECKPOINT_METADATA"))
    )


def read(path: Path) -> dict[str, Stored]:
    """Return the arrays of a folder; the names of dictionaries are joined by dots.

    Raises:
        SpecError: if Orbax cannot read it, or is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "arrays.safetensors"
        _ask("restore", path, between, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        return safetensors.read(between)  # mapped: the file may go


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write arrays, as dictionaries in each other.

    Raises:
        SpecError: if Orbax cannot write them, or is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        between = Path(folder) / "arrays.safetensors"
        safetensors.write(between, tensors)
        _ask("save", path, between, between.stat().st_size)


def _ask(what: str, path: Path, between: Path, size: int) -> None:
    try:
        with Process(
            local=True, time_limit=TIME_LIMIT, memory_limit=4 * MEMORY_LIMIT + SHARE * size
        ) as process:
            process.start(None, "", lambda: None)
            target = DELIMITER.join((what, str(path.absolute()), str(between)))
            said = json.loads(
                process.exchange(
                    {
                        "root": str(ROOT),
                        "environment": environment("cpu", None),
                        "appended": {},
                        "target": target,
                        "serve": f"{__name__}:serve",
                    }
                )
            )
    except WorkerFailure as failure:
        raise SpecError(f"{path}: Orbax has given no answer: {failure.detail}") from None
    if said:
        raise SpecError(f"{path}: {said}")


# In the process.


def serve(channel: Any, target: str) -> None:
    """Answer once: what went wrong, or nothing."""
    what, path, between = target.split(DELIMITER, 2)
    channel.send(json.dumps(_done(what, Path(path), Path(between))))


def _done(what: str, path: Path, between: Path) -> str:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        return f"Orbax is needed, which comes with the extra 'jax': {error}"
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            if what == "save":
                checkpointer.save(path, _tree(safetensors.read(between)))
            else:
                safetensors.write(between, dict(_flat(checkpointer.restore(path), "")))
    except Exception as error:  # of whatever kind a spoilt folder makes Orbax raise
        return f"Orbax cannot {what} it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _tree(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    import ml_dtypes

    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        bits = np.array(tensor.bits())
        place[last] = bits if bits.dtype.name == tensor.dtype else bits.view(getattr(ml_dtypes, tensor.dtype))
    return tree


def _flat(value: Any, name: str) -> Any:
    """Yield the arrays in dictionaries and lists, by name; what is no array is passed over."""
    if isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif hasattr(value, "dtype"):
        array = np.asarray(value)
        dtype = array.dtype.name
        if dtype not in NUMPY:
            raise ValueError(f"{name!r} has dtype {dtype}, which is not known")
        yield name, in_memory(np.asarray(array, order="C").view(NUMPY[dtype]), dtype)
