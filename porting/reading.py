"""Reading a checkpoint in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.checkpoint import Checkpoint
from concord.porting.file_tensors import StoredTensor
from concord.porting.matching import match
from concord.porting.recognition import AUTO, recognise
from concord.porting.registry import OWN, PARTS, Format, find_format
from concord.porting.texts import padding_id
from concord.spec import checkpoints
from concord.spec.config import EncoderConfig, from_toml
from concord.spec.errors import SpecError, refuse
from concord.spec.files import LARGEST, read_bytes, read_text
from concord.spec.sources import source_tables as tables
from concord.spec.sources.schema import CheckpointTable, Table


def read(path: Path, format: str = AUTO, table: Path | None = None) -> Checkpoint:
    """Read a checkpoint, leaving its weights in the file.

    Args:
        path: a folder, or the weights in it.
        table: names, layouts and terms that replace the format's (:mod:`concord.spec.sources.schema`).

    Raises:
        SpecError: listing corrupt files, unsupported options, and missing, unexpected or misshapen tensors.
    """
    own = tables.read(table) if table else None
    recognition = recognise(path, table, format)
    form = find_format(recognition.format)
    form = replace(form, own=own, modules=False) if own else form
    if form.table is None:
        checkpoint = _native(recognition.folder, form, recognition.weights)
    else:
        outer, more = folders.folder_of(path), dict[str, Any]()
        if form.modules:
            more = sentences.words(outer, tables.part_of(form.table).options["pooling"].values)
        tensors = form.container.read(recognition.weights)
        checkpoint = _of_source(tensors, form, form.table, recognition.folder, more)
        if form.modules:
            checkpoint = replace(checkpoint, files={**folders.carried(outer), **checkpoint.files})
    return replace(checkpoint, format=recognition.format)


def _of_source(
    tensors: dict[str, StoredTensor], form: Format, table: Table, folder: Path, more: dict[str, Any]
) -> Checkpoint:
    path, settings = folders.stated(folder, table.source)
    configs: dict[str, EncoderConfig] = {}
    errors: list[SpecError] = []
    for part, entry in table.parts.items():
        try:
            configs[part] = tables.configure(
                table, {**_sized(settings, tensors, entry.checkpoint), **more}, part, str(path)
            )
        except SpecError as error:  # parts of a source may have their own configurations
            errors.append(error)
    if not configs:
        raise errors[0]
    checkpoint = match(tensors, configs, form)
    files = {**folders.carried(folder), folders.CONFIG: read_bytes(path, LARGEST)}
    return replace(
        checkpoint,
        config=_as_padded(checkpoint.config, files, path),
        files=files,
        labels=_labels(checkpoint, files, settings),
        source=table.source,
        words=tables.words(table),
    )


def _labels(
    checkpoint: Checkpoint, files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> tuple[str, ...] | None:
    names, classes = folders.labels(files, settings), checkpoint.config.num_classes
    count = len(names or settings.get("id2label") or ())
    if checkpoint.part == "model" and count not in (0, classes, max(classes, 2)):
        raise SpecError(
            f"'id2label' or {folders.LABELS} names {count} classes but the classifier has {classes}"
        )
    return names


def _as_padded(config: EncoderConfig, files: Mapping[str, bytes], path: Path) -> EncoderConfig:
    # Libraries mask what the tokenizer added as padding. Some checkpoints, such as BERTs with XLM-R's
    # vocabulary, give another id in their configuration, which is then a token of every text.
    pad_id = padding_id(files)
    if pad_id is None or pad_id == config.pad_id:
        return config
    if config.position_of_padding == "pad_row" or pad_id >= config.vocab_size:
        raise SpecError(
            f"{path}: the padding id is {config.pad_id} but must be {pad_id}, as in the tokenizer beside it"
        )
    return config.replace(pad_id=pad_id)


def _sized(
    settings: dict[str, Any], tensors: dict[str, StoredTensor], rules: CheckpointTable
) -> dict[str, Any]:
    # Google's BERT does not state its number of classes, so the classifier's shape determines it.
    places = {key: place.rpartition(":") for key, place in rules.sizes.items() if settings.get(key) is None}
    sizes = {
        key: tensors[name].shape[int(axis)]
        for key, (name, _, axis) in places.items()
        if name in tensors and len(tensors[name].shape) > int(axis)
    }
    return {**settings, **sizes}


def _native(folder: Path, form: Format, weights: Path) -> Checkpoint:
    path = folder / checkpoints.CONFIG
    if form.name == OWN:
        # Concord's own checkpoints list the SHA-256 of every file, which must match.
        contents = checkpoints.read_contents(folder)
        weights, part = folder / checkpoints.WEIGHTS, contents.part
        lacking = [file.name for file in (path, weights) if file.name not in contents.sha256]
        refuse([*checkpoints.corrupt(folder, contents), *(f"{folder} lacks {name}" for name in lacking)])
    elif not path.exists():
        raise SpecError(
            f"{path}: no such file: a {form.name} weight file needs the configuration of Concord's model "
            "family beside it"
        )
    else:
        part = checkpoints.part_of(folder) or ""
    config = from_toml(read_text(path), str(path))
    checkpoint = match(form.container.read(weights), dict.fromkeys((part,) if part else PARTS, config), form)
    files = folders.carried(folder)
    return replace(checkpoint, files=files, labels=_labels(checkpoint, files, {}))
