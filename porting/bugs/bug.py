"""What a bug of conversion is: a name, and what it makes of a checkpoint's folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord import spec
from concord.porting.checkpoint import from_weights
from concord.porting.folder import CONFIGS, LENGTHS, PROMPTS
from concord.porting.registry import Format, known
from concord.porting.stored import StoredTensor, in_memory
from concord.porting.writing import write

GROUPS = ("names", "layouts", "tensors", "numbers", "configuration", "beside the weights", "files")
"""What is wrong: which tensor is which, how it is laid out, which there are, what is in it, what is said of
the model, what lies beside it, and how it lies in files."""

Outcome = Literal["refused", "named", "harmless"]
"""What must come of it: it is not read, and why is said; it is read, and where it goes wrong is said; nothing
is wrong, and nobody is alarmed."""

Array = NDArray[Any]

Arrays = dict[str, Any]

Edit = Callable[[Path, Format], None]
"""Changes a checkpoint's folder."""

SIZES: Mapping[str, int] = {
    "vocab_size": 29,
    "d_model": 14,
    "num_heads": 2,
    "d_ff": 17,
    "num_classes": 3,
    "num_layers": 2,
    "max_positions": 13,
}
"""Of the checkpoint that a bug is put into: a prime, or twice a prime, for each axis, so that only what is
square looks like its transpose."""

SEED = 3

LABELS = ("no", "maybe", "yes")

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "", *(f"t{number}" for number in range(5, SIZES["vocab_size"])))

CARRIED: Mapping[str, bytes] = {
    "vocab.txt": "\n".join((*TOKENS, "")).encode(),
    "tokenizer.json": b'{"version": "1.0", "normalizer": {"type": "BertNormalizer", "lowercase": true}}',
    "tokenizer_config.json": b'{"do_lower_case": true, "model_max_length": 13}',
    LENGTHS: b'{"max_seq_length": 13, "do_lower_case": false}',
    PROMPTS: b'{"__version__": {"pytorch": "2.13.0"}, "prompts": {"query": "t5"}, '
    b'"default_prompt_name": "query"}',
}
"""What lies beside the weights, as far as a format has it there."""


@dataclass(frozen=True, kw_only=True)
class ConversionBug:
    """A thing that goes wrong, or only seems to, where a checkpoint is converted.

    Attributes:
        name: unique, in words joined by underscores.
        group: one of :data:`GROUPS`.
        what: the bug, in one sentence.
        clause: the clause of SPEC.md that it breaks, or would break.
        edit: what makes the right folder into the wrong one.
        expected: see :data:`Outcome`.
        says: what must be said. Of what is refused, in one of the lines; of what is named, about the first
            tensor that diverges;
            of what is harmless, in the ledger (:attr:`concord.porting.LedgerEntry.reason`).
        first: of what is named, the first tensor that diverges (:func:`concord.spec.tensors.taps`).
        format: of the folder (:func:`concord.porting.formats`).
        sizes: of the model, where they are others than :data:`SIZES`.
        source: where it was seen.
    """

    name: str
    what: str
    edit: Edit
    expected: Outcome
    group: str = ""
    clause: str = ""
    says: str = ""
    first: str = ""
    format: str = "hugging-face"
    sizes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def right(self, folder: Path) -> None:
        """Write the right checkpoint, a BERT with random weights in float32."""
        model = spec.variant("bert", **{**SIZES, **self.sizes})
        weights = {
            name: array.astype(np.float32) for name, array in spec.initialize(model, seed=SEED).items()
        }
        write(
            dataclasses.replace(from_weights(model, weights, files=CARRIED), labels=LABELS),
            folder,
            self.format,
        )

    def inject(self, folder: Path) -> None:
        """Make the right checkpoint into the wrong one."""
        self.edit(folder, known(self.format))


# Entries.


def _entry(expected: Outcome) -> Callable[..., ConversionBug]:
    def entry(
        name: str, what: str, edit: Edit, says: str = "", source: str = "", **more: Any
    ) -> ConversionBug:
        where = f"https://github.com/{source}" if source else ""
        return ConversionBug(
            name=name, what=what, edit=edit, expected=expected, says=says, source=where, **more
        )

    return entry


refused, harmless = _entry("refused"), _entry("harmless")
"""What make an entry of a name, a sentence, an edit, what must be said, where it was seen, and fields of the
class."""


def named(name: str, what: str, edit: Edit, first: str, *more: str, **fields: Any) -> ConversionBug:
    """Return an entry of what is named, first of all at a tensor; empty: at none."""
    return _entry("named")(name, what, edit, *more, first=first, **fields)


def section(group: str, clause: str, *entries: ConversionBug) -> tuple[ConversionBug, ...]:
    """Return the entries of a group; the clause is that of those which name none."""
    return tuple(dataclasses.replace(one, group=group, clause=one.clause or clause) for one in entries)


# Edits.


def tensors(change: Callable[[Arrays], Arrays]) -> Edit:
    """Return the edit of the tensors of a file, by its own names and in its own layouts.

    One may become a :class:`StoredTensor`.
    """

    def edit(folder: Path, form: Format) -> None:
        path = folder / form.weights[0]
        arrays = {name: np.array(stored.array()) for name, stored in form.container.read(path).items()}
        new = {
            name: one if isinstance(one, StoredTensor) else in_memory(np.asarray(one, order="C"))
            for name, one in change(arrays).items()
        }
        form.container.write(path, new)

    return edit


def changed(**changes: Callable[[Array], Any]) -> Edit:
    """Return the edit of tensors by the end of their names, written with double underscores for dots."""
    ends = {end.replace("__", "."): change for end, change in changes.items()}

    def change(found: Arrays) -> Arrays:
        return {
            name: next((change(array) for end, change in ends.items() if name.endswith(end)), array)
            for name, array in found.items()
        }

    return tensors(change)


def renamed(rename: Callable[[str], str]) -> Edit:
    """Return the edit of the names of tensors."""
    return tensors(lambda found: {rename(name): array for name, array in found.items()})


def exchanged(one: str, other: str) -> Edit:
    """Return the edit that exchanges two words in the names of tensors."""
    return renamed(lambda name: name.replace(one, other) if one in name else name.replace(other, one))


def without(*words: str) -> Edit:
    """Return the edit that leaves out the tensors whose names have one of some words."""
    return tensors(
        lambda found: {
            name: array for name, array in found.items() if not any(word in name for word in words)
        }
    )


def added(**arrays: Callable[[Arrays], Array]) -> Edit:
    """Return the edit that adds tensors, made of those that are there.

    Names are written with double underscores for dots.
    """
    return tensors(
        lambda found: {**found, **{name.replace("__", "."): make(found) for name, make in arrays.items()}}
    )


def stated(**entries: Any) -> Edit:
    """Return the edit of what the configuration says; None leaves an entry out."""

    def edit(folder: Path, form: Format) -> None:
        path = next(folder / name for name in CONFIGS if (folder / name).exists())
        said = {**json.loads(path.read_text()), **entries}
        path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))

    return edit


def both(*edits: Edit) -> Edit:
    """Return several edits, one after the other."""

    def edit(folder: Path, form: Format) -> None:
        for one in edits:
            one(folder, form)

    return edit


def damaged(change: Callable[[bytes], bytes]) -> Edit:
    """Return the edit of the bytes of the file of weights."""

    def edit(folder: Path, form: Format) -> None:
        path = folder / form.weights[0]
        path.write_bytes(change(path.read_bytes()))

    return edit
