"""Reading a checkpoint: which format it is, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.checkpoint import Checkpoint
from concord.porting.matching import match
from concord.porting.registry import FORMATS, OWN, PARTS, Format, known
from concord.porting.stored import StoredTensor
from concord.porting.strangers import KIND, described, named, nearness
from concord.spec import checkpoints
from concord.spec.config import EncoderConfig, from_toml
from concord.spec.errors import SpecError
from concord.spec.files import LARGEST, read_bytes, read_json, read_text
from concord.spec.sources import table as tables
from concord.spec.sources.schema import CheckpointTable, Table

ALIKE = 0.5
"""Share of a table's names that a file must have to be taken for one of that source."""

AUTO = "auto"

HUB = tuple(dict.fromkeys(form.weights for form in FORMATS.values() if form.name.startswith("hugging-face")))
"""What Hugging Face's files of weights are called, one file or the index of several: folders of its hub have
them side by side. The first that is there is read, as by transformers."""


SAID = "it was said with --from"


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
    folder = folders.folder_of(path)
    plain = [form for form in FORMATS.values() if form.name != OWN and not form.modules]
    marks = (checkpoints.CONTENTS, checkpoints.CONFIG)
    if format != AUTO:
        form = known(format)
        inner = sentences.inner(folder) if form.modules and table is None else folder
        named = path if folders.is_weights(path) or form.name == OWN else _weights([form], path, inner)
        return Recognition(format, SAID, inner, named)
    if table is not None:
        plain = [form for form in plain if form.source]
        weights = _weights(plain, path, folder)
        form = next(form for form in plain if form.container.is_one(weights))
        why = f"it is such a file; {table.name} says names and layouts"
        return Recognition(form.name, why, folder, weights)
    if all((folder / mark).exists() for mark in marks):
        return Recognition(
            OWN, f"{' and '.join(marks)} are those of this project's own checkpoints", folder, path
        )
    if (folder / sentences.MODULES).exists():
        inner = sentences.inner(folder)
        form = _of_sentences(path, inner)
        weights = path if folders.is_weights(path) else _weights([form], path, inner)
        why = f"{sentences.MODULES} lists modules of sentence-transformers"
        return Recognition(form.name, why + _unread(path, inner / form.weights[0]), inner, weights)
    weights = _weights(plain, path, folder)
    fitting = [form for form in plain if form.container.is_one(weights)]
    native = next((form for form in fitting if form.backend), None)
    if native and (folder / checkpoints.CONFIG).exists():
        why = (
            f"{checkpoints.CONFIG} states a configuration of the family, and {weights.name} holds "
            f"{native.meaning}"
        )
        return Recognition(native.name, why, folder, weights)
    sources = [form for form in fitting if form.source]
    of_kind = [form for form in sources if _may_be(form, folder)] or sources
    form, why = _by_names(weights, of_kind, folder)
    return Recognition(form.name, why + _unread(path, weights), folder, weights)


def _of_sentences(path: Path, inner: Path) -> Format:
    """Return the format of a folder of sentence-transformers with its model in ``inner``.

    By the file that is named, else as that library chooses, safetensors first.
    """
    candidates = [form for form in FORMATS.values() if form.modules]
    named = [path] if folders.is_weights(path) else []
    there = [
        form
        for form in candidates
        if any(
            place.exists() and form.container.is_one(place)
            for place in named or [inner / name for name in form.weights]
        )
    ]
    return next((form for form in there if _may_be(form, inner)), (there or candidates)[0])


def _may_be(form: Format, folder: Path) -> bool:
    """Say whether the configuration beside the weights is one of a format's.

    Bare models of several kinds have the same names.
    """
    return form.table is None or _is_kind(form.table, _beside_weights(folder, form.configuration))


def _is_kind(table: Table, stated: dict[str, Any]) -> bool:
    """Say whether a configuration is one of a table's, by the kind that it names."""
    said = stated.get(KIND)
    return said is None or any(
        said in part.checkpoint.requires.get(KIND, (said,)) for part in table.parts.values()
    )


def _beside_weights(folder: Path, name: str = folders.CONFIG) -> dict[str, Any]:
    """Return what a configuration says; nothing: there is none."""
    stated = read_json(folder / name) if (folder / name).exists() else {}
    return stated if isinstance(stated, dict) else {}


def _by_names(weights: Path, fitting: list[Format], folder: Path) -> tuple[Format, str]:
    """Return whose names the tensors of a file bear, and how that is known."""
    found = fitting[0].container.read(weights) if fitting else {}
    alike = [(nearness(form.table, found)[0], form) for form in fitting if form.table]
    share, best = max(alike, key=lambda pair: pair[0], default=(0.0, None))
    if best and share >= ALIKE:
        return best, f"{weights.name} has {share:.0%} of the names in the table of {best.source}"
    stated = _beside_weights(folder)
    few = "" if stated else f", such as {', '.join(repr(name[:80]) for name in list(found)[:3]) or 'none'},"
    if said := named(stated):
        beside = f"; {folders.CONFIG} names {said}"
    elif (folder / checkpoints.CONFIG).exists():
        beside = ""
    else:
        beside = f"; one of a backend's own needs {checkpoints.CONFIG} beside it"
    near = described(found, _tables(stated))
    raise SpecError(
        f"{weights}: its {len(found)} tensors{few} have names of no format that is "
        f"known{beside}{'; ' if near else ''}{near}"
    )


