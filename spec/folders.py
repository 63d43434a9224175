"""Folders that are written whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from concord.spec.files import new_beside, put, refusing


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder, with all its files or not at all.

    Raises:
        FileExistsError: if there is something of that name; that decides between two that write at the same time.
        SpecError: if it cannot be written.
    """
    with new_folder(path) as temporary, refusing(path):
        for name, content in files.items():
            put(temporary / name, content)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Write a folder file by file: it is there, with all of them, once the block has ended well, and a kill leaves the old one or the new one.

    Args:
        replace: whether a folder that is there is replaced.

    Yields:
        The folder to write into meanwhile.

    Raises:
        FileExistsError: if there is something of that name and it is not to be replaced; that decides between two that write at the same time.
        SpecError: if it cannot be written.
    """
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = new_beside(path)
        temporary.mkdir()
    try:
        yield temporary
        with refusing(path):
            if replace and path.is_dir() and not path.is_symlink():
                _exchange(temporary, path)
                return
            # To rename is to replace, of a folder an empty one alone: make that first, so that another's is seen.
            path.mkdir()
            try:
                temporary.rename(path)
            except BaseException:
                path.rmdir()
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders, at once where the system can."""
    library = ctypes.CDLL(None, use_errno=True)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(library, "renameat2") and library.renameat2(here, os.fsencode(one), here, os.fsencode(other), both) == 0:
        return
    aside = new_beside(other)
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)
