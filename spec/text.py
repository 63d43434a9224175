"""Formatting untrusted text, such as names in a file, for printing."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Maximum characters of a text, and of a word in it.
LONGEST, LONGEST_WORD = 8000, 500


def legible(text: str) -> str:
    """Escape invisible characters: control characters, direction marks, lone surrogates."""
    return re.sub(r"[^\n\t -~]", lambda match: _seen(match[0]), text)


def _seen(char: str) -> str:
    # Python considers spaces of other widths unprintable, but they are harmless.
    return (
        char
        if char.isprintable() or (char.isspace() and char > "\x9f" and char not in "\u2028\u2029")
        else char.encode("unicode_escape").decode()
    )


def shortened(text: str, most: int = LONGEST, word: int = LONGEST_WORD) -> str:
    """Shorten long texts and words in the middle."""
    return _cut(re.sub(rf"\S{{{word + 1},}}", lambda match: _cut(match[0], word), text), most)


def _cut(text: str, most: int) -> str:
    end = (most - 1) // 4
    return text if len(text) <= most else f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def shown(text: str, most: int = LONGEST, word: int = LONGEST_WORD) -> str:
    """Format a text as one line, shortened and legible."""
    return legible(shortened(text, most, word)).replace("\n", "\\n")


def first_line(said: object) -> str:
    """First line of an error's message, if any."""
    return next(iter(str(said).strip().splitlines()), "")


def first_of(words: Sequence[str], most: int, between: str = ", ") -> str:
    """List the first words, and count the others."""
    text, more = between.join(words[:most]), len(words) - most
    return f"{text}{' ' if between == ', ' else between}and {more} more" if more > 0 else text
