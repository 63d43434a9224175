"""Two checkpoints, tensor by tensor: two tensors are in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from concord.conformance.fields import also
from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor
from concord.porting.comparison.difference import TensorDifference, classify
from concord.porting.folder import CARRIED, CONFIGS, FOREIGN, LABELS, LENGTHS, PROMPTS, SENTENCES
from concord.porting.sentences import ARGUMENTS
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import parse_json
from concord.spec.text import first_of, shown

BESIDE = tuple(name for name in (*CARRIED, *SENTENCES) if name != LABELS)
"""The files; labels are compared by what they are, which a configuration may say too."""

MOST, LONGEST = 3, 60
"""Entries that differ of which a file's line tells, and characters of each that it shows."""

Place = tuple[str | int, ...]
"""The keys and numbers that lead to an entry of JSON."""

SILENT = {LENGTHS: (ARGUMENTS,), PROMPTS: ("__version__",)}
"""Entries of a file that say nothing of the model: how a library is to load what lies there anyway, and which
one wrote it."""


def _beside(checkpoint: Checkpoint) -> dict[str, dict[Place, str]]:
    """Return what labels and files say, each entry or line by its place."""
    found = {name: _said(name, checkpoint.files[name]) for name in BESIDE if name in checkpoint.files}
    labels = {str(number): label for number, label in enumerate(checkpoint.labels or ())}
    return {**({"labels": dict(_entries(labels))} if labels else {}), **found}


def _said(name: str, content: bytes) -> dict[Place, str]:
    try:
        if not name.endswith(".json"):
            lines = content.decode().removesuffix("\n").split("\n")
            return dict(
                _entries({f"line {number}": line.removesuffix("\r") for number, line in enumerate(lines, 1)})
            )
        found = parse_json(content, name)
    except (SpecError, UnicodeDecodeError):
        return {(): f"{len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()[:8]}"}
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key not in SILENT.get(name, ())}
    return dict(_entries(found))


def _apart(mine: Mapping[Place, str], other: Mapping[Place, str], sides: tuple[str, str]) -> str:
    """Return which entries are not the same, in words; empty: all are."""
    apart = [
        f"{_spelled(place)} is {shown(mine.get(place, 'absent'), LONGEST)} in {sides[0]} and "
        f"{shown(other.get(place, 'absent'), LONGEST)} in {sides[1]}"
        for place in {**mine, **other}
        if mine.get(place) != other.get(place)
    ]
    return first_of(apart, MOST, "; ")


