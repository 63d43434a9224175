"""Orbax folders of JAX programs, read and written by Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.porting.file_tensors import StoredTensor, array_of, flat, tree
from concord.spec.errors import optional


def is_folder(path: Path) -> bool:
    """Whether a folder is in Orbax' format."""
    marks = ("manifest.ocdbt", "_sharding", "_CHECKPOINT_METADATA")
    return path.is_dir() and (path / "_METADATA").is_file() and any((path / mark).exists() for mark in marks)


def load(path: Path) -> dict[str, StoredTensor]:
    """Arrays of a folder by dotted names."""
    with _checkpointer() as checkpointer:
        return flat(checkpointer.restore(path))


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write arrays as nested dictionaries."""
    with _checkpointer() as checkpointer:
        arrays: Any = {name: array_of(tensor) for name, tensor in tensors.items()}
        checkpointer.save(path, tree(arrays))


def _checkpointer() -> Any:
    with optional("an Orbax folder", "jax"):
        import orbax.checkpoint as orbax
    return orbax.PyTreeCheckpointer()
