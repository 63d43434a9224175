"""The formats: a container, names, and how their folder is laid out; which of them a path holds, and reading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting.checkpoint import Checkpoint
from concord.porting.containers import safetensors
from concord.porting.matching import Names, match
from concord.porting.naming import canonical, of_table
from concord.porting.stored import Stored
from concord.spec import checkpoints
from concord.spec.config import EncoderConfig, from_toml
from concord.spec.errors import SpecError, unknown
from concord.spec.files import read_json, read_text
from concord.spec.sources import table as tables
from concord.spec.sources.schema import Table


@dataclass(frozen=True)
class Recognition:
    """What a path holds.

    Attributes:
        format: one of :func:`formats`.
        why: how that is known, in words.
    """

    format: str
    why: str


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint.

    Attributes:
        name: by which it is asked for.
        meaning: in words.
        recognise: says why a folder holds it; empty: it does not.
        read: the checkpoint in a folder.
    """

    name: str
    meaning: str
    recognise: Callable[[Path], str]
    read: Callable[[Path, Table | None], Checkpoint]


def of_source(found: dict[str, Stored], stated: dict[str, Any], table: Table, files: dict[str, bytes], where: str) -> Checkpoint:
    """Return what the tensors of a source are.

    Args:
        found: the tensors by the source's names.
        stated: the source's configuration.
        files: what is carried over.
        where: what to call the configuration in a message.

    Raises:
        SpecError: if the family has no such model.
        WeightsError: as :func:`concord.porting.matching.match`.
    """
    configs = {part: tables.configure(table, stated, part, where) for part in table.parts}
    matched = match(found, configs, of_table(table))
    return Checkpoint(configs[matched.part], matched.part, matched.tensors, matched.ledger, files, folders.labels(files, stated), table.source)


def weights_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of some files that a folder has."""
    return next((folder / name for name in names if (folder / name).exists()), None)


# Hugging Face

HUGGING_FACE = "bert-hugging-face"
SAFETENSORS = ("model.safetensors", safetensors.INDEX)


def _hugging_face_is_there(folder: Path) -> str:
    weights = weights_file(folder, SAFETENSORS)
    if weights is None or not (folder / folders.CONFIG).exists() or (folder / "modules.json").exists():
        return ""
    said = read_json(folder / folders.CONFIG)
    kind = said.get("model_type") if isinstance(said, dict) else None
    return f"{folders.CONFIG} says model_type {kind!r}, and {weights.name} lies beside it" if kind else ""


def _read_hugging_face(folder: Path, table: Table | None, more: tuple[str, ...] = ()) -> Checkpoint:
    weights = weights_file(folder, SAFETENSORS)
    if weights is None:
        raise SpecError(f"{folder}: has no {' or '.join(SAFETENSORS)}")
    stated = folders.stated(folder, weights.name)
    files = folders.carried(folder, (folders.CONFIG, *more))
    return of_source(safetensors.read(weights), stated, table or tables.load(HUGGING_FACE), files, str(folder / folders.CONFIG))


# sentence-transformers

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Normalize")
"""The modules that are read; what the last two say is carried over."""


def _sentence_transformers_is_there(folder: Path) -> str:
    return f"{MODULES} lists modules of sentence-transformers" if (folder / MODULES).exists() else ""


def _read_sentence_transformers(folder: Path, table: Table | None) -> Checkpoint:
    where = folder / MODULES
    modules = read_json(where)
    said = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in said]
    if not kinds or kinds[0] != "Transformer":
        raise SpecError(f"{where}: lists {', '.join(kinds) or 'no modules'} but must list a Transformer first")
    others = [kind for kind in kinds[1:] if kind not in KINDS[1:]]
    if others:
        raise SpecError(f"{where}: lists {', '.join(others)} but the family has {' and '.join(KINDS[1:])} alone behind a Transformer")
    places = [str(module.get("path", "")) for module in said]
    inner = folders.inside(folder, places[0], str(where))
    configs = tuple(f"{place}/{folders.CONFIG}" for place in places[1:] if folders.inside(folder, f"{place}/{folders.CONFIG}", str(where)).exists())
    read = _read_hugging_face(inner, table)
    return Checkpoint(**{**vars(read), "files": {**read.files, **folders.carried(folder, configs)}})


# This project's own


def _own_is_there(folder: Path) -> str:
    there = (folder / checkpoints.CONTENTS).exists() and (folder / checkpoints.CONFIG).exists()
    return f"{checkpoints.CONTENTS} and {checkpoints.CONFIG} are those of this project's own checkpoints" if there else ""


def _read_own(folder: Path, table: Table | None) -> Checkpoint:
    contents = checkpoints.read_contents(folder)
    problems = checkpoints.corrupt(folder, contents)
    problems += [f"{folder}: lacks {name}" for name in (checkpoints.CONFIG, checkpoints.WEIGHTS) if name not in contents.sha256]
    if problems:
        raise SpecError(problems)
    config = from_toml(read_text(folder / checkpoints.CONFIG), str(folder / checkpoints.CONFIG))
    names: Names = of_table(table) if table else canonical()
    configs: dict[str, EncoderConfig] = {contents.part: config}
    matched = match(safetensors.read(folder / checkpoints.WEIGHTS), configs, names)
    files = folders.carried(folder, tuple(name for name in ("recipe.toml", "progress.json", "state.safetensors") if name in contents.sha256))
    return Checkpoint(config, matched.part, matched.tensors, matched.ledger, files, folders.labels(files, {}))


FORMATS = {
    form.name: form
    for form in (
        Format("concord", "this project's own checkpoint, as 'concord train' writes it", _own_is_there, _read_own),
        Format("sentence-transformers", "a folder of sentence-transformers with a BERT in it", _sentence_transformers_is_there, _read_sentence_transformers),
        Format("hugging-face", "Hugging Face BERT: config.json and model.safetensors, in one file or several", _hugging_face_is_there, partial(_read_hugging_face)),
    )
}
"""Every format by name; what is recognised first stands first."""


def formats() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(FORMATS)


def recognise(path: Path) -> Recognition:
    """Say which format a path holds, and how that is known; no weights are read.

    Args:
        path: a folder, or the file of weights in it.

    Raises:
        SpecError: if there is nothing, or nothing that is known.
    """
    folder = folders.folder_of(path)
    for form in FORMATS.values():
        why = form.recognise(folder)
        if why:
            return Recognition(form.name, why)
    raise SpecError(f"{path}: is of no format that is known: {', '.join(FORMATS)}")


def read(path: Path, format: str = "auto", table: Path | None = None) -> Checkpoint:
    """Read a checkpoint; of its weights only where they lie.

    Args:
        path: a folder, or the file of weights in it.
        format: one of :func:`formats`, or ``"auto"``.
        table: names and layouts in place of those of the format (:mod:`concord.spec.sources.schema`).

    Raises:
        UnknownNameError: for an unknown format.
        SpecError: listing what is wrong: an unknown format, a file that is not what it should be, a model that the family does not have,
            tensors that are missing, unexpected or misshapen.
    """
    if format != "auto" and format not in FORMATS:
        raise unknown("format", format, ["auto", *FORMATS])
    form = FORMATS[recognise(path).format if format == "auto" else format]
    return form.read(folders.folder_of(path), tables.read(table) if table else None)