def _entries(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the place of each entry of JSON, and what stands there as JSON."""
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(inner, (*place, key))
    else:
        yield place, json.dumps(value)


def _spelled(place: Place) -> str:
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return shown("".join(steps).removeprefix("."), LONGEST) or "all of it"


TIED = "tie_word_embeddings"
"""The key of a configuration that says whether a head takes embeddings, where it has no table of its own."""


def _tied(checkpoint: Checkpoint) -> bool | None:
    """Return whether a configuration ties embeddings, as it does if it says nothing; None: there is none."""
    for name, content in checkpoint.files.items():
        if name in CONFIGS or name.endswith(FOREIGN):
            stated = parse_json(content, name)
            return bool(stated.get(TIED, True)) if isinstance(stated, dict) else None
    return None


@dataclass(frozen=True)
class Others:
    """What came of the tensors that are no parameters, such as heads that the family does not have.

    Attributes:
        same: how many have the same bits.
        pairs: those of both that have not.
        apart: those that could not be compared, by the name in the file that has it, and why.
    """

    same: int = 0
    pairs: tuple[TensorDifference, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What a comparison of two checkpoints came to.

    Attributes:
        same: how many parameters have the same bits.
        pairs: those of both that have not, in the order of computation.
        missing: those of the first that the second lacks.
        extra: those that the second alone has.
        config: fields of the configuration that differ, and their values; ``part`` too.
        files: those beside the weights that both have and that do not say the same, and in what, in words;
            ``labels`` too.
        alone: such files that the first alone has, and the second.
        others: see :class:`Others`.
    """

    as_written = also("exit_code", "summary")

    same: int
    pairs: tuple[TensorDifference, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    others: Others = field(default_factory=Others)

    @property
    def exit_code(self) -> int:
        """0: the same bits, names and configuration, and all else that both have says the same; 1: not."""
        apart = (self.pairs, self.missing, self.extra, self.config, self.files, self.others.pairs)
        return int(any(apart))

    @property
    def summary(self) -> str:
        """What it came to, in a sentence."""
        said = [f"{self.same} of {self.same + len(self.pairs)} parameters have the same bits"]
        counts = Counter("swapped" if pair.other else pair.kind for pair in self.pairs)
        said += [f"{count} {kind}" for kind, count in counts.items()]
        others = {
            "the same bits": self.others.same,
            "different": len(self.others.pairs),
            "not compared": len(self.others.apart),
        }
        if any(others.values()):
            listed = ", ".join(f"{count} {words}" for words, count in others.items() if count)
            said.append(f"tensors that are no parameters: {listed}")
        said += [f"{len(self.missing)} missing in B"] * bool(self.missing)
        said += [f"{len(self.extra)} in B alone"] * bool(self.extra)
        options = f"{len(self.config)} options differ" if len(self.config) > 1 else "1 option differs"
        said.append(options if self.config else "the same configuration")
        if self.files:
            said.append(f"{', '.join(self.files)} {'differ' if len(self.files) > 1 else 'differs'}")
        return "; ".join(said)


def compare(first: Checkpoint, second: Checkpoint, sides: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two checkpoints.

    Args:
        sides: what the two are called where files and what is no parameter differ.
    """
    common = [name for name in first.tensors if name in second.tensors]
    held = {name: tensor.held for name, tensor in first.tensors.items()}
    mine, other = ({"part": one.part, **one.config.as_dict()} for one in (first, second))
    ours, theirs = _beside(first), _beside(second)
    apart = {name: _apart(ours[name], theirs[name], sides) for name in ours if name in theirs}
    # Embeddings are tied in what gives tokens out: a bare model has no such head, and is the same either way.
    if any(_is_of_head(name, tensor) for one in (first, second) for name, tensor in one.others.items()):
        ties = _tied(first), _tied(second)
        if None not in ties:
            mine[TIED], other[TIED] = ties
    pairs = []
    for name in common:
        pairs += _pair(name, first.tensors, second.tensors, first.config, held)
    return Comparison(
        len(common) - len(pairs),
        tuple(pairs),
        tuple(name for name in first.tensors if name not in second.tensors),
        tuple(name for name in second.tensors if name not in first.tensors),
        {
            key: (str(mine.get(key)), str(other.get(key)))
            for key in {**mine, **other}
            if mine.get(key) != other.get(key)
        },
        {name: words for name, words in apart.items() if words},
        (tuple(a for a in ours if a not in theirs), tuple(b for b in theirs if b not in ours)),
        _others(first, second, sides),
    )


def _is_of_head(name: str, tensor: LazyTensor) -> bool:
    return bool(tensor.owner) or not (tensor.redundant or name.startswith("pooler."))


def _untied(
    name: str, sides: tuple[str, str], whose: Checkpoint, other: Checkpoint
) -> TensorDifference | None:
    """Return what it means that a checkpoint lacks a tensor that the other one does not tie.

    None if it lacks the whole head.
    """
    tensor, head = whose.others[name], name.rsplit(".", 2)[0]
    if not tensor.owner or not any(one.startswith(head) for one in other.others):
        return None
    tied = _tied(other)
    instead = (
        f"a model of {sides[1]} takes its embeddings"
        if tied
        else f"a model of {sides[1]} draws it anew"
        if tied is False
        else f"{sides[1]} does not say what a model takes"
    )
    words = (
        f"is in {sides[0]} alone, where it is no copy of {tensor.owner!r}; {instead} in its place ({TIED})"
    )
    return TensorDifference("untied", words, f"{TIED} was not heeded", tensor.foreign)


def _others(first: Checkpoint, second: Checkpoint, sides: tuple[str, str]) -> Others:
    """Compare what is no parameter, but for what holds nothing but what the rest says."""
    found: list[TensorDifference] = []
    apart: dict[str, str] = {}
    open_ = [
        name
        for name in {**first.others, **second.others}
        if any(name in one.others and not one.others[name].redundant for one in (first, second))
    ]
    for name in open_:
        tensors = [one.others[name] for one in (first, second) if name in one.others]
        foreign = tensors[0].foreign
        if len(tensors) == 1:
            both = ((first, second), sides) if name in first.others else ((second, first), sides[::-1])
            if difference := _untied(name, both[1], *both[0]):
                found.append(difference)
            else:
                apart[foreign] = f"is in {both[1][0]} alone"
        elif pairs := _pair(name, first.others, second.others, first.config, {}):
            if first.source != second.source and UNKNOWN in [tensor.transform for tensor in tensors]:
                apart[foreign] = "no table says how it is laid out in files of both kinds"
            else:
                found.append(replace(pairs[0], name=foreign))
    return Others(len(open_) - len(found) - len(apart), tuple(found), apart)


def _pair(
    name: str,
    first: Mapping[str, LazyTensor],
    second: Mapping[str, LazyTensor],
    config: EncoderConfig,
    held: Mapping[str, tuple[str, str]],
) -> list[TensorDifference]:
    """Return how a tensor differs, if it does.

    Args:
        held: what those of the first hold whose place it may have taken.
    """
    mine, theirs = first[name], second[name]
    found = theirs.held
    if mine.shape == theirs.shape and found == (held.get(name) or mine.held):
        return []
    dtypes = (mine.dtype, theirs.dtype)
    others = [
        other
        for other, what in held.items()
        if what == found and other != name and first[other].shape == theirs.shape
    ]
    if others:
        other = next((one for one in others if one.rpartition(".")[2] == name.rpartition(".")[2]), others[0])
        layers = {one.split(".")[1] if one.startswith("layers.") else "" for one in (name, other)}
        why = (
            "tensors of one layer were taken for those of another"
            if len(layers) > 1
            else "names were mapped to each other the wrong way"
        )
        words = f"it is A's {other}, bit for bit"
        return [TensorDifference("different", words, why, name, other, dtypes)]
    difference = classify(mine.read(), theirs.read(), name, config)
    words = difference.words
    words += "" if mine.dtype == theirs.dtype else f" ({mine.dtype} in A, {theirs.dtype} in B)"
    return [replace(difference, words=words, dtypes=dtypes)]
