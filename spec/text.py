"""Text from outside, such as names in a file, as it may be shown.

Characters that can be seen, and no more of them than one reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST, LONGEST_WORD = 8000, 500
"""Characters of a text, and of a word in it, that are shown."""


def legible(text: str) -> str:
    """Return a text with what cannot be seen, such as control characters, marks of direction and lone
    surrogates, written out as Python would.
    """
    return re.sub(r"[^\n\t -~]", lambda found: _seen(found[0]), text)


def _seen(char: str) -> str:
    # Spaces of other widths are not printable to Python, but harm nobody.
    return (
        char
        if char.isprintable() or (char.isspace() and char > "\x9f" and char not in "\u2028\u2029")
        else char.encode("unicode_escape").decode()
    )


def shortened(text: str, most: int = LONGEST, word: int = LONGEST_WORD) -> str:
    """Return the beginning and the end of a text that is too long, and of every word of it that is.

    Args:
        most: characters that it may have.
        word: characters that a word of it may have.
    """
    return _cut(re.sub(rf"\S{{{word + 1},}}", lambda found: _cut(found[0], word), text), most)


def _cut(text: str, most: int) -> str:
    end = (most - 1) // 4
    return text if len(text) <= most else f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def shown(text: str, most: int = LONGEST, word: int = LONGEST_WORD) -> str:
    """Return a text from outside as one line of a terminal.

    Shortened, legible, with its line breaks written out.

    Args:
        most: characters of it that are shown.
        word: characters of a word of it that are shown.
    """
    return legible(shortened(text, most, word)).replace("\n", "\\n")


def first_line(said: object) -> str:
    """Return the first line of what an error says; empty if it says nothing."""
    return next(iter(str(said).strip().splitlines()), "")


def first_of(words: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first of several words, and how many more there are.

    Args:
        most: words that are said.
    """
    said, more = between.join(words[:most]), len(words) - most
    return f"{said}{' ' if between == ', ' else between}and {more} more" if more > 0 else said
