"""Reading the table of a source strictly.

Every key that is missing, unknown or of the wrong type is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concord.spec.errors import located
from concord.spec.files import typed
from concord.spec.sources.schema import Table


def parse(data: Mapping[str, Any], where: str) -> Table:
    """Return a table from plain data.

    Args:
        data: what the TOML file holds.
        where: its name, for messages.

    Raises:
        SpecError: listing every key that is missing, unknown or of the wrong type, every unknown layout and
            every placeholder that cannot be read, at once.
    """
    with located(where):
        return typed(Table, _spread(data))


def _spread(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with all that a part has from another one; what is no part is complained of later."""
    parts = data.get("parts")
    if not isinstance(parts, Mapping):
        return dict(data)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        found[name] = part
        if isinstance(part, Mapping) and isinstance(model := found.get(str(part.get("like"))), Mapping):
            left, weights = part.get("without", []), model.get("weights", {})
            plain = isinstance(left, list) and isinstance(weights, Mapping)
            kept = {key: value for key, value in weights.items() if key not in left} if plain else weights
            own = {
                key: value
                for key, value in part.items()
                if key not in ("like", *(["without"] if plain else []))
            }
            found[name] = {
                **inherited(model),
                "weights": kept,
                **own,
                "checkpoint": _both(model.get("checkpoint", {}), part.get("checkpoint", {})),
            }
    named = {
        name: {**part, "name": name} if isinstance(part, Mapping) else part for name, part in found.items()
    }
    return {**data, "parts": named}


def _both(one: Any, other: Any) -> Any:
    """Return what files have of a part and of the one that it is like.

    What is ignored in either, and of everything else its own.
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return other  # complained of later
    ignored = [part["ignored"] for part in (one, other) if "ignored" in part]
    merged = (
        {"ignored": {name: why for part in ignored for name, why in part.items()}}
        if ignored and all(isinstance(part, Mapping) for part in ignored)
        else {}
    )
    return {**one, **other, **merged}


def inherited(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one part has from another: not what was run, and what that gave."""
    return {
        key: value for key, value in part.items() if key not in ("outputs", "gradients", "unchecked", "runs")
    }
