"""Reading a checkpoint: which format it is, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting import sentences
from concord.porting.checkpoint import Checkpoint
from concord.porting.matching import match
from concord.porting.naming import PARTS, likeness, of_table
from concord.porting.registry import FORMATS, OWN, Format, known
from concord.porting.stored import StoredTensor
from concord.porting.strangers import KIND, described, named
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


@dataclass(frozen=True)
class Recognition:
    """What a path holds.

    Attributes:
        format: one of :func:`concord.porting.formats`.
        why: how that is known, in words.
    """

    format: str
    why: str


def recognise(path: Path, table: Path | None = None) -> Recognition:
    """Say which format a path holds, and how that is known; no weights are read.

    Args:
        path: a folder, or the file of weights in it.
        table: somebody's own, that says names and layouts: only the kind of file is looked for.

    Raises:
        SpecError: if there is nothing, or nothing that is known.
    """
    folder = folders.folder_of(path)
    if table is not None:
        form = _by_container(path, folder)
        return Recognition(form.name, f"it is such a file; {table.name} says names and layouts")
    if (folder / checkpoints.CONTENTS).exists() and (folder / checkpoints.CONFIG).exists():
        return Recognition(
            OWN,
            f"{checkpoints.CONTENTS} and {checkpoints.CONFIG} are those of this project's own checkpoints",
        )
    if (folder / sentences.MODULES).exists():
        inner = sentences.inner(folder)
        form = _of_sentences(path, inner)
        return Recognition(
            form.name,
            (
                f"{sentences.MODULES} lists modules of "
                f"sentence-transformers{_unread(path, inner / form.weights[0])}"
            ),
        )
    candidates = [form for form in FORMATS.values() if form.name != OWN and not form.modules]
    weights = _weights(candidates, path, folder)
    fitting = [form for form in candidates if form.container.is_one(weights)]
    if (folder / checkpoints.CONFIG).exists():
        native = next((form for form in fitting if form.backend), None)
        if native:
            return Recognition(
                native.name,
                (
                    f"{checkpoints.CONFIG} states a configuration of the family, and {weights.name} holds "
                    f"{native.meaning}"
                ),
            )
    known_by_names = [form for form in fitting if form.source]
    found = _by_names(
        weights, [form for form in known_by_names if _may_be(form, folder)] or known_by_names, folder
    )
    return Recognition(found.format, found.why + _unread(path, weights))


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


def _by_names(weights: Path, fitting: list[Format], folder: Path) -> Recognition:
    """Say whose names the tensors of a file bear."""
    found = fitting[0].container.read(weights) if fitting else {}
    alike = {form.name: likeness(form.table, found) for form in fitting if form.table}
    best = max(alike, key=lambda name: alike[name], default="")
    if not best or alike[best] < ALIKE:
        stated = _beside_weights(folder)
        some = (
            "" if stated else f", such as {', '.join(repr(name[:80]) for name in list(found)[:3]) or 'none'},"
        )
        own = f"; one of a backend's own needs {checkpoints.CONFIG} beside it"
        beside = (
            f"; {folders.CONFIG} names {said}"
            if (said := named(stated))
            else ""
            if (folder / checkpoints.CONFIG).exists()
            else own
        )
        near = described(found, stated, _tables(stated)) if found else ""
        raise SpecError(
            f"{weights}: its {len(found)} tensors{some} have names of no format that is "
            f"known{beside}{'; ' if near else ''}{near}"
        )
    return Recognition(
        best, f"{weights.name} has {alike[best]:.0%} of the names in the table of {FORMATS[best].source}"
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
    folder = folders.folder_of(path)
    form = known(recognise(path, table).format if format == AUTO else format)
    if form.modules and own is None:
        return _of_modules(form, path, folder)
    weights = path if folders.is_weights(path) else _weights([form], path, folder)
    if form.name == OWN:
        return _own(folder, form)
    found, rules = form.container.read(weights), own or form.table
    return _of_source(found, rules, folder, {}) if rules else _native(found, form, folder)


def _by_container(path: Path, folder: Path) -> Format:
    """Return a format whose container a file has, where somebody's own table says the rest."""
    candidates = [form for form in FORMATS.values() if form.source and not form.modules]
    weights = _weights(candidates, path, folder)
    return next(form for form in candidates if form.container.is_one(weights))


def _of_modules(form: Format, path: Path, folder: Path) -> Checkpoint:
    """Return a folder of sentence-transformers: the model in it, with what the modules behind it say."""
    assert form.table is not None
    inner = sentences.inner(folder)
    said = sentences.words(folder, tables.part_of(form.table).options["pooling"].values)
    weights = path if folders.is_weights(path) else _weights([form], path, inner)
    read_in = _of_source(form.container.read(weights), form.table, inner, said)
    return replace(read_in, files={**folders.carried(folder), **read_in.files})


def _of_source(
    found: dict[str, StoredTensor], table: Table, folder: Path, more: dict[str, Any]
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
        matched = match(found, configs, of_table(table))
    except SpecError as error:
        near = "" if configs and _is_kind(table, stated) else described(found, stated, _tables(stated))
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
    return _beside(match(found, dict.fromkeys((stated,) if stated else PARTS, config), form.names), folder)


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
    matched = match(form.container.read(folder / checkpoints.WEIGHTS), {contents.part: config}, form.names)
    training = folders.lying(folder, (name for name in folders.TRAINING if name in contents.sha256))
    return replace(_beside(matched, folder), training=training)


def _beside(matched: Checkpoint, folder: Path) -> Checkpoint:
    """Return a checkpoint with what lies beside its weights."""
    files = folders.carried(folder)
    return replace(matched, files=files, labels=folders.labels(files, {}))
