"""A checkpoint in several files (shards): an index beside them says which tensor is in which. It is no kind of file by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from concord.porting.links import stays
from concord.porting.stored import Stored
from concord.spec.errors import SpecError
from concord.spec.files import MOST_PROBLEMS, read_json

INDEX = ".index.json"
"""How the name of an index ends."""


def is_index(path: Path) -> bool:
    """Say whether a file has the name of an index."""
    return path.name.endswith(INDEX)


def read(path: Path, single: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    """Return the tensors of all files that an index names.

    Args:
        single: reads one of them.

    Raises:
        SpecError: if files lie elsewhere, lack a tensor or have others, and for what is wrong with one of them.
    """
    content = read_json(path)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise SpecError(f"{path}: 'weight_map' must say for each tensor which file has it")
    names = sorted(set(places.values()))
    outside = [
        name for name in names if Path(name).name != name or name in (".", "..", "") or not name.isprintable()
    ]
    outside += [name for name in names if name not in outside and not stays(path.parent / name, path.parent)]
    if outside:
        raise SpecError(
            [
                f"{path}: names the file {name[:80]!r} but all must lie beside it"
                for name in outside[:MOST_PROBLEMS]
            ]
        )
    found: dict[str, Stored] = {}
    problems = []
    for name in names:
        inside = single(path.parent / name)
        problems += [
            f"{path}: says that {tensor!r} is in {name} but it is not"
            for tensor, shard in places.items()
            if shard == name and tensor not in inside
        ]
        problems += [
            f"{path.parent / name}: has {tensor!r} but the index does not say so"
            for tensor in inside
            if places.get(tensor) != name
        ]
        found.update(inside)
    if problems:
        raise SpecError(problems[:MOST_PROBLEMS])
    return {tensor: found[tensor] for tensor in places}
