"""A machine for pickles that runs nothing: names stay names, and long bytes stay in the file.

Opcodes: https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from concord.porting.located import Refused

LONG = 64
"""Bytes from which on a text of bytes stays in the file."""

DEEPEST = 1 << 22
"""Entries that stack and memo may have, each."""


@dataclass(frozen=True)
class Name:
    """A class or function, which nobody has looked for."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Span:
    """Bytes that lie in the file.

    Attributes:
        text: whether they are text in utf-8, each character of which stands for a byte: so protocol 2 spells bytes.
    """

    begin: int
    length: int
    text: bool = False


@dataclass(eq=False)
class Call:
    """What a pickle wants to have called, or constructed, and the state that it wants to give to what comes of it."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """What lies outside of the pickle, by what its ``persistent_id`` says."""

    key: Any


_MARK = object()


class Machine:
    """Reads one pickle of a file.

    Args:
        data: the file.
        begin: the byte at which the pickle begins.

    Attributes:
        place: the next byte to be read; after :meth:`run`, the one behind the pickle.
    """

    def __init__(self, data: mmap.mmap | bytes, begin: int = 0) -> None:
        self.data, self.place = data, begin
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return what the pickle holds, of dictionaries, lists, numbers, texts, names and calls.

        Raises:
            Refused: if it is no whole pickle, or asks for what no file of weights needs.
        """
        while True:
            if self.place >= len(self.data):
                raise Refused("it is cut off")
            code = self.data[self.place : self.place + 1]
            self.place += 1
            if code == pickle.STOP:
                return self.pop()
            step = _STEPS.get(bytes(code))
            if step is None:
                raise Refused(
                    f"it has the opcode {bytes(code)!r} at byte {self.place - 1}, which no file of weights needs"
                )
            step(self)
            if len(self.stack) > DEEPEST or len(self.memo) > DEEPEST:
                raise Refused(f"it holds more than {DEEPEST} objects")

    # Reading.

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count < 0 or self.place + count > len(self.data):
            raise Refused(f"it is cut off, or says that {count} bytes follow at byte {self.place}")
        self.place += count
        return bytes(self.data[self.place - count : self.place])

    def number(self, kind: str) -> Any:
        """Return the next number, of a kind that ``struct`` knows."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def line(self) -> bytes:
        """Return the rest of a line."""
        end = self.data.find(b"\n", self.place, self.place + (1 << 16))
        if end < 0:
            raise Refused(f"it is cut off, or has a line without an end at byte {self.place}")
        found = bytes(self.data[self.place : end])
        self.place = end + 1
        return found

    def text(self, count: int) -> str | Span:
        """Return a text; a long one stays in the file."""
        if count >= LONG * 16:
            return self.span(count, text=True)
        return self.take(count).decode("utf-8", "surrogatepass")

    def bytes_of(self, count: int) -> bytes | Span:
        """Return bytes; many stay in the file."""
        return self.span(count) if count >= LONG else self.take(count)

    def span(self, count: int, text: bool = False) -> Span:
        """Pass over bytes that stay in the file."""
        if count < 0 or self.place + count > len(self.data):
            raise Refused(f"it is cut off, or says that {count} bytes follow at byte {self.place}")
        self.place += count
        return Span(self.place - count, count, text)

    def skip(self, count: int) -> None:
        """Pass over bytes that say nothing."""
        self.take(count)

    # The stack.

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Take the value on top off."""
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("its stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the value on top."""
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("its stack is empty")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Take all from the last mark on."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                found = self.stack[place + 1 :]
                del self.stack[place:]
                return found
        raise Refused("it has no mark where it needs one")

    def drop(self, to_mark: bool = False) -> None:
        """Take the value on top off, or all from the last mark on."""
        if to_mark:
            self.marked()
        else:
            self.pop()

    def remember(self, number: int) -> None:
        """Keep the value on top."""
        self.memo[number] = self.top()

    def recall(self, number: int) -> None:
        """Put a value that was kept on the stack."""
        if number not in self.memo:
            raise Refused(f"it recalls {number}, which it has never kept")
        self.push(self.memo[number])

    # Containers.

    def extend(self, values: list[Any]) -> None:
        """Add values to the list on top."""
        target = self.top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Call):
            target.entries[len(target.entries)] = values
        else:
            raise Refused("it appends to what is no list")

    def fill(self, values: list[Any]) -> None:
        """Set entries of the dictionary on top."""
        target = self.top()
        entries = target.entries if isinstance(target, Call) else target
        if not isinstance(entries, dict) or len(values) % 2:
            raise Refused("it sets entries of what is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Nor is it a tuple, which may hold tuples: to hash them may take for ever.
            if not isinstance(key, (str, int, float, bytes, NoneType)):
                raise Refused("a key of a dictionary is neither text nor number")
            entries[key] = value

    def call(self, new: bool = False) -> None:
        """Note a call."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, tuple):
            raise Refused("it calls something with what are no arguments")
        self.push(Call(function, arguments))
        if new and not isinstance(function, Name):
            raise Refused("it constructs an object of what is no class")

    def build(self) -> None:
        """Note the state of an object."""
        state, target = self.pop(), self.top()
        if not isinstance(target, Call):
            raise Refused("it gives a state to what is no object")
        target.state = state

    def named(self, module: Any, name: Any) -> None:
        """Put the name of a class or function on the stack."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("a class is named by what is no text")
        self.push(Name(module, name))


def _whole(line: bytes) -> int | bool:
    if line in (b"00", b"01"):
        return line == b"01"
    try:
        return int(line.rstrip(b"L"))
    except ValueError:
        raise Refused(f"{line[:20]!r} is no number") from None


def _float(line: bytes) -> float:
    try:
        return float(line)
    except ValueError:
        raise Refused(f"{line[:20]!r} is no number") from None


def _integer(machine: Machine, count: int) -> int:
    if count > 1024:
        raise Refused(f"it has a number of {count} bytes")
    return int.from_bytes(machine.take(count), "little", signed=True)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
        raise Refused("it has a text without quotation marks")
    return line[1:-1].decode("latin-1")


_STEPS: dict[bytes, Callable[[Machine], None]] = {
    pickle.PROTO: lambda m: m.skip(1),
    pickle.FRAME: lambda m: m.skip(8),
    pickle.MARK: lambda m: m.push(_MARK),
    pickle.POP: lambda m: m.drop(),
    pickle.POP_MARK: lambda m: m.drop(to_mark=True),
    pickle.DUP: lambda m: m.push(m.top()),
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.INT: lambda m: m.push(_whole(m.line())),
    pickle.LONG: lambda m: m.push(_whole(m.line())),
    pickle.BININT: lambda m: m.push(m.number("i")),
    pickle.BININT1: lambda m: m.push(m.number("B")),
    pickle.BININT2: lambda m: m.push(m.number("H")),
    pickle.LONG1: lambda m: m.push(_integer(m, m.number("B"))),
    pickle.LONG4: lambda m: m.push(_integer(m, m.number("i"))),
    pickle.FLOAT: lambda m: m.push(_float(m.line())),
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.STRING: lambda m: m.push(_quoted(m.line())),
    pickle.BINSTRING: lambda m: m.push(m.bytes_of(m.number("i"))),
    pickle.SHORT_BINSTRING: lambda m: m.push(m.take(m.number("B")).decode("latin-1")),
    pickle.UNICODE: lambda m: m.push(m.line().decode("raw-unicode-escape")),
    pickle.BINUNICODE: lambda m: m.push(m.text(m.number("I"))),
    pickle.SHORT_BINUNICODE: lambda m: m.push(m.text(m.number("B"))),
    pickle.BINUNICODE8: lambda m: m.push(m.text(m.number("Q"))),
    pickle.BINBYTES: lambda m: m.push(m.bytes_of(m.number("I"))),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.bytes_of(m.number("B"))),
    pickle.BINBYTES8: lambda m: m.push(m.bytes_of(m.number("Q"))),
    pickle.BYTEARRAY8: lambda m: m.push(m.bytes_of(m.number("Q"))),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.EMPTY_SET: lambda m: m.push([]),
    pickle.TUPLE: lambda m: m.push(tuple(m.marked())),
    pickle.TUPLE1: lambda m: m.push((m.pop(),)),
    pickle.TUPLE2: lambda m: m.push((m.pop(), m.pop())[::-1]),
    pickle.TUPLE3: lambda m: m.push((m.pop(), m.pop(), m.pop())[::-1]),
    pickle.LIST: lambda m: m.push(m.marked()),
    pickle.DICT: lambda m: _dict(m, m.marked()),
    pickle.APPEND: lambda m: m.extend([m.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.marked()),
    pickle.ADDITEMS: lambda m: m.extend(m.marked()),
    pickle.SETITEM: lambda m: m.fill([m.pop(), m.pop()][::-1]),
    pickle.SETITEMS: lambda m: m.fill(m.marked()),
    pickle.GLOBAL: lambda m: m.named(
        m.line().decode("utf-8", "replace"), m.line().decode("utf-8", "replace")
    ),
    pickle.STACK_GLOBAL: lambda m: m.named(*[m.pop(), m.pop()][::-1]),
    pickle.REDUCE: lambda m: m.call(),
    pickle.NEWOBJ: lambda m: m.call(new=True),
    pickle.BUILD: lambda m: m.build(),
    pickle.PERSID: lambda m: m.push(Stored(m.line().decode("utf-8", "replace"))),
    pickle.BINPERSID: lambda m: m.push(Stored(m.pop())),
    pickle.PUT: lambda m: m.remember(int(_whole(m.line()))),
    pickle.BINPUT: lambda m: m.remember(m.number("B")),
    pickle.LONG_BINPUT: lambda m: m.remember(m.number("I")),
    pickle.MEMOIZE: lambda m: m.remember(len(m.memo)),
    pickle.GET: lambda m: m.recall(int(_whole(m.line()))),
    pickle.BINGET: lambda m: m.recall(m.number("B")),
    pickle.LONG_BINGET: lambda m: m.recall(m.number("I")),
}


def _dict(machine: Machine, values: list[Any]) -> None:
    machine.push({})
    machine.fill(values)
