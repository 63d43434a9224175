"""Comparison of two checkpoints, with two tensors in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from concord.conformance.record_fields import also
from concord.porting.checkpoint import UNKNOWN, Checkpoint, LazyTensor
from concord.porting.difference import SAME, TensorDifference, classify
from concord.porting.folder import CARRIED, LABELS, LENGTHS, PROMPTS, SENTENCES, source_settings
from concord.porting.registry import find_format
from concord.porting.sentences import ARGUMENTS
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError
from concord.spec.files import parse_json
from concord.spec.text import first_of, shown

# Labels are compared separately, because they may be in a configuration instead of a file.
BESIDE = tuple(name for name in (*CARRIED, *SENTENCES) if name != LABELS)

# Maximum number of differing entries to name per file, and of characters to show.
MOST, LONGEST = 3, 60

MISSING = "missing"  # from a side whose format can hold it

# Entries about how a library loads the files or which version wrote them, without effect on the model.
SILENT = {LENGTHS: (ARGUMENTS,), PROMPTS: ("__version__",)}


def _beside(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    labels = {f"{number}": json.dumps(label) for number, label in enumerate(checkpoint.labels or ())}
    files = {name: _entries_of(name, checkpoint.files[name]) for name in BESIDE if name in checkpoint.files}
    return {**({"labels": labels} if labels else {}), **files}


def _places(checkpoint: Checkpoint) -> Collection[str]:
    # Files and heads that its format can hold.
    if not checkpoint.format:
        return ("labels",)
    form = find_format(checkpoint.format)
    return ("labels", *form.carried, *form.rules(checkpoint.part).carried)


def _entries_of(name: str, content: bytes) -> dict[str, str]:
    try:
        if not name.endswith(".json"):
            lines = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
            return {f"line {number}": json.dumps(line) for number, line in enumerate(lines, 1)}
        parsed = parse_json(content, name)
    except (SpecError, UnicodeDecodeError):
        return {"": f"{len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()[:8]}"}
    if isinstance(parsed, dict):
        parsed = {key: value for key, value in parsed.items() if key not in SILENT.get(name, ())}
    return dict(_entries(parsed))


def _entries(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entries(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _entries(inner, f"{place}[{number}]")
    else:
        yield place, json.dumps(value)


def _apart(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    differences = [
        f"{shown(place, LONGEST) or 'all of it'} is {shown(first.get(place, 'absent'), LONGEST)} in A and "
        f"{shown(second.get(place, 'absent'), LONGEST)} in B"
        for place in {**first, **second}
        if first.get(place) != second.get(place)
    ]
    return first_of(differences, MOST, "; ")


# Whether a head uses the embeddings instead of its own table.
TIED = "tie_word_embeddings"


def _tied(checkpoint: Checkpoint) -> bool | None:
    # transformers ties embeddings unless the configuration says otherwise.
    settings = source_settings(checkpoint.files)
    return bool(settings.get(TIED, True)) if settings else None


@dataclass(frozen=True)
class Others:
    """Comparison of tensors that are not parameters, such as unknown heads."""

    same: int = 0  # number of tensors with the same bits
    pairs: tuple[TensorDifference, ...] = ()  # the others
    apart: Mapping[str, str] = field(default_factory=dict)  # reason why a tensor is not compared, by name


@dataclass(frozen=True)
class Comparison:
    """The differences between two checkpoints, A and B."""

    as_written = also("exit_code", "summary")

    same: int  # number of parameters with the same bits
    pairs: tuple[TensorDifference, ...]  # the others, in the order of computation
    missing: tuple[str, ...]  # from B
    extra: tuple[str, ...]  # only in B
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # differing fields, and ``part``
    files: Mapping[str, str] = field(default_factory=dict)  # differences of common files and of labels
    # Files only in A, and only in B, for which the other's format has no place.
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    others: Others = field(default_factory=Others)

    @property
    def exit_code(self) -> int:
        """0 if everything that both formats can hold is equal, else 1."""
        pairs = [pair for pair in (*self.pairs, *self.others.pairs) if pair.kind != SAME]
        return int(any((pairs, self.missing, self.extra, self.config, self.files)))

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        parts = [f"{self.same} of {self.same + len(self.pairs)} parameters have the same bits"]
        counts = Counter(
            "swapped" if pair.other else pair.words if pair.kind == SAME else pair.kind for pair in self.pairs
        )
        parts += [f"{kind}: {count}" for kind, count in counts.items()]
        others = (
            (self.others.same, "the same bits"),
            (len(self.others.pairs), "different"),
            (len(self.others.apart), "not compared"),
        )
        if listed := ", ".join(f"{count} {words}" for count, words in others if count):
            parts.append(f"tensors that are not parameters: {listed}")
        parts += [f"{len(self.missing)} missing in B"] * bool(self.missing)
        parts += [f"{len(self.extra)} only in B"] * bool(self.extra)
        options = f"{len(self.config)} options differ" if len(self.config) > 1 else "1 option differs"
        parts.append(options if self.config else "the same configuration")
        parts += [
            f"{name} {words if words.startswith(MISSING) else 'differs'}"
            for name, words in self.files.items()
        ]
        return "; ".join(parts)


def compare(first: Checkpoint, second: Checkpoint, ported: bool = False) -> Comparison:
    """Compare checkpoints A and B.

    Args:
        ported: whether B may have more files and heads than A.
    """
    config_a, config_b = ({"part": side.part, **side.config.as_dict()} for side in (first, second))
    # Only a head that outputs tokens can be tied; for a bare model, the option has no effect.
    if any(_is_of_head(name, tensor) for side in (first, second) for name, tensor in side.others.items()):
        ties = _tied(first), _tied(second)
        if None not in ties:
            config_a[TIED], config_b[TIED] = ties
    files, others = _beside(first), _beside(second)
    places = {"A": () if ported else _places(first), "B": _places(second)}
    differences = {name: _apart(files[name], others[name]) for name in files if name in others}
    alone = list[tuple[str, ...]]()
    for letter, having, lacking in (("B", files, others), ("A", others, files)):
        absent = [name for name in having if name not in lacking]
        differences |= {name: f"{MISSING} in {letter}" for name in absent if name in places[letter]}
        alone.append(tuple(name for name in absent if name not in places[letter]))
    digests = {name: tensor.held for name, tensor in first.tensors.items()}
    pairs = [
        _difference(name, first.tensors, second.tensors, first.config, digests)
        for name in first.tensors
        if name in second.tensors
    ]
    return Comparison(
        pairs.count(None),
        tuple(filter(None, pairs)),
        tuple(name for name in first.tensors if name not in second.tensors),
        tuple(name for name in second.tensors if name not in first.tensors),
        {
            key: (str(config_a.get(key)), str(config_b.get(key)))
            for key in {**config_a, **config_b}
            if config_a.get(key) != config_b.get(key)
        },
        {name: words for name, words in differences.items() if words},
        (alone[0], alone[1]),
        _compare_others(first, second, places),
    )


def _is_of_head(name: str, tensor: LazyTensor) -> bool:
    return bool(tensor.owner) or not (tensor.redundant or name.startswith("pooler."))


def _compare_others(first: Checkpoint, second: Checkpoint, places: Mapping[str, Collection[str]]) -> Others:
    pairs, reasons, same = list[TensorDifference](), dict[str, str](), 0
    for name in {**first.others, **second.others}:
        sides = [checkpoint.others.get(name) for checkpoint in (first, second)]
        tensor, *_ = tensors = [*filter(None, sides)]
        if all(tensor.redundant for tensor in tensors):
            continue
        if len(tensors) == 1:
            letter, other, lacking = ("A", "B", second) if sides[0] else ("B", "A", first)
            # A side with the rest of this head would silently use the embeddings instead. A side without the
            # head is not affected.
            if tensor.owner and any(
                candidate.startswith(name.rsplit(".", 2)[0]) for candidate in lacking.others
            ):
                words = f"is only in {letter}, and is not a copy of {tensor.owner!r}"
                words += f"; {TIED} is {_tied(lacking)} in {other}"
                pairs.append(TensorDifference("untied", words, f"{TIED} was ignored", tensor.foreign))
            elif name in places[other]:
                pairs.append(TensorDifference(MISSING, f"{MISSING} in {other}", name=tensor.foreign))
            else:
                reasons[tensor.foreign] = f"is only in {letter}"
        elif not (difference := _difference(name, first.others, second.others, first.config)):
            same += 1
        elif first.source != second.source and UNKNOWN in [tensor.transform for tensor in tensors]:
            reasons[tensor.foreign] = "no table gives its layout in both kinds of file"
        else:
            pairs.append(replace(difference, name=tensor.foreign))
    return Others(same, tuple(pairs), reasons)


def _difference(
    name: str,
    first: Mapping[str, LazyTensor],
    second: Mapping[str, LazyTensor],
    config: EncoderConfig,
    digests: Mapping[str, tuple[str, str]] | None = None,
) -> TensorDifference | None:
    tensor_a, tensor_b, digests = first[name], second[name], digests or {}
    bits = tensor_b.held
    if tensor_a.shape == tensor_b.shape and bits == (digests.get(name) or tensor_a.held):
        return None
    others = [other for other in digests if digests[other] == bits and first[other].shape == tensor_b.shape]
    if not others:
        difference = classify(tensor_a.read(), tensor_b.read(), name, config)
        words = "" if tensor_a.dtype == tensor_b.dtype else f" ({tensor_a.dtype} in A, {tensor_b.dtype} in B)"
        return replace(difference, words=difference.words + words)
    leaf = name.rpartition(".")[2]
    other = next((parameter for parameter in others if parameter.endswith(f".{leaf}")), others[0])
    layers = {
        parameter.split(".")[1] if parameter.startswith("layers.") else "" for parameter in (name, other)
    }
    cause = "names were mapped to the wrong tensors"
    if len(layers) > 1:
        cause = "tensors of one layer were taken for those of another"
    return TensorDifference("different", f"it is A's {other}, bit for bit", cause, name, other)
