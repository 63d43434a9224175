"""Control of freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

# From malloc.h.
M_ARENA_MAX = -8

# For fewer bytes, the call is not worthwhile.
LARGE = 64 << 20


def share() -> None:
    """Limit this process to two heaps for all threads."""
    # By default glibc gives each thread a heap, and each heap keeps its peak size.
    _call("mallopt", M_ARENA_MAX, 2)


def give_back(size: int = LARGE) -> None:
    """Return unused memory to the system."""
    # Glibc keeps freed memory below any block that is still in use; messages of large models take gigabytes.
    if size >= LARGE:
        _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = _function(name)
    if function:
        function(*arguments)


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    # Other C libraries lack these functions.
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
