"""Control of freed memory that the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator

# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8

# The largest block that glibc takes from its heap: larger ones have pages of their own.
LARGEST_BLOCK = 32 << 20

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


@contextlib.contextmanager
def reused(size: int = LARGE) -> Iterator[None]:
    """Reuse freed memory within a block, and return it at the end."""
    # By default each large array gets fresh pages, which the system clears: a fifth of the time of a large
    # comparison.
    if size < LARGE:
        yield
        return
    _call("mallopt", M_MMAP_THRESHOLD, LARGEST_BLOCK)
    _call("mallopt", M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        _call("mallopt", M_TRIM_THRESHOLD, 2 * LARGEST_BLOCK)
        give_back()


def _call(name: str, *arguments: int) -> None:
    function = _function(name)
    if function:
        function(*arguments)


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    # Other C libraries lack these functions.
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
