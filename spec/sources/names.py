"""Placeholders in a source's names.

``{i}`` is the layer, ``{h}`` the head, ``{n}`` the number of layers, ``{run}`` the label of a run, with an
optional factor and summand: ``{3i+1}``, ``{n-1}``. ``{_3i+1}`` becomes ``_4``, or nothing for 0, as in
TensorFlow 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{(_?)(\d*)(i|h|n|run)(?:([+-]\d+))?\}")


def fill(pattern: str, values: Mapping[str, int | str]) -> str:
    """Fill in the placeholders of a name; variables without a value remain."""

    def replaced(match: re.Match[str]) -> str:
        underscore, factor, variable, summand = match.groups()
        value = values.get(variable)
        if value is None:
            return match.group()
        if isinstance(value, str):
            return value
        number = int(factor or 1) * value + int(summand or 0)
        return "" if underscore and number == 0 else f"{underscore}{number}"

    return _PLACEHOLDER.sub(replaced, pattern)


def variables(pattern: str) -> set[str]:
    """Variables in a name."""
    return {match[3] for match in _PLACEHOLDER.finditer(pattern)}


def problem(pattern: str) -> str | None:
    """Describe a malformed placeholder, or return None."""
    rest = _PLACEHOLDER.sub("", pattern)
    if "{" in rest or "}" in rest:
        return (
            f"{pattern!r} holds a placeholder that cannot be read; it must look like {{i}}, {{_3i+1}}, "
            f"{{h}}, {{n-1}} or {{run}}"
        )
    return None
