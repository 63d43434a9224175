"""Folders that are written atomically."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from concord.spec.errors import SpecError
from concord.spec.files import new_beside, refusing


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder with all its files, or not at all.

    Raises:
        FileExistsError: if the name is taken, also by a simultaneous writer.
        SpecError: if it cannot be written.
    """
    with new_folder(path) as temporary, refusing(path):
        for name, content in files.items():
            (temporary / name).write_bytes(content)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it appears when the block ends without an error.

    Args:
        replace: replace an existing folder; a kill leaves either the old or the new one.

    Raises:
        FileExistsError: if the name is taken and ``replace`` is False.
        SpecError: if it cannot be written.
    """
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = new_beside(path)
        temporary.mkdir()
    try:
        try:
            yield temporary
        except SpecError as error:  # the caller knows only this name
            raise SpecError(str(error).replace(str(temporary), str(path)).splitlines()) from None
        with refusing(path):
            if replace and path.is_dir() and not path.is_symlink():
                _exchange(temporary, path)
                return
            _place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# AT_FDCWD, RENAME_NOREPLACE and RENAME_EXCHANGE of renameat2(2).
HERE, NOT_OVER, BOTH = -100, 1, 2


def _renamed(source: Path, target: Path, how: int) -> bool:
    # A single system call, so a kill leaves either the old or the new folder (decision 0027). Python's os
    # module lacks it.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    if library.renameat2(HERE, os.fsencode(source), HERE, os.fsencode(target), how) == 0:
        return True
    if ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    return False


def _place(source: Path, target: Path) -> None:
    if _renamed(source, target, NOT_OVER):
        return
    # rename() silently replaces an empty folder. Creating it first fails if another writer was faster.
    target.mkdir()
    try:
        source.rename(target)
    except BaseException:
        target.rmdir()
        raise


def _exchange(source: Path, target: Path) -> None:
    if _renamed(source, target, BOTH):
        return
    # Without renameat2 there is a moment when neither folder has the name.
    aside = new_beside(target)
    target.rename(aside)
    try:
        source.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    aside.rename(source)
