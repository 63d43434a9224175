"""What lies beside the weights and belongs to the model: labels, tokenizer, how long texts may be.

In what two checkpoints do not say the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from concord.porting.checkpoint import Checkpoint
from concord.porting.folder import CARRIED, LABELS, LENGTHS, PROMPTS, SENTENCES
from concord.porting.sentences import ARGUMENTS
from concord.spec.errors import SpecError
from concord.spec.files import parse_json

BESIDE = tuple(name for name in (*CARRIED, *SENTENCES) if name != LABELS)
"""The files; labels are compared by what they are, which a configuration may say too."""

MOST = 3
"""Entries that differ of which a file's line tells."""

SILENT = {LENGTHS: (ARGUMENTS,), PROMPTS: ("__version__",)}
"""Entries of a file that say nothing of the model: how a library is to load what lies there anyway, and which
one wrote it."""

ABSENT = object()


def differing(first: Checkpoint, second: Checkpoint, sides: tuple[str, str] = ("A", "B")) -> dict[str, str]:
    """Return which labels and files of two checkpoints do not say the same, and in what, in words.

    Only those that both have.

    Args:
        sides: what the two are called.
    """
    found = {}
    if first.labels and second.labels and first.labels != second.labels:
        found["labels"] = _told(
            list(
                _apart(
                    *(
                        {str(number): name for number, name in enumerate(one.labels or ())}
                        for one in (first, second)
                    )
                )
            ),
            sides,
        )
    for name in BESIDE:
        mine, other = first.files.get(name), second.files.get(name)
        if (
            mine is not None
            and other is not None
            and mine != other
            and (words := _told(list(_apart(_read(name, mine), _read(name, other))), sides))
        ):
            found[name] = words
    return found


def alone(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    """Return the files that the first has and the second has not; ``labels`` too."""
    return (
        *(["labels"] if first.labels and not second.labels else []),
        *(name for name in BESIDE if name in first.files and name not in second.files),
    )


def _read(name: str, content: bytes) -> Any:
    """Return what a file says: entries, or lines; of what cannot be understood its bytes."""
    try:
        found = (
            parse_json(content, name)
            if name.endswith(".json")
            else [line.removesuffix("\r") for line in content.decode().removesuffix("\n").split("\n")]
        )
    except (SpecError, UnicodeDecodeError):
        return content
    return (
        {key: value for key, value in found.items() if key not in SILENT.get(name, ())}
        if isinstance(found, dict)
        else found
    )


def _apart(mine: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each entry or line that is not the same, and what each side has there.

    Files may nest deeper than calls.
    """
    left = [("", mine, other)]
    while left:
        where, one, another = left.pop()
        if isinstance(one, dict) and isinstance(another, dict):
            left += [
                (f"{where}.{key}" if where else key, one.get(key, ABSENT), another.get(key, ABSENT))
                for key in reversed({**one, **another})
            ]
        elif isinstance(one, list) and isinstance(another, list):
            pairs = enumerate(zip_longest(one, another, fillvalue=ABSENT))
            left += [(f"{where}[{place}]" if where else f"line {place + 1}", *pair) for place, pair in pairs][
                ::-1
            ]
        elif type(one) is not type(another) or one != another:
            yield where, one, another


def _told(apart: list[tuple[str, Any, Any]], sides: tuple[str, str]) -> str:
    """Return in words what is not the same; empty: nothing."""
    said = [
        f"{_brief(where) or 'all of it'} is {_value(mine)} in {sides[0]} and {_value(other)} in {sides[1]}"
        for where, mine, other in apart[:MOST]
    ]
    return "; ".join([*said, *([f"and {len(apart) - MOST} more"] if len(apart) > MOST else [])])


def _value(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, (bytes, dict, list)):
        return f"{len(value)} {'bytes' if isinstance(value, bytes) else 'entries'}"
    return _brief(json.dumps(value))


def _brief(text: str) -> str:
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
