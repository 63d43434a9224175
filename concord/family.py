"""How the members of the family differ."""

from __future__ import annotations

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.table import Table

from concord import spec

WIDE = 220
"""Columns of a terminal in which the variants have room side by side."""


def table(width: int) -> Table:
    """Return the fields in which variants differ.

    Args:
        width: columns of the terminal. Where there is no room for all variants side by side, those that agree in a field share a line.
    """
    configs = {name: spec.variant(name).as_dict() for name in spec.variants()}
    side_by_side = width >= WIDE
    found = Table(padding=(0, 1), box=HEAVY_HEAD if side_by_side else SIMPLE_HEAD)
    for column in ("field", *(configs if side_by_side else ("value", "variants"))):
        found.add_column(column, overflow="fold", min_width=19 if column == "variants" else None)
    for field in spec.FIELDS:
        values = {name: str(config.get(field, "–")) for name, config in configs.items()}
        different = list(dict.fromkeys(values.values()))
        if side_by_side and len(different) > 1:
            found.add_row(field, *values.values())
        elif len(different) > 1:
            for number, value in enumerate(different):
                found.add_row(
                    "" if number else field,
                    value,
                    ", ".join(name for name in configs if values[name] == value),
                )
    return found
