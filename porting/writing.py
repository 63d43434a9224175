"""Writing a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.checkpoint import Checkpoint
from concord.porting.containers import onnx
from concord.porting.file_tensors import StoredTensor
from concord.porting.matching import piece
from concord.porting.registry import FORMATS, KERAS, ONNX, OWN, Format, find_format
from concord.porting.texts import padding_id
from concord.spec import checkpoints
from concord.spec.errors import SpecError, located, refuse
from concord.spec.files import parse_json, refusing, sha256_of, write_bytes
from concord.spec.folders import new_folder
from concord.spec.positions import sinusoid
from concord.spec.sources import source_tables as tables
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.schema import Native, Table
from concord.spec.sources.source_tables import POSITIONS, Binding


def write(checkpoint: Checkpoint, path: Path, format: str, force: bool = False, taps: bool = False) -> None:
    """Write a checkpoint's folder completely or not at all, even if killed.

    Args:
        force: whether to replace an existing checkpoint.
        taps: whether to make every tap of an ONNX graph an output.

    Raises:
        SpecError: if the path is taken, the format cannot express the checkpoint, or writing fails.
    """
    form = writable(path, format, force, taps)
    _check_part(checkpoint, form)
    files, tensors = _files(checkpoint, form), prepared(checkpoint, form)
    extra = _graph(checkpoint, taps) if form.name == ONNX else {}
    extra |= {"members": _keras_members(checkpoint)} if form.name == KERAS else {}
    with new_folder(path, replace=force) as folder:
        form.container.write(folder / form.weights[0], tensors, **extra)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, content)
        if form.name == OWN:
            digests = {name: sha256_of(folder / name) for name in sorted((*files, form.weights[0]))}
            contents = checkpoints.Contents(checkpoints.FORMAT, digests, checkpoint.part)
            write_bytes(folder / checkpoints.CONTENTS, folders.json_file(asdict(contents)))
        if not force and path.is_dir():
            with refusing(path):
                path.rmdir()  # fails if it is no longer empty, so that nothing is lost


def writable(path: Path, format: str, force: bool = False, taps: bool = False) -> Format:
    """The format, if :func:`write` may write it to the path."""
    form = find_format(format)
    if taps and form.name != ONNX:
        raise SpecError(f"only {ONNX} has taps as outputs; {form.name} holds only weights")
    _check_place(path, force)
    return form


def _graph(checkpoint: Checkpoint, every_tap: bool) -> dict[str, Any]:
    dtypes = {
        tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if tensor.foreign or name != POSITIONS  # computed positions may have any dtype
    }
    if len(dtypes) != 1 or dtypes - {*onnx.DTYPES}:
        raise SpecError(
            f"the parameters are {' and '.join(sorted(dtypes))} but an ONNX graph must have one dtype: "
            f"{' or '.join(onnx.DTYPES)}"
        )
    return {
        "config": checkpoint.config.as_dict(),
        "part": checkpoint.part,
        "dtype": dtypes.pop(),
        "every_tap": every_tap,
    }


def _check_place(path: Path, force: bool) -> None:
    # --force must never delete any folder but a checkpoint.
    marks, problem = (checkpoints.CONFIG, *folders.CONFIGS), ""
    with refusing(path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            problem = "is not a folder; --force replaces only folders"
        elif path == Path():  # a temporary folder beside it needs its name
            problem = "is the current folder, which cannot be replaced; name another folder"
        elif not path.exists() or not any(path.iterdir()):
            return
        elif not any((path / mark).is_file() for mark in marks):
            problem = f"has neither {' nor '.join(marks)}; --force replaces only a checkpoint"
        elif not force:
            problem = "already exists; --force replaces it"
    if problem:
        with located(str(path)):
            raise SpecError(problem)


def prepared(checkpoint: Checkpoint, form: Format) -> dict[str, StoredTensor]:
    """Tensors in a format's names and layouts, read when written.

    Raises:
        SpecError: listing parameters without a place in the format.
    """
    if form.table is not None and checkpoint.source == form.table.source:
        return dict(checkpoint.found)  # unchanged, including heads that no table lists
    places = dict(form.places(checkpoint.config, checkpoint.part))
    rules, heads = form.rules(checkpoint.part), checkpoint.config.num_heads
    if rules.positions and POSITIONS in checkpoint.tensors and POSITIONS not in places:
        places[POSITIONS] = _placed(rules.positions, checkpoint.tensors[POSITIONS].shape, heads)
    # No parameter may be lost silently, unless the configuration determines it bit for bit.
    homeless = [name for name in checkpoint.tensors if name not in places and not _follows(checkpoint, name)]
    if homeless:
        raise SpecError([f"{name!r} has no place in {form.name}: it would be lost" for name in homeless])
    others = {name: tensor for name, tensor in checkpoint.others.items() if not tensor.redundant}
    every = {**others, **checkpoint.tensors}
    for name, entry in rules.carried.items():
        if name in others:
            places[name] = _placed(entry, others[name].shape, heads)
    return {
        native: piece(every[name], place, number, heads)
        for name, place in places.items()
        for number, native in enumerate(place.names)
    }


def _check_part(checkpoint: Checkpoint, form: Format) -> None:
    if checkpoint.part in form.parts:
        return
    hint = ""
    if checkpoint.format and find_format(checkpoint.format).modules:
        bare = next(other.name for other in FORMATS.values() if other.source == checkpoint.words)
        hint = f"; with --from {bare}, it is read as an encoder without pooling"
    raise SpecError(
        f"the part {checkpoint.part!r} cannot be written as {form.name}, which has "
        f"{' or '.join(form.parts)}{hint}"
    )


def _placed(native: Native, shape: tuple[int, ...], heads: int) -> Binding:
    return Binding((native.name,), native.layout, WEIGHT_LAYOUTS[native.layout].shape(shape, heads))


def _follows(checkpoint: Checkpoint, name: str) -> bool:
    if name != POSITIONS or checkpoint.config.positions != "sinusoidal":
        return False
    stored = checkpoint.tensors[name].read()
    return np.array_equal(stored, sinusoid(checkpoint.config).astype(stored.dtype))


def _files(checkpoint: Checkpoint, form: Format) -> dict[str, bytes]:
    if form.table is not None:
        settings = configuration(checkpoint, form.table)
        return {
            **_carried(checkpoint, form),
            **(_modules(checkpoint, form.table, settings) if form.modules else {}),
            form.configuration: folders.json_file(settings),
        }
    files = {checkpoints.CONFIG: checkpoint.config.to_toml().encode(), **_carried(checkpoint, form)}
    if form.backend:
        files[checkpoints.PART] = folders.json_file(
            asdict(checkpoints.Part(checkpoints.PART_FORMAT, checkpoint.part))
        )
    if folders.CONFIG in checkpoint.files:
        # Keep it for conversion back: it may contain settings that the family lacks.
        files[f"{checkpoint.words}{folders.FOREIGN}"] = checkpoint.files[folders.CONFIG]
    if checkpoint.labels and folders.LABELS not in files:
        files[folders.LABELS] = folders.json_file({"format": "concord.labels/1", "names": checkpoint.labels})
    return files


def _modules(checkpoint: Checkpoint, table: Table, settings: dict[str, Any]) -> dict[str, bytes]:
    # Pooling and normalisation have their own modules; transformers does not support these keys.
    behind = {key: settings.pop(key) for key in (sentences.POOLING, sentences.NORMALIZE)}
    bare = (
        checkpoint.source != table.source
        and sentences.POOLER in tables.part_of(table, checkpoint.part).checkpoint.ignored
    )
    return sentences.files(behind, checkpoint.config, checkpoint.files.get(folders.LENGTHS), bare)


# Classes of ``concord.backends.NAME.model``, by part.
CLASSES = {
    "model": "TextClassifier",
    "pooled": "PooledEncoder",
    "encoder": "Encoder",
    "stack": "EncoderStack",
    "attention": "AttentionAlone",
}


def loading(checkpoint: Checkpoint, folder: Path, format: str) -> list[str]:
    """Python lines that load the folder in its framework, if possible."""
    head = "ForSequenceClassification" if checkpoint.part == "model" else ""
    form, config = find_format(format), checkpoint.config
    code = FORMATS[form.loading].loading if form.loading in FORMATS else form.loading
    lines = code.format(folder=folder, name=CLASSES[checkpoint.part], head=head).splitlines()
    if lines and form.backend and checkpoint.part not in ("stack", "attention"):
        names = ["input_ids", *(["segment_ids"] if config.num_segments else [])]
        inputs = ", ".join(names)
        if form.backend == "tf":  # Keras models take a single argument
            inputs = f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"
        kind = {"torch": "tensors", "paddle": "tensors"}.get(form.backend, "arrays")
        lines.append(f"# model({inputs}): integer {kind} (B, T), where padding is {config.pad_id}")
    return lines


def _keras_members(checkpoint: Checkpoint) -> dict[str, str]:
    module, name = "concord.backends.tf.model", CLASSES[checkpoint.part]
    dtype = {
        "module": "keras",
        "class_name": "DTypePolicy",
        "config": {"name": next(iter(checkpoint.tensors.values())).dtype},
        "registered_name": None,
    }
    inner = {"name": checkpoint.part, "trainable": True, "dtype": dtype, "config": asdict(checkpoint.config)}
    model = {
        "module": module,
        "class_name": name,
        "config": inner,
        "registered_name": f"{module}>{name}",
        "build_config": {"shapes_dict": {}},
    }
    return {
        "metadata.json": json.dumps({"keras_version": "3.15.1", "date_saved": ""}),
        "config.json": json.dumps(model),
    }


def _carried(checkpoint: Checkpoint, form: Format) -> dict[str, bytes]:
    own = tuple(name for name in checkpoint.files if name.endswith(folders.FOREIGN) and not form.source)
    return {name: checkpoint.files[name] for name in (*form.carried, *own) if name in checkpoint.files}


def configuration(checkpoint: Checkpoint, table: Table) -> dict[str, Any]:
    """Return a configuration in a source's terms, with the checkpoint's valid keys."""
    entry = tables.part_of(table, checkpoint.part)
    settings = tables.stated(table, checkpoint.config, checkpoint.part)
    original = _before(checkpoint, tables.words(table))
    if padding_id(checkpoint.files) == checkpoint.config.pad_id:
        # The tokenizer decides; the source's own entry determines which row its training leaves alone.
        settings |= {key: original[key] for key in [entry.fields.get("pad_id")] if key in original}
    else:
        refuse(
            [
                f"{field} is {getattr(checkpoint.config, field)!r} but must be {settings[key]!r}: in "
                f"{table.source}, {key!r} gives several options"
                for field, key in entry.fields.items()
                if getattr(checkpoint.config, field) != settings[key]
            ]
        )
    keys = {**original, **{key: value for key, value in settings.items() if original.get(key) != value}}
    keys |= entry.checkpoint.writes if not original else {}
    for key, other in entry.checkpoint.counts.items():
        names = checkpoint.labels or folders.unnamed(int(settings[key]))
        keys.pop(key, None)  # the names determine the number of classes
        if other not in original:
            keys |= {
                other: {str(number): name for number, name in enumerate(names)},
                "label2id": {name: number for number, name in enumerate(names)},
            }
    return keys


def _before(checkpoint: Checkpoint, words: str) -> dict[str, Any]:
    name = folders.CONFIG if checkpoint.words == words else f"{words}{folders.FOREIGN}"
    content = parse_json(checkpoint.files.get(name, b"{}"), name)
    return content if isinstance(content, dict) else {}
