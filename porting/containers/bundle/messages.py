"""The few messages of Protocol Buffers that a bundle is made of, as field numbers and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
"""TensorFlow's numbers of dtypes."""

STRING = 7
"""The number of the dtype of texts."""

LONGEST = 10
"""Bytes of a number."""


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number, and the place behind it.

    Raises:
        ValueError: if it is cut off, or has more than 64 bits.
    """
    value = 0
    for count in range(LONGEST):
        if place >= len(data):
            raise ValueError("a number is cut off")
        byte = data[place]
        place += 1
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, place
    raise ValueError("a number has more than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message by number: a number, or the bytes of a text or an inner message.

    Raises:
        ValueError: if it is no message.
    """
    if not isinstance(data, bytes):
        raise ValueError("a number stands where a message should")
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = varint(data, place)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None and kind == 2:
            length, place = varint(data, place)
        if length is None or place + length > len(data):
            raise ValueError("a message is cut off, or is none")
        part = data[place : place + length]
        yield key >> 3, part if kind == 2 else int.from_bytes(part, "little")
        place += length


def shape_of(data: bytes) -> tuple[int, ...]:
    """Return a shape.

    Raises:
        ValueError: if it is none that a stored tensor has.
    """
    found = []
    for number, value in fields(data):
        if number != 2:
            raise ValueError("a shape is not known")
        lengths = [inner for inner_number, inner in fields(value) if inner_number == 1] or [0]
        found.append(int(lengths[-1]))
    return tuple(found)


# Writing.


def number(value: int) -> bytes:
    """Return a whole number from 0 on."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def message(**given: int | bytes | str | list[bytes]) -> bytes:
    """Return a message: ``f1=…`` is its field 1; a list is a field that is there several times, ``x6=…`` is field 6 as four bytes."""
    found = b""
    for name, value in given.items():
        field = int(name[1:])
        if name[0] == "x" and isinstance(value, int):
            found += number(field << 3 | 5) + value.to_bytes(4, "little")
        elif isinstance(value, int):
            found += number(field << 3) + number(value) if value else b""
        else:
            for part in value if isinstance(value, list) else [value]:
                content = part.encode() if isinstance(part, str) else part
                found += number(field << 3 | 2) + number(len(content)) + content
    return found


def graph(keys: Mapping[str, str]) -> bytes:
    """Return the graph of objects that TensorFlow 2 finds variables by.

    Args:
        keys: the key of each variable in the checkpoint, by its path from the root, ``model/layers/0/…/kernel``.
    """
    tree: dict[str, Any] = {}
    for path in keys:
        *outer, last = path.split("/")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = path
    nodes: list[bytes] = []

    def add(node: dict[str, Any] | str) -> int:
        own = len(nodes)
        nodes.append(b"")
        if isinstance(node, str):
            nodes[own] = message(f2=message(f1="VARIABLE_VALUE", f2=node, f3=keys[node]), f5=message(f1=1))
        else:
            nodes[own] = message(
                f1=[message(f1=add(inner), f2=name) for name, inner in node.items()], f5=message(f1=1)
            )
        return own

    add(tree)
    return message(f1=nodes)
