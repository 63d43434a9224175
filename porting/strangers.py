"""Whose names the tensors of a file bear, and what a checkpoint is that the family does not have."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from concord.porting.matching import renamed
from concord.porting.stored import StoredTensor
from concord.spec.sources.names import fill
from concord.spec.sources.schema import PartTable, Table
from concord.spec.sources.table import part_of
from concord.spec.text import first_of

KIND, CLASSES = "model_type", "architectures"
"""The keys of a configuration by which Hugging Face knows what a model is, and of which classes it was
saved."""

MOST = 3
"""Classes that are told."""

FEW = 2
"""Names that are told, of those that are missing and of those that are left over."""

BEGINNINGS = 20
"""Ways in which the names of a file begin that are tried, the most frequent ones."""

LONGEST = 80
"""Characters of a name, or of a word of a configuration."""


def named(stated: Mapping[str, Any]) -> str:
    """Return the kind of a model, and its classes, as a configuration names them; empty: it does not."""
    classes = stated.get(CLASSES)
    listed = (
        [one if str(one).isidentifier() else _shown(one) for one in classes[:MOST]]
        if isinstance(classes, list)
        else []
    )
    kind = f"{KIND} {_shown(stated[KIND])}" if KIND in stated else f"no {KIND}" if stated else ""
    return f"{kind} ({_cut(', '.join(listed))})" if listed else kind


def nearness(
    table: Table, found: Mapping[str, StoredTensor], prefixes: Sequence[str] = ()
) -> tuple[float, str]:
    """Return which share of a table's names a file has, without those of heads, and how they begin there.

    Args:
        prefixes: how they may begin; by default as the table says.
    """
    part = _bare(table)
    wanted, shares = _names(part), dict[str, float]()
    for prefix in prefixes or part.checkpoint.prefixes or ("",):
        shares[prefix] = sum(prefix + name in found for name in wanted) / max(len(wanted), 1)
    best = max(shares, key=shares.__getitem__)
    return shares[best], best


def described(found: Mapping[str, StoredTensor], tables: Iterable[Table]) -> str:
    """Return the nearest of the family, and which names differ, in a line; empty: none is near.

    Args:
        found: the tensors of the file.
        tables: of the formats that the file could be one of.
    """
    beginnings = _beginnings(found)
    near = [(*nearness(table, found, beginnings), table) for table in tables]
    share, prefix, table = max(near, key=lambda one: one[0], default=(0.0, "", None))
    if table is None or not share:
        return ""
    plain = {re.sub(r"(?<=\.)\d+(?=\.)", "0", name.removeprefix(prefix)) for name in found}
    known = {name for part in table.parts.values() for name in _names(part)}
    ignored = [
        renamed(pattern, part.checkpoint.prefixes, "")
        for part in table.parts.values()
        for pattern in part.checkpoint.ignored
    ]
    differing = {
        "lacks": [name for name in _names(_bare(table)) if prefix + name not in found],
        "has": sorted(
            name for name in plain - known if not any(fnmatchcase(name, pattern) for pattern in ignored)
        ),
    }
    said = [f"it {what} {first_of([*map(_shown, names)], FEW)}" for what, names in differing.items() if names]
    same = "the names of its tensors are the same"
    return f"nearest is the variant {table.variant}: {'; '.join(said) or same}"


def _bare(table: Table) -> PartTable:
    return table.parts.get("encoder") or part_of(table)


def _names(part: PartTable) -> dict[str, None]:
    """Return the names of a part's first layer, without prefix, in order."""
    first = part.checkpoint.prefixes[:1] or ("",)
    names = (fill(native.name, {"i": 0, "h": 0, "n": 1}) for native in part.weights.values())
    return dict.fromkeys(renamed(name, first, "") for name in names)


def _beginnings(found: Iterable[str]) -> list[str]:
    """Return how the names of a file may begin, nothing first."""
    parts = [name.split(".", 2) for name in found]
    counted = Counter(f"{'.'.join(one[:depth])}." for one in parts for depth in (1, 2) if len(one) > depth)
    return ["", *(prefix for prefix, _ in counted.most_common(BEGINNINGS))]


def _shown(value: Any) -> str:
    """Return a value in a line, its beginning if it is long."""
    return _cut(repr(value) if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
