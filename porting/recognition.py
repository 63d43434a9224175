"""Which format a checkpoint is, by its files and the names of its tensors; and what a stranger is."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.matching import renamed
from concord.porting.registry import FORMATS, OWN, Format, known
from concord.spec import checkpoints
from concord.spec.errors import SpecError
from concord.spec.files import read_json
from concord.spec.sources.names import fill
from concord.spec.sources.schema import Table
from concord.spec.sources.source_tables import part_of
from concord.spec.text import shown

AUTO = "auto"

ALIKE = 0.5
"""Share of a table's names that a file must have to be taken for one of that source."""

HUB = tuple(dict.fromkeys(form.weights for form in FORMATS.values() if form.name.startswith("hugging-face")))
"""What Hugging Face's files of weights are called, one file or the index of several: folders of its hub have
them side by side. The first that is there is read, as by transformers."""

KIND, CLASSES = "model_type", "architectures"
"""The keys of a configuration by which Hugging Face knows what a model is, and of which classes it was
saved."""

LONGEST = 200
"""Characters of what a configuration says that are shown."""


@dataclass(frozen=True)
class Recognition:
    """What a path holds.

    Attributes:
        format: one of :func:`concord.porting.formats`.
        why: how that is known, in words.
        folder: that the model lies in.
        weights: the file with its weights, or the folder that is one.
    """

    format: str
    why: str
    folder: Path
    weights: Path


def recognise(path: Path, table: Path | None = None, format: str = AUTO) -> Recognition:
    """Say which format a path holds, and how that is known; no weights are read.

    Args:
        path: a folder, or the file of weights in it.
        table: somebody's own, that says names and layouts: only the kind of file is looked for.
        format: the one that it holds, if that is known.

    Raises:
        UnknownNameError: for an unknown format.
        SpecError: if there is nothing, or nothing that is known.
    """
    folder, marks = folders.folder_of(path), (checkpoints.CONTENTS, checkpoints.CONFIG)
    said = known(format) if format != AUTO else None
    if not (said or table) and all((folder / mark).exists() for mark in marks):
        why = f"{' and '.join(marks)} are those of this project's own checkpoints"
        return Recognition(OWN, why, folder, path)
    modules = not table and (said.modules if said else (folder / sentences.MODULES).exists())
    inner = sentences.places(folder)[0] if modules else folder
    if said:
        whole = folders.is_weights(path) or said.name == OWN
        weights = path if whole else _weights([said], path, inner)
        return Recognition(said.name, "it was said with --from", inner, weights)
    candidates = [form for form in FORMATS.values() if form.modules == modules and form.name != OWN]
    candidates = [form for form in candidates if form.source or not table]
    weights = _weights(candidates, path, inner)
    fitting = [form for form in candidates if form.container.is_one(weights)]
    native = next((form for form in fitting if form.backend), None)
    if table:
        form, why = fitting[0], f"it is such a file; {table.name} says names and layouts"
    elif native and (folder / checkpoints.CONFIG).exists():
        why = f"{checkpoints.CONFIG} states a configuration of the family"
        form, why = native, f"{why}, and {weights.name} holds {native.meaning}"
    else:
        form, why = _by_names(weights, [form for form in fitting if form.source], inner)
    if modules:
        why = f"{sentences.MODULES} lists modules of sentence-transformers"
    beside = [name for kind in HUB if weights.name not in kind for name in kind if (inner / name).exists()]
    if beside and not folders.is_weights(path):
        why += f"; {', '.join(beside)} beside it {'is' if len(beside) == 1 else 'are'} not read"
    return Recognition(form.name, why, inner, weights)


def _weights(candidates: Sequence[Format], path: Path, folder: Path) -> Path:
    """Return the file of weights that a path is, or that its folder has.

    Raises:
        SpecError: if it has none, or several of which nobody said which.
    """

    def is_one(entry: Path) -> bool:
        return any(form.container.is_one(entry) for form in candidates)

    if folders.is_weights(path):
        if is_one(path):
            return path
        raise SpecError(f"{path}: is no file of weights that is known")
    names = dict.fromkeys(name for form in candidates for name in form.weights if (folder / name).exists())
    there = [folder / name for name in names] or sorted(entry for entry in folder.iterdir() if is_one(entry))
    of_hub = [[folder / name for name in kind if name in names] for kind in HUB]
    if names and sum(map(len, of_hub)) == len(names):  # they hold the same
        there = next(filter(None, of_hub))
    if not there:
        raise SpecError(f"{folder}: has no file of weights that is known")
    if len(there) > 1:
        raise SpecError(
            f"{folder}: has {', '.join(entry.name for entry in there[:5])}; name the one to read, or its "
            "format with --from"
        )
    return there[0]


def _by_names(weights: Path, fitting: Sequence[Format], folder: Path) -> tuple[Format, str]:
    """Return whose names the tensors of a file bear, and how that is known.

    Bare models of several kinds have the same names: the configuration says which.
    """
    of_kind = [
        form
        for form in fitting
        if form.table and _of_this_kind(form.table, _stated(folder, form.configuration))
    ]
    fitting = of_kind or fitting
    found = fitting[0].container.read(weights) if fitting else {}
    alike = [(_nearness(form.table, found), form) for form in fitting if form.table]
    share, best = max(alike, key=lambda pair: pair[0], default=(0.0, None))
    if best and share >= ALIKE:
        return best, f"{weights.name} has {share:.0%} of the names in the table of {best.source}"
    stated, own = _stated(folder), (folder / checkpoints.CONFIG).exists()
    few = "" if stated else f", such as {', '.join(repr(name[:80]) for name in list(found)[:3]) or 'none'},"
    said = [f"{weights}: its {len(found)} tensors{few} have names of no format that is known"]
    if kind := {key: stated[key] for key in (KIND, CLASSES) if key in stated}:
        said.append(f"{folders.CONFIG} says {shown(json.dumps(kind), LONGEST)}")
    elif not own:
        said.append(f"one of a backend's own needs {checkpoints.CONFIG} beside it")
    raise SpecError("; ".join(said))


def _stated(folder: Path, name: str = folders.CONFIG) -> dict[str, Any]:
    """Return what a configuration says; nothing: there is none."""
    stated = read_json(folder / name) if (folder / name).exists() else {}
    return stated if isinstance(stated, dict) else {}


def _of_this_kind(table: Table, stated: Mapping[str, Any]) -> bool:
    """Say whether a configuration is one of a table's, by the kind that it names."""
    kind = stated.get(KIND)
    wanted = [part.checkpoint.requires.get(KIND) for part in table.parts.values()]
    return kind is None or any(words is None or kind in words for words in wanted)


def _nearness(table: Table, found: Collection[str]) -> float:
    """Return which share of a table's names a file has, without those of heads."""
    part = table.parts.get("encoder") or part_of(table)
    prefixes = part.checkpoint.prefixes or [""]
    names = (fill(native.name, {"i": 0, "h": 0, "n": 1}) for native in part.weights.values())
    wanted = {renamed(name, prefixes, "") for name in names}
    return max(sum(prefix + name in found for name in wanted) for prefix in prefixes) / max(len(wanted), 1)
