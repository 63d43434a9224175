"""Labelled texts and pairs of texts, as files and folders of the published layouts hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concord.spec.errors import SpecError, optional
from concord.spec.files import opened, parse_json
from concord.spec.text import first_line
from concord.training.data.lines import Bad, Complaints, numbered

SPLITS = ("train", "dev", "test")

FIELDS = ("text_a", "text_b", "label")

USUAL = {
    "text": "text_a",
    "sentence": "text_a",
    "sentence1": "text_a",
    "sentence2": "text_b",
    "validation": "dev",
}
"""What fields and splits are called elsewhere, to what they are called here."""

SEPARATOR = "<SEP>"
"""Divides words from label in the files of the TF1 source."""

LINE_BITS = 32
"""Bits of a sample's number that hold its line; those above hold the number of its file."""


@dataclass(frozen=True)
class Sample:
    """A text, or a pair of texts, and its label.

    Attributes:
        number: of its file, from 0, times 2^32, plus that of its line or row, from 1. It says nothing of the
            content, and what is left out changes no other.
        text_b: the second text, if there is one.
        label: its name, if there is one.
    """

    number: int
    text_a: str
    text_b: str | None = None
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What files hold.

    Attributes:
        samples: in the order of the files and of their lines.
        files: their names.
        complaints: what is wrong with lines.
    """

    samples: Sequence[Sample]
    files: tuple[str, ...] = ()
    complaints: Complaints = field(default_factory=Complaints)

    def where(self, number: int) -> str:
        """Return file and line of a sample."""
        return f"{self.files[number >> LINE_BITS]}:{number & ((1 << LINE_BITS) - 1)}"

    def texts(self) -> Iterator[str]:
        """Yield every text."""
        for sample in self.samples:
            yield sample.text_a
            if sample.text_b is not None:
                yield sample.text_b


def read(*paths: Path, columns: Sequence[str] | None = None, on_error: str = "fail") -> Samples:
    """Read labelled texts.

    Args:
        paths: files, or folders of Hugging Face datasets (:func:`layout_of`).
        columns: of a tab-separated file: some of :data:`FIELDS`, in their order; by default as its header
            says, or as many as its first line has.
        on_error: one of :data:`~concord.training.data.lines.ON_ERROR`.

    Raises:
        SpecError: for what cannot be read; listing bad lines, unless they are skipped; if there is no sample.
    """
    complaints = Complaints(on_error)
    samples: list[Sample] = []
    for file, path in enumerate(paths):
        for one in from_path(path, file, columns):
            if isinstance(one, Bad):
                complaints.problems.append(str(one))
            else:
                samples.append(one)
    complaints.settle()
    if not samples:
        raise SpecError([f"{', '.join(map(str, paths))}: no sample", *complaints.listed()])
    return Samples(samples=samples, files=tuple(map(str, paths)), complaints=complaints)


def splits(folder: Path) -> dict[str, Path]:
    """Return the files or datasets of a folder by split: ``train``, and ``dev`` and ``test`` if there are.

    Raises:
        SpecError: if there is no ``train``, or a split comes twice.
    """
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        split = USUAL.get(path.stem, path.stem)
        if split not in SPLITS or not (path.suffix in _ENDINGS or is_dataset(path)):
            continue
        if split in found:
            raise SpecError(f"{folder}: has {found[split].name} and {path.name} but must have one {split}")
        found[split] = path
    if "train" not in found:
        raise SpecError(
            f"{folder}: has no train{' or train'.join(_ENDINGS)}, and no folder 'train' of a dataset"
        )
    return {split: found[split] for split in SPLITS if split in found}


def by_split(path: Path) -> dict[str, Path]:
    """Return the files of a folder by split (:func:`splits`); of a file, or a dataset, itself as ``train``.

    Raises:
        SpecError: for a folder that is no dataset and has no ``train``.
    """
    return splits(path) if path.is_dir() and not (path / "state.json").exists() else {"train": path}


def is_dataset(path: Path) -> bool:
    """Return whether a path is a folder as ``Dataset.save_to_disk`` of Hugging Face writes it."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def layout_of(path: Path) -> str:
    """Return how a file or folder holds samples.

    ``tsv``: columns between tabs. ``sep``: words, ``<SEP>``, a label. ``jsonl``: a JSON object on each line.
    ``plain``: a text on each line. ``dataset``: a folder of a Hugging Face dataset. As the end of the
    name says: ``.tsv``, ``.jsonl``, a folder; else as the first line does.

    Raises:
        SpecError: if it cannot be read.
    """
    if path.is_dir():
        return "dataset"
    if _ENDINGS.get(path.suffix):
        return _ENDINGS[path.suffix]
    first = first_line_of(path)
    return "sep" if SEPARATOR in first else "tsv" if "\t" in first else "plain"


def first_line_of(path: Path) -> str:
    """Return the first line of a file that is a text; empty: none is."""
    with opened(path) as file:
        return next((text for _, text in numbered(file, str(path)) if isinstance(text, str)), "")