def _tables(stated: dict[str, Any]) -> list[Table]:
    """Return the tables that a model may be near to.

    Of the kind that its configuration names, else of those that name any, else all.
    """
    every = list(
        {
            form.source: form.table
            for form in FORMATS.values()
            if form.table is not None and not form.modules
        }.values()
    )
    kinds = [
        table for table in every if any(KIND in part.checkpoint.requires for part in table.parts.values())
    ]
    return [table for table in kinds if KIND in stated and _is_kind(table, stated)] or (
        kinds if stated else every
    )


def _weights(candidates: list[Format], path: Path, folder: Path) -> Path:
    """Return the file of weights that a path is, or that its folder has.

    Raises:
        SpecError: if it has none, or several of which nobody said which.
    """
    if folders.is_weights(path):
        if any(form.container.is_one(path) for form in candidates):
            return path
        raise SpecError(f"{path}: is no file of weights that is known")
    named = dict.fromkeys(
        folder / name for form in candidates for name in form.weights if (folder / name).exists()
    )
    others = sorted(
        entry
        for entry in folder.iterdir()
        if not named and any(form.container.is_one(entry) for form in candidates)
    )
    there = _of_hub([*named]) or others
    if not there:
        raise SpecError(f"{folder}: has no file of weights that is known")
    if len(there) > 1:
        raise SpecError(
            f"{folder}: has {', '.join(entry.name for entry in there[:5])}; name the one to read, or its "
            "format with --from"
        )
    return there[0]


def _of_hub(there: list[Path]) -> list[Path]:
    """Return what is to be read of the files that a folder has: of Hugging Face's own.

    Which hold the same, the first; of others, all.
    """
    kinds = [[path for path in there if path.name in kind] for kind in HUB]
    return next(filter(None, kinds), there) if sum(map(len, kinds)) == len(there) else there


def _unread(path: Path, weights: Path) -> str:
    """Say which of Hugging Face's files lie beside the one that is read, if nobody named it."""
    if folders.is_weights(path):
        return ""
    others = [
        name for kind in HUB for name in kind if weights.name not in kind and weights.with_name(name).exists()
    ]
    return f"; {', '.join(others)} beside it {'is' if len(others) == 1 else 'are'} not read" if others else ""


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
    if form.name == OWN:
        found = _own(seen.folder, form)
    elif form.table is None:
        found = _native(form.container.read(seen.weights), form, seen.folder)
    else:
        outer, said = folders.folder_of(path), dict[str, Any]()
        if form.modules:
            said = sentences.words(outer, tables.part_of(form.table).options["pooling"].values)
        found = _of_source(form.container.read(seen.weights), form, form.table, seen.folder, said)
        if form.modules:
            found = replace(found, files={**folders.carried(outer), **found.files})
    return replace(found, format=seen.format, recognised=seen.why)


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
    try:
        if not configs:
            raise refused[0]
        matched = match(found, configs, form)
    except SpecError as error:
        near = "" if configs and _is_kind(table, stated) else described(found, _tables(stated))
        said = "; ".join(filter(None, (f"{path.name} names {named(stated)}" if named(stated) else "", near)))
        first, *rest = error.problems
        raise type(error)([f"{first}{f'; {said}' if said else ''}", *rest]) from None
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


def _native(found: dict[str, StoredTensor], form: Format, folder: Path) -> Checkpoint:
    """Return what the tensors of a backend's model are; the configuration is in the family's words."""
    path = folder / checkpoints.CONFIG
    if not path.exists():
        raise SpecError(
            f"{path}: no such file: a file of weights of {form.name} needs the configuration of the "
            "family beside it"
        )
    config = from_toml(read_text(path), str(path))
    stated = checkpoints.part_of(folder)
    return _beside(match(found, dict.fromkeys((stated,) if stated else PARTS, config), form), folder)


def _own(folder: Path, form: Format) -> Checkpoint:
    """Return one of this project's own checkpoints, each file of which is what was written."""
    contents = checkpoints.read_contents(folder)
    problems = checkpoints.corrupt(folder, contents)
    problems += [
        f"{folder}: lacks {name}"
        for name in (checkpoints.CONFIG, checkpoints.WEIGHTS)
        if name not in contents.sha256
    ]
    if problems:
        raise SpecError(problems)
    config = from_toml(read_text(folder / checkpoints.CONFIG), str(folder / checkpoints.CONFIG))
    matched = match(form.container.read(folder / checkpoints.WEIGHTS), {contents.part: config}, form)
    training = folders.lying(folder, (name for name in folders.TRAINING if name in contents.sha256))
    return replace(_beside(matched, folder), training=training)


def _beside(matched: Checkpoint, folder: Path) -> Checkpoint:
    """Return a checkpoint with what lies beside its weights."""
    files = folders.carried(folder)
    return replace(matched, files=files, labels=folders.labels(files, {}))
