"""Two checkpoints, tensor by tensor: two tensors are in memory at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from concord.conformance.fields import also
from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor
from concord.porting.comparison.difference import TensorDifference, classify
from concord.porting.folder import CARRIED, LABELS, LENGTHS, PROMPTS, SENTENCES
from concord.porting.sentences import ARGUMENTS
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import parse_json
from concord.spec.text import first_of

BESIDE = tuple(name for name in (*CARRIED, *SENTENCES) if name != LABELS)
"""The files; labels are compared by what they are, which a configuration may say too."""

MOST = 3
"""Entries that differ of which a file's line tells."""

SILENT = {LENGTHS: (ARGUMENTS,), PROMPTS: ("__version__",)}
"""Entries of a file that say nothing of the model: how a library is to load what lies there anyway, and which
one wrote it."""

ABSENT = object()


def differing(first: Checkpoint, second: Checkpoint, sides: tuple[str, str] = ("A", "B")) -> dict[str, str]:
    """Return which labels and files of two checkpoints do not say the same, and in what, in words.

    Only those that both have.

    Args:
        sides: what the two are called.
    """
    found = {}
    if first.labels and second.labels and first.labels != second.labels:
        found["labels"] = _told(
            list(
                _apart(
                    *(
                        {str(number): name for number, name in enumerate(one.labels or ())}
                        for one in (first, second)
                    )
                )
            ),
            sides,
        )
    for name in BESIDE:
        mine, other = first.files.get(name), second.files.get(name)
        if (
            mine is not None
            and other is not None
            and mine != other
            and (words := _told(list(_apart(_read(name, mine), _read(name, other))), sides))
        ):
            found[name] = words
    return found


def alone(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    """Return the files that the first has and the second has not; ``labels`` too."""
    return (
        *(["labels"] if first.labels and not second.labels else []),
        *(name for name in BESIDE if name in first.files and name not in second.files),
    )


def _read(name: str, content: bytes) -> Any:
    """Return what a file says: entries, or lines; of what cannot be understood its bytes."""
    try:
        found = (
            parse_json(content, name)
            if name.endswith(".json")
            else [line.removesuffix("\r") for line in content.decode().removesuffix("\n").split("\n")]
        )
    except (SpecError, UnicodeDecodeError):
        return content
    return (
        {key: value for key, value in found.items() if key not in SILENT.get(name, ())}
        if isinstance(found, dict)
        else found
    )


def _apart(mine: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place of each entry or line that is not the same, and what each side has there.

    Files may nest deeper than calls.
    """
    left = [("", mine, other)]
    while left:
        where, one, another = left.pop()
        if isinstance(one, dict) and isinstance(another, dict):
            left += [
                (f"{where}.{key}" if where else key, one.get(key, ABSENT), another.get(key, ABSENT))
                for key in reversed({**one, **another})
            ]
        elif isinstance(one, list) and isinstance(another, list):
            pairs = enumerate(zip_longest(one, another, fillvalue=ABSENT))
            left += [(f"{where}[{place}]" if where else f"line {place + 1}", *pair) for place, pair in pairs][
                ::-1
            ]
        elif type(one) is not type(another) or one != another:
            yield where, one, another


def _told(apart: list[tuple[str, Any, Any]], sides: tuple[str, str]) -> str:
    """Return in words what is not the same; empty: nothing."""
    said = [
        f"{_brief(where) or 'all of it'} is {_value(mine)} in {sides[0]} and {_value(other)} in {sides[1]}"
        for where, mine, other in apart
    ]
    return first_of(said, MOST, "; ")


def _value(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, (bytes, dict, list)):
        return f"{len(value)} {'bytes' if isinstance(value, bytes) else 'entries'}"
    return _brief(json.dumps(value))


def _brief(text: str) -> str:
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


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
        config: fields of the configuration that differ, and their values.
        parts: of the model that each has.
        files: those beside the weights that both have and that do not say the same, and in what, in words;
            ``labels`` too.
        alone: such files that the first alone has, and the second.
        others: see :class:`Others`.
    """

    written = also("exit_code", "summary")

    same: int
    pairs: tuple[TensorDifference, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: tuple[str, str] = ("", "")
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
        others, apart = "of the tensors that are no parameters", len(self.others.pairs)
        for count, words in (
            (self.others.same, f"{others} {{}} {'have' if self.others.same > 1 else 'has'} the same bits"),
            (apart, f"{others} {{}} {'have' if apart > 1 else 'has'} other bits"),
            (len(self.others.apart), "{} not compared"),
            (len(self.missing), "{} missing in B"),
            (len(self.extra), "{} in B alone"),
        ):
            said += [words.format(count)] * bool(count)
        options = f"{len(self.config)} options differ" if len(self.config) > 1 else "1 option differs"
        said.append(options if self.config else "the same configuration")
        if self.files:
            said.append(f"{', '.join(self.files)} {'differ' if len(self.files) > 1 else 'differs'}")
        return "; ".join(said)


def compare(
    first: Checkpoint,
    second: Checkpoint,
    progress: Callable[[int], None] = lambda done: None,
    sides: tuple[str, str] = ("A", "B"),
) -> Comparison:
    """Compare two checkpoints.

    Args:
        progress: takes how many parameters have been looked at.
        sides: what the two are called where files and what is no parameter differ.
    """
    common = [name for name in first.tensors if name in second.tensors]
    held = {name: tensor.held for name, tensor in first.tensors.items()}
    mine, other = first.config.as_dict(), second.config.as_dict()
    pairs = []
    for number, name in enumerate(common, start=1):
        pairs += _pair(name, first.tensors, second.tensors, first.config, held)
        progress(number)
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
        (first.part, second.part),
        differing(first, second, sides),
        (alone(first, second), alone(second, first)),
        _others(first, second, sides),
    )


def _others(first: Checkpoint, second: Checkpoint, sides: tuple[str, str]) -> Others:
    """Compare what is no parameter, but for what holds nothing but what the rest says."""
    found: list[TensorDifference] = []
    apart: dict[str, str] = {}
    open_ = [
        name
        for name in {**first.others, **second.others}
        if any(name in one.others and name not in one.known for one in (first, second))
    ]
    for name in open_:
        tensors = [one.others[name] for one in (first, second) if name in one.others]
        foreign = tensors[0].foreign
        if len(tensors) == 1:
            apart[foreign] = f"is in {sides[name not in first.others]} alone"
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
