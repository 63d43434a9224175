"""Lines of text files, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from concord.spec.errors import SpecError, unknown

LONGEST = 1 << 20
"""Bytes of the longest line that is taken: a text of 1 MiB has more tokens than any model has positions."""

SHOWN = 20
"""Problems of files that are listed; the others are counted."""

ON_ERROR = ("fail", "skip")
"""What becomes of bad lines. ``fail``: nothing is done. ``skip``: they are left out. Both list them."""


@dataclass(frozen=True)
class Bad:
    """A line that cannot be read.

    Attributes:
        where: file and line.
        problem: what is wrong with it.
    """

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass
class Complaints:
    """What is wrong with lines of data.

    Attributes:
        on_error: one of :data:`ON_ERROR`.
        problems: what is wrong, each with file and line.

    Raises:
        UnknownNameError: for another ``on_error``.
    """

    on_error: str = "fail"
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise unknown("--on-error", self.on_error, list(ON_ERROR))

    @property
    def count(self) -> int:
        """How many lines are bad."""
        return len(self.problems)

    def listed(self) -> list[str]:
        """Return a line for each of the first problems, and one that counts the others."""
        more = self.count - SHOWN
        return self.problems[:SHOWN] + [f"and {more} more bad line{'' if more == 1 else 's'}"] * (more > 0)

    def settle(self) -> None:
        """Refuse what has been read, if a bad line is not to be skipped.

        Raises:
            SpecError: listing the first bad lines, and counting the others.
        """
        if self.count and self.on_error == "fail":
            raise SpecError(self.listed())


def numbered(stream: BinaryIO, name: str) -> Iterator[tuple[int, str | Bad]]:
    """Yield the lines of a stream with their numbers, from 1; those that are no text as what is wrong.

    A line ends in a line feed, after a carriage return or not; the last one may end in neither. A byte order
    mark before the first is no text.

    Args:
        name: of the file.
    """
    for number, line in enumerate(stream, start=1):
        bare = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(bare) > LONGEST:
            yield number, Bad(f"{name}:{number}", f"has {len(bare)} bytes but must have at most {LONGEST}")
            continue
        try:
            yield number, bare.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            why = f"is no text in utf-8: {error.reason} at byte {error.start}"
            yield number, Bad(f"{name}:{number}", why)
