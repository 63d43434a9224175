"""Tables in the format of LevelDB: blocks of sorted names, an index of the blocks, and a footer.

https://github.com/google/leveldb/blob/main/doc/table_format.md. TensorFlow compresses none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from concord.porting.containers.bundle.messages import number, varint

MAGIC = 0xDB4775248B80FB57

FOOTER, TRAILER = 48, 5
"""Bytes at the end of a table, and behind each block: a byte that says how it is compressed, and a checksum."""

LARGEST_BLOCK = 1 << 12
"""Bytes of a block that is written."""

MOST = 1 << 20
"""Entries of a table."""


def crc32c(data: bytes) -> int:
    """Return a checksum as LevelDB and TensorFlow keep it."""
    import google_crc32c

    return masked(google_crc32c.value(data))


def masked(value: int) -> int:
    """Return a checksum in the disguise that it has in files which checksums of are made."""
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def entries(data: bytes) -> dict[bytes, bytes]:
    """Return the entries of a table.

    Raises:
        ValueError: if it is no whole table.
    """
    if len(data) < FOOTER or int.from_bytes(data[-8:], "little") != MAGIC:
        raise ValueError("it does not end as an index does")
    footer = data[-FOOTER:]
    _, place = _handle(footer, 0)
    where, _ = _handle(footer, place)
    found: dict[bytes, bytes] = {}
    seen = 0
    for _, handle in _block(data, where):
        inner, _ = _handle(handle, 0)
        seen += inner[1]
        if seen > len(data):  # blocks in each other, which would be looked at more often than there is time
            raise ValueError("its blocks have more bytes than it")
        for key, value in _block(data, inner):
            if key in found or len(found) >= MOST:
                raise ValueError(f"the name {key[:60]!r} is there twice, or there are more than {MOST}")
            found[key] = value
    return found


def _handle(data: bytes, place: int) -> tuple[tuple[int, int], int]:
    offset, place = varint(data, place)
    size, place = varint(data, place)
    return (offset, size), place


def _block(data: bytes, where: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    offset, size = where
    if offset + size + TRAILER > len(data) or size < 4:
        raise ValueError("a block reaches beyond its end")
    if data[offset + size] != 0:
        raise ValueError("a block is compressed; TensorFlow's are not")
    if crc32c(data[offset : offset + size + 1]) != int.from_bytes(
        data[offset + size + 1 : offset + size + TRAILER], "little"
    ):
        raise ValueError("the checksum of a block is another")
    block = data[offset : offset + size]
    restarts = int.from_bytes(block[-4:], "little")
    end = size - 4 - 4 * restarts
    if end < 0:
        raise ValueError("a block has no room for its restarts")
    place, key = 0, b""
    while place < end:
        shared, place = varint(block, place)
        rest, place = varint(block, place)
        length, place = varint(block, place)
        if shared > len(key) or place + rest + length > end:
            raise ValueError("an entry reaches beyond its block")
        key = key[:shared] + block[place : place + rest]
        yield key, block[place + rest : place + rest + length]
        place += rest + length


def table(given: dict[bytes, bytes]) -> bytes:
    """Return a table of entries, sorted by name."""
    found, handles, block = bytearray(), [], bytearray()
    last = b""
    for key in sorted(given):
        if len(block) > LARGEST_BLOCK:
            handles.append((last, _close(found, block)))
            block = bytearray()
        block += number(0) + number(len(key)) + number(len(given[key])) + key + given[key]
        last = key
    handles.append((last, _close(found, block)))
    meta = _close(found, bytearray())
    index = bytearray()
    for key, handle in handles:
        index += number(0) + number(len(key)) + number(len(handle)) + key + handle
    top = _close(found, index)
    footer = (meta + top).ljust(FOOTER - 8, b"\0")
    return bytes(found) + footer + struct.pack("<Q", MAGIC)


def _close(found: bytearray, block: bytearray) -> bytes:
    """Add a block, whose names share no beginnings and so are all restarts but for the one that says so; return where it is."""
    content = bytes(block) + struct.pack("<II", 0, 1) + b"\0"
    handle = number(len(found)) + number(len(content) - 1)
    found += content + struct.pack("<I", crc32c(content))
    return handle
