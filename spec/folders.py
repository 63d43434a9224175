"""Folders that are written whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from concord.spec.files import new_beside, refusing


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder, with all its files or not at all.

    Raises:
        FileExistsError: if there is something of that name; that decides between two that write at the same
            time.
        SpecError: if it cannot be written.
    """
    with new_folder(path) as temporary, refusing(path):
        for name, content in files.items():
            (temporary / name).write_bytes(content)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Write a folder file by file.

    It is there, with all of them, once the block has ended well, and a kill leaves the old one or the new
    one.

    Args:
        replace: whether a folder that is there is replaced.

    Yields:
        The folder to write into meanwhile.

    Raises:
        FileExistsError: if there is something of that name and it is not to be replaced; that decides between
            two that write at the same time.
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
            _place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


HERE, NOT_OVER, BOTH = -100, 1, 2
"""AT_FDCWD, RENAME_NOREPLACE and RENAME_EXCHANGE of renameat2(2)."""


def _renamed(one: Path, other: Path, how: int) -> bool:
    """Rename in one step; say whether the system can.

    Raises:
        FileExistsError: if there is something that would be replaced.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    if library.renameat2(HERE, os.fsencode(one), HERE, os.fsencode(other), how) == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(other))
    return False


def _place(one: Path, other: Path) -> None:
    """Give a folder a name that nothing bears."""
    if _renamed(one, other, NOT_OVER):
        return
    # To rename is to replace, of a folder an empty one alone: make that first, so that another's is seen.
    other.mkdir()
    try:
        one.rename(other)
    except BaseException:
        other.rmdir()
        raise


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders."""
    if _renamed(one, other, BOTH):
        return
    aside = new_beside(other)
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)
