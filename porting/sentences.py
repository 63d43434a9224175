"""Folders of sentence-transformers: modules one after the other, the first of which is a model of Hugging Face's."""

from __future__ import annotations

from pathlib import Path

from concord.porting import folder as folders
from concord.spec.errors import SpecError
from concord.spec.files import read_json

MODULES = "modules.json"

BEHIND = ("Pooling", "Normalize")
"""The modules that may follow a Transformer; what they say is carried over."""


def inner(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Return the folder of the model, and what the other modules say, by name.

    Raises:
        SpecError: if there are other modules than the family has, or they lie elsewhere.
    """
    where = folder / MODULES
    modules = read_json(where)
    said = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in said]
    if not kinds or kinds[0] != "Transformer":
        raise SpecError(f"{where}: lists {_brief(kinds) or 'no modules'} but must list a Transformer first")
    others = [kind for kind in kinds[1:] if kind not in BEHIND]
    if others:
        raise SpecError(f"{where}: lists {_brief(others)} but the family has {' and '.join(BEHIND)} alone behind a Transformer")
    places = [str(module.get("path", "")) for module in said]
    configs = [f"{place}/{folders.CONFIG}" for place in places[1:]]
    found = {name: folders.inside(folder, name, str(where)) for name in configs}
    there = tuple(name for name, path in found.items() if path.exists())
    first = folders.inside(folder, places[0], str(where))
    if not first.is_dir():
        raise SpecError(f"{where}: names {places[0][:80]!r} but there is no such folder in {folder}")
    return first, folders.carried(folder, there)


def _brief(kinds: list[str]) -> str:
    return ", ".join(kind if kind.isidentifier() else repr(kind[:40]) for kind in kinds[:10])
