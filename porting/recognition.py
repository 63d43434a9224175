"""Recognition of a checkpoint's format."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.conformance.wording import counted
from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.matching import renamed
from concord.porting.registry import FORMATS, OWN, Format, find_format
from concord.spec import checkpoints
from concord.spec.errors import SpecError
from concord.spec.files import read_json
from concord.spec.sources.names import fill
from concord.spec.sources.schema import Table
from concord.spec.sources.source_tables import part_of
from concord.spec.text import shown

AUTO = "auto"

# Share of a table's names, without heads, that suffices to recognise a file.
ALIKE = 0.5

# Folders from Hugging Face's hub may have several of these files with the same weights. As in transformers,
# the first is read.
HUB = tuple(dict.fromkeys(form.weights for form in FORMATS.values() if form.name.startswith("hugging-face")))

# Hugging Face's keys for a model's kind and the classes that it was saved from.
KIND, CLASSES = "model_type", "architectures"

ADAPTER = "adapter_config.json"

LONGEST = 200  # maximum characters shown of a configuration's entry


@dataclass(frozen=True)
class Recognition:
    """The recognised content of a path, with the evidence in words."""

    format: str
    why: str
    folder: Path
    weights: Path  # a file, or an Orbax folder


def recognise(path: Path, table: Path | None = None, format: str = AUTO) -> Recognition:
    """Recognise a path's format without reading tensor values.

    Args:
        table: the user's names and layouts; with them, only the file type matters.

    Raises:
        SpecError: if no known format is found.
    """
    folder, marks = folders.folder_of(path), (checkpoints.CONTENTS, checkpoints.CONFIG)
    choice = find_format(format) if format != AUTO else None
    if not (choice or table) and all((folder / mark).exists() for mark in marks):
        reason = f"{' and '.join(marks)} are the files of Concord's own checkpoints"
        return Recognition(OWN, reason, folder, path)
    modules = not table and (choice.modules if choice else (folder / sentences.MODULES).exists())
    inner = sentences.places(folder)[0] if modules else folder
    if (inner / ADAPTER).exists() and not folders.is_weights(path):
        raise SpecError(
            f"{inner} holds {ADAPTER}: transformers adds this adapter, such as LoRA, to the weights; merge "
            "them first, or name the weight file, which is then read without the adapter"
        )
    if choice:
        is_exact = folders.is_weights(path) or choice.name == OWN
        weights = path if is_exact else _weights([choice], path, inner)
        return Recognition(choice.name, "it was given with --from", inner, weights)
    candidates = [
        form
        for form in FORMATS.values()
        if form.modules == modules and form.name != OWN and (form.source or not table)
    ]
    weights = _weights(candidates, path, inner)
    fitting = [form for form in candidates if form.container.is_one(weights)]
    native = next((form for form in fitting if form.backend), None)
    if table:
        form, reason = fitting[0], f"its file has this format; {table.name} gives names and layouts"
    elif native and (folder / checkpoints.CONFIG).exists():
        reason = f"{checkpoints.CONFIG} holds a configuration of Concord's own model family"
        form, reason = native, f"{reason}, and {weights.name} holds {native.meaning}"
    else:
        form, reason = _by_names(weights, [form for form in fitting if form.source], inner)
    if modules:
        reason = f"{sentences.MODULES} lists modules of sentence-transformers"
    beside = [name for kind in HUB if weights.name not in kind for name in kind if (inner / name).exists()]
    if beside and not folders.is_weights(path):
        reason += f"; {', '.join(beside)} beside it {'is' if len(beside) == 1 else 'are'} not read"
    return Recognition(form.name, reason, inner, weights)


def _weights(candidates: Sequence[Format], path: Path, folder: Path) -> Path:
    def is_one(entry: Path) -> bool:
        return any(form.container.is_one(entry) for form in candidates)

    if folders.is_weights(path):
        if is_one(path):
            return path
        raise SpecError(f"{path} is not a known kind of weight file")
    names = dict.fromkeys(name for form in candidates for name in form.weights if (folder / name).exists())
    files = [folder / name for name in names] or sorted(entry for entry in folder.iterdir() if is_one(entry))
    of_hub = [[folder / name for name in kind if name in names] for kind in HUB]
    if names and sum(map(len, of_hub)) == len(names):  # the hub's files contain the same weights
        files = next(filter(None, of_hub))
    if not files:
        kind = "known weight file"
        if len(candidates) == 1:
            kind = f"file of the format {candidates[0].name} ({', '.join(candidates[0].weights)})"
        raise SpecError(f"{folder} has no {kind}")
    if len(files) > 1:
        raise SpecError(
            f"{folder} has {', '.join(entry.name for entry in files[:5])}; name the one to read, or its "
            "format with --from"
        )
    return files[0]


def _by_names(weights: Path, fitting: Sequence[Format], folder: Path) -> tuple[Format, str]:
    # Bare models of several kinds have the same names, so the configuration decides first.
    of_kind = [
        form
        for form in fitting
        if form.table and _of_this_kind(form.table, _stated(folder, form.configuration))
    ]
    fitting = of_kind or fitting
    if not fitting:
        raise SpecError(
            f"{weights} cannot be read: onnx is write-only, and an index of TensorFlow needs its data"
        )
    tensors = fitting[0].container.read(weights)
    alike = [(_nearness(form.table, tensors), form) for form in fitting if form.table]
    share, best = max(alike, key=lambda pair: pair[0], default=(0.0, None))
    if best and share >= ALIKE:
        return best, f"{weights.name} has {share:.0%} of the names in the table of {best.source}"
    settings, has_config = _stated(folder), (folder / checkpoints.CONFIG).exists()
    few = (
        "" if settings else f", such as {', '.join(repr(name[:80]) for name in list(tensors)[:3]) or 'none'},"
    )
    lines = [f"{weights}: the names of its {counted(len(tensors), 'tensor')}{few} match no known format"]
    if kind := {key: settings[key] for key in (KIND, CLASSES) if key in settings}:
        lines.append(f"{folders.CONFIG} says {shown(json.dumps(kind), LONGEST)}")
    elif not has_config:
        lines.append(f"a backend's own weight file needs {checkpoints.CONFIG} beside it")
    raise SpecError("; ".join(lines))


def _stated(folder: Path, name: str = folders.CONFIG) -> dict[str, Any]:
    settings = read_json(folder / name) if (folder / name).exists() else {}
    return settings if isinstance(settings, dict) else {}


def _of_this_kind(table: Table, settings: Mapping[str, Any]) -> bool:
    kind = settings.get(KIND)
    return kind is None or any(
        kind in part.checkpoint.requires.get(KIND, (kind,)) for part in table.parts.values()
    )


def _nearness(table: Table, names: Collection[str]) -> float:
    # Heads do not count: a bare model has none, and an unknown head has different names.
    part = table.parts.get("encoder") or part_of(table)
    prefixes = part.checkpoint.prefixes or [""]
    own = (fill(native.name, {"i": 0, "h": 0, "n": 1}) for native in part.weights.values())
    expected = {renamed(name, prefixes, "") for name in own}
    return max(sum(prefix + name in names for name in expected) for prefix in prefixes) / max(
        len(expected), 1
    )
