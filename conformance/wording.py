"""Numbers, names and facts in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from concord.spec.text import first_of

# Number of significant digits that distinguish any two float64 values.
MOST_DIGITS = 17


def distinct(*values: Any, digits: int = 6) -> tuple[str, ...]:
    """Format values with enough digits to distinguish those that differ.

    Args:
        values: numbers, or other options; None for an absent one.
    """
    while True:
        words = tuple(_said(value, digits) for value in values)
        if len(set(words)) >= len(set(values)) or digits >= MOST_DIGITS:
            return words
        digits += 1


def instead_of(made: Any, right: Any, digits: int = 6) -> str:
    """Format a value and the correct one."""
    return " instead of ".join(distinct(made, right, digits=digits))


def multiple(factor: float) -> str:
    """Format a factor, distinct from 0, 1 and -1."""
    return distinct(float(factor), 0.0, 1.0, -1.0)[0]


def gather(things: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Group things by a key, in order."""
    gathered: dict[Any, list[Any]] = {}
    for thing in things:
        gathered.setdefault(key(thing), []).append(thing)
    return gathered


# Up to this many names with the same reason get a line each.
FEW = 3


def once(reasons: Iterable[tuple[str, str, object]]) -> list[str]:
    """One line per name, or per reason of many names, from triples of name, words, and shared key."""
    lines = []
    for group in gather(reasons, lambda entry: entry[2]).values():
        few = len(group) <= FEW
        for name, words, _ in group[: FEW if few else 1]:
            lines += f"{name}: {words}".split("\n")
        if not few:
            lines.append(
                f"  likewise {len(group) - 1} more: {first_of([other for other, *_ in group[1:]], FEW)}"
            )
    return lines


def plain(value: object) -> str:
    """Format a fact in words."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "on", False: "off"}[value]
    return str(value)


def markdown_table(lines: Iterable[Sequence[str]]) -> str:
    """Lines of cells, the second of which aligns the columns, in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def joined(names: Sequence[str]) -> str:
    """List names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _said(value: Any, digits: int) -> str:
    if value is None:
        return "absent"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def few(places: Iterable[object], most: int = 4) -> str:
    """List the first of several places."""
    first = list(map(str, islice(places, most + 1)))
    return ", ".join(first[:most]) + (", …" if len(first) > most else "")
