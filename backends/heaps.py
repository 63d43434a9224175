"""What the C library keeps of memory that was let go."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

M_ARENA_MAX = -8
"""The number by which ``malloc.h`` calls the largest number of heaps."""

LARGE = 64 << 20
"""Bytes of a message after which it is worth while to give memory back."""


def share() -> None:
    """Let the threads of this process share a few heaps.

    Glibc gives each one of its own, and each keeps what it once held.
    """
    _call("mallopt", M_ARENA_MAX, 2)


def give_back(size: int = LARGE) -> None:
    """Give memory that nothing uses any more back to the system.

    Glibc keeps it where something above it is still in use.

    Args:
        size: bytes that were let go; of few it is not worth while.
    """
    if size >= LARGE:
        _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = _function(name)
    if function:
        function(*arguments)


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; other C libraries have none of these."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
