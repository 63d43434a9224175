"""Folders of Orbax, as JAX programs write them: read and written by Orbax itself, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.porting.containers import aside
from concord.porting.containers.aside import array_of, flat, tree
from concord.porting.stored import StoredTensor
from concord.spec.errors import optional


def is_folder(path: Path) -> bool:
    """Say whether a folder is one."""
    marks = ("manifest.ocdbt", "_sharding", "_CHECKPOINT_METADATA")
    return path.is_dir() and (path / "_METADATA").is_file() and any((path / mark).exists() for mark in marks)


def load(path: Path) -> dict[str, StoredTensor]:
    """Return the arrays of a folder; the names of dictionaries are joined by dots."""
    with _checkpointer() as checkpointer:
        return flat(checkpointer.restore(path))


def write(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write arrays, as dictionaries in each other.

    Raises:
        SpecError: if Orbax cannot write them, or is not installed.
    """
    aside.write(save, path, tensors, "jax")


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write arrays, in the process that has Orbax."""
    with _checkpointer() as checkpointer:
        checkpointer.save(path, _arrays(tree(tensors)))


def _checkpointer() -> Any:
    with optional("a folder of Orbax", "jax"):
        import orbax.checkpoint as orbax
    return orbax.PyTreeCheckpointer()


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(inner) for key, inner in value.items()}
    return array_of(value)