def from_path(path: Path, file: int, columns: Sequence[str] | None) -> Iterator[Sample | Bad]:
    """Yield the samples of a file or folder as they come, and its bad lines in their place.

    Args:
        file: its number.
    """
    layout = layout_of(path)
    if layout == "dataset":
        yield from _dataset(path, file)
        return
    parse = _Tabs(columns).parse if layout == "tsv" else _PARSERS[layout]
    with opened(path) as stream:
        for number, text in numbered(stream, str(path)):
            try:
                if isinstance(text, Bad):
                    yield text
                elif fields := parse(text):
                    yield sample_of(file, number, fields)
            except SpecError as error:
                yield Bad(f"{path}:{number}", error.problems[0].removeprefix(": "))


def sample_of(file: int, number: int, fields: dict[str, Any]) -> Sample:
    """Return a sample of what stands in a line.

    Raises:
        SpecError: if a text is empty, or is none.
    """
    for name, value in fields.items():
        if value is not None and not value.strip():
            raise SpecError(f"{name!r} is empty")
        if value is not None and "\0" in value:
            raise SpecError(f"{name!r} holds a NUL character, which no text has")
    return Sample((file << LINE_BITS) + number, **fields)


class _Tabs:
    """Columns between tabs, as LCQMC has them: no quotation marks, no escapes."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        if columns is not None:
            wrong = [name for name in columns if name not in FIELDS]
            if wrong or "text_a" not in columns or len(set(columns)) < len(columns):
                raise SpecError(
                    f"columns are {', '.join(columns)} but must be text_a and any of text_b, label, each once"
                )
        self.columns = tuple(columns or ())
        self.first = True

    def parse(self, text: str) -> dict[str, Any]:
        """Return the fields of a line; none for a header."""
        first, self.first = self.first, False
        values = text.split("\t")
        names = [USUAL.get(value, value) for value in values]
        if first and "text_a" in names and set(names) <= set(FIELDS):
            self.columns = self.columns or tuple(names)
            return {}
        if not self.columns:
            usual = {1: FIELDS[:1], 2: ("text_a", "label"), 3: FIELDS}
            if len(values) not in usual:
                raise SpecError(
                    f"has {len(values)} columns but must have 1 (text_a), 2 (text_a, label) "
                    "or 3 (text_a, text_b, label)"
                )
            self.columns = usual[len(values)]
        if len(values) != len(self.columns):
            raise SpecError(
                f"has {len(values)} columns but must have {len(self.columns)}: {', '.join(self.columns)}"
            )
        return {
            name: value.strip() if name == "label" else value
            for name, value in zip(self.columns, values, strict=True)
        }


def _words(text: str) -> dict[str, Any]:
    """Return the fields of a line of the TF1 source: words, a separator, and a label."""
    words, separator, label = text.rpartition(SEPARATOR)
    if not separator:
        raise SpecError(f"has no {SEPARATOR} between words and label")
    return {"text_a": words, "label": label.strip()}


def _json(text: str) -> dict[str, Any]:
    data = parse_json(text, "")
    if not isinstance(data, dict):
        raise SpecError(f"holds a {type(data).__name__} but must hold a JSON object")
    return _known(data)


def _known(data: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the fields of a record, by the names that they have here; others are none of ours.

    Args:
        names: of the classes, where labels are their numbers.
    """
    fields: dict[str, Any] = {}
    for key, value in data.items():
        name = USUAL.get(key, key)
        if name not in FIELDS or value is None:
            continue
        if name in fields:
            raise SpecError(f"has {key!r} beside another name of {name!r}")
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, str) or (whole and name == "label")):
            wanted = "a string or a whole number" if name == "label" else "a string"
            raise SpecError(f"{key!r} is of type {type(value).__name__} but must be {wanted}")
        fields[name] = _class(value, names) if whole else value.strip() if name == "label" else value
    if "text_a" not in fields:
        raise SpecError("lacks 'text_a' (or 'text', 'sentence', 'sentence1')")
    return fields


def _class(number: int, names: Sequence[str] | None) -> str | None:
    """Return the name of a class; a dataset's -1 is no label."""
    if names is None:
        return str(number)
    if number == -1:
        return None
    if not 0 <= number < len(names):
        raise SpecError(f"'label' is {number} but must be below {len(names)}")
    return names[number]


def _dataset(path: Path, file: int) -> Iterator[Sample | Bad]:
    """Yield the rows of a dataset that Hugging Face's library saved."""
    if not is_dataset(path):
        raise SpecError(
            f"{path}: is a folder but no dataset: 'dataset_info.json' and 'state.json' must be in it; a file "
            "of the folder can be given"
        )
    with optional(f"{path}: a folder of a Hugging Face dataset", "datasets"):
        from datasets import load_from_disk
    try:
        loaded = load_from_disk(str(path))
        names = getattr(loaded.features.get("label"), "names", None)
        for number, row in enumerate(loaded, start=1):
            try:
                yield sample_of(file, number, _known(row, names))
            except SpecError as error:
                yield Bad(f"{path}:{number}", error.problems[0])
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the library raises for spoilt files
        raise SpecError(
            f"{path}: cannot be read as a dataset: {type(error).__name__}: {first_line(error)}"
        ) from None


_PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "sep": _words,
    "jsonl": _json,
    "plain": lambda text: {"text_a": text},
}

_ENDINGS = {".tsv": "tsv", ".jsonl": "jsonl", ".txt": ""}
