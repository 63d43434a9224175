"""Files that are read and written whole: what is no regular file, too large, or not what it should be is refused in words."""

from __future__ import annotations

import json
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from concord.spec.errors import SpecError

LARGEST = 1 << 28
"""Bytes of the largest text that is read: records of campaigns have some millions."""


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        largest: how many bytes it may have; any number by default.

    Raises:
        SpecError: if it is missing, cannot be read, is no regular file, or is too large.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise SpecError(f"{path}: cannot be read: is {_kind(about.st_mode)} but must be a regular file")
        if largest is not None and about.st_size > largest:
            raise SpecError(f"{path}: has {about.st_size} bytes but must have at most {largest}")
        return path.read_bytes()
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return the content of a text file in utf-8.

    Raises:
        SpecError: as :func:`read_bytes`, and if it is no text.
    """
    try:
        return read_bytes(path, LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is no text in utf-8: {error.reason} at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        SpecError: as :func:`read_text`, and if it is no JSON.
    """
    content = read_bytes(path, LARGEST)
    try:
        return json.loads(content)
    except RecursionError:
        raise SpecError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text in utf-8, whole or not at all; into a link's target, and straight into what is no regular file.

    A file that is there keeps its permissions.

    Raises:
        SpecError: if it cannot be written.
    """
    try:
        there = path.resolve(strict=False)
        mode = there.stat().st_mode if there.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(there, text, mode)
    except (OSError, RuntimeError) as error:  # the latter for links that go round in a circle
        raise SpecError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _replace(path: Path, text: str, mode: int | None) -> None:
    """Put a new file in the place of a regular one, or of none."""
    temporary = path.with_name(f".concord-{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISSOCK: "a socket"}
    return next((name for test, name in kinds.items() if test(mode)), "something else")
