"""Arrays between processes: in pieces, so that neither side holds them more often than it must, and there may be gigabytes of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

PIECE = 32 << 20
"""Bytes of a piece: a message of execnet may hold 2 GiB at most, and is copied several times on its way."""


class Parcel:
    """Bytes that are used once, and let go as soon as they have been.

    Attributes:
        size: how many they are.
    """

    def __init__(self, content: bytes) -> None:
        self.size, self._content = len(content), [content]

    def take(self) -> bytes:
        """Return the bytes, which are the taker's from then on."""
        return self._content.pop()

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces."""
        content = self.take()
        for first in range(0, self.size, PIECE):
            yield content[first : first + PIECE]


def parcel_of(size: int, receive: Callable[[], Any]) -> Parcel:
    """Return the parcel whose pieces are received one after the other.

    Args:
        size: bytes of it.
        receive: returns the next piece.
    """
    content = io.BytesIO()
    while content.tell() < size:
        content.write(receive())
    return Parcel(content.getvalue())
