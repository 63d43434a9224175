"""Reading a checkpoint of any format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.checkpoint import Checkpoint
from concord.porting.file_tensors import StoredTensor
from concord.porting.matching import match
from concord.porting.recognition import AUTO, recognise
from concord.porting.registry import OWN, PARTS, Format, known
from concord.spec import checkpoints
from concord.spec.config import EncoderConfig, from_toml
from concord.spec.errors import SpecError, refuse
from concord.spec.files import LARGEST, read_bytes, read_text
from concord.spec.sources import source_tables as tables
from concord.spec.sources.schema import CheckpointTable, Table


def read(path: Path, format: str = AUTO, table: Path | None = None) -> Checkpoint:
    """Read a checkpoint; of its weights only where they lie.

    Args:
        path: a folder, or the file of weights in it.
        format: one of :func:`concord.porting.formats`, or ``"auto"``.
        table: names, layouts and words of the configuration in place of the format's
            (:mod:`concord.spec.sources.schema`).

    Raises:
        UnknownNameError: for an unknown format.
        SpecError: listing what is wrong: a file that is not what it should be, a model that the family does
            not have,
            tensors that are missing, unexpected or misshapen.
    """
    own = tables.read(table) if table else None
    seen = recognise(path, table, format)
    form = known(seen.format)
    form = replace(form, own=own, modules=False) if own else form
    if form.table is None:
        found = _native(seen.folder, form, seen.weights)
    else:
        outer, said = folders.folder_of(path), dict[str, Any]()
        if form.modules:
            said = sentences.words(outer, tables.part_of(form.table).options["pooling"].values)
        found = _of_source(form.container.read(seen.weights), form, form.table, seen.folder, said)
        if form.modules:
            found = replace(found, files={**folders.carried(outer), **found.files})
    return replace(found, format=seen.format)


def _of_source(
    found: dict[str, StoredTensor], form: Format, table: Table, folder: Path, more: dict[str, Any]
) -> Checkpoint:
    """Return what the tensors of a source are, by its table and its own configuration.

    Args:
        more: what other files than that of the configuration say.
    """
    path, stated = folders.stated(folder, table.source)
    configs: dict[str, EncoderConfig] = {}
    refused: list[SpecError] = []
    for part, entry in table.parts.items():
        try:
            configs[part] = tables.configure(
                table, {**_sized(stated, found, entry.checkpoint), **more}, part, str(path)
            )
        except SpecError as error:  # parts of a source may have configurations of their own
            refused.append(error)
    if not configs:
        raise refused[0]
    matched = match(found, configs, form)
    files = {**folders.carried(folder), folders.CONFIG: read_bytes(path, LARGEST)}
    labels, words = folders.labels(files, stated), tables.words(table)
    return replace(matched, files=files, labels=labels, source=table.source, words=words)


def _sized(stated: dict[str, Any], found: dict[str, StoredTensor], rules: CheckpointTable) -> dict[str, Any]:
    """Return a configuration with the sizes that it leaves to the tensors."""
    places = {key: place.rpartition(":") for key, place in rules.sizes.items() if stated.get(key) is None}
    sizes = {
        key: found[name].shape[int(axis)]
        for key, (name, _, axis) in places.items()
        if name in found and len(found[name].shape) > int(axis)
    }
    return {**stated, **sizes}


def _native(folder: Path, form: Format, weights: Path) -> Checkpoint:
    """Return what the tensors of a backend's model are; the configuration is in the family's words.

    Of this project's own checkpoints each file is what was written.
    """
    path = folder / checkpoints.CONFIG
    if form.name == OWN:
        contents = checkpoints.read_contents(folder)
        weights, part = folder / checkpoints.WEIGHTS, contents.part
        lacking = [one.name for one in (path, weights) if one.name not in contents.sha256]
        refuse([*checkpoints.corrupt(folder, contents), *(f"{folder}: lacks {name}" for name in lacking)])
    elif not path.exists():
        raise SpecError(
            f"{path}: no such file: a file of weights of {form.name} needs the configuration of the "
            "family beside it"
        )
    else:
        part = checkpoints.part_of(folder) or ""
    config = from_toml(read_text(path), str(path))
    found = match(form.container.read(weights), dict.fromkeys((part,) if part else PARTS, config), form)
    files = folders.carried(folder)
    return replace(found, files=files, labels=folders.labels(files, {}))
