"""Containers: what lies in a file by its own names, whatever they mean. Each module reads one kind of file, and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from concord.porting.stored import Stored


class Container(Protocol):
    """A kind of file: a module of this package."""

    __name__: str

    def is_one(self, path: Path) -> bool:
        """Say whether a file is of this kind, by its first bytes; nothing else of it is read."""

    def read(self, path: Path) -> dict[str, Stored]:
        """Return its tensors by name; their numbers are read when they are asked for.

        Raises:
            SpecError: if it is no whole file of this kind.
        """

    def write(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        """Write tensors, one by one; the folder is one that is being written, and may get more than one file.

        Raises:
            SpecError: if it cannot be written, or this kind of file has no such dtype.
        """
