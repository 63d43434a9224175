"""What is in files of labelled texts: how many of which class, how long, what is cut off, what is there twice, what cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from concord.spec.errors import collect
from concord.training.data.encoder import TextEncoder
from concord.training.data.samples import Samples, by_split, read

Key = tuple[str, str | None]


@dataclass
class File:
    """What is in one file.

    Attributes:
        name: as it was given.
        samples: that could be read.
        pairs: of them, those of two texts.
        labels: how many samples have each label, those of the most first.
        unlabelled: how many have none.
        longest: tokens of the longest sample, with the special ones, before anything is cut off.
        median: of these lengths.
        truncated: samples of which something is cut off.
        unknown: the share of tokens that the vocabulary does not have.
        again: samples whose texts an earlier one of the file has too.
        contradictory: of these, those that have another label than the first.
        elsewhere: samples whose texts are in an earlier file too, by its name.
        bad: lines that cannot be read.
        problems: the first of them, and a count of the others.
    """

    name: str
    samples: int = 0
    pairs: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    unlabelled: int = 0
    longest: int = 0
    median: float = 0.0
    truncated: int = 0
    unknown: float = 0.0
    again: int = 0
    contradictory: int = 0
    elsewhere: dict[str, int] = field(default_factory=dict)
    bad: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Description:
    """What is in some files.

    Attributes:
        max_tokens: of a sample; what is longer is truncated.
        tokenization: by which they are counted.
        vocab_size: of the vocabulary.
        lengths: of all samples, as ``[from, below, samples]``: tokens before anything is cut off.
        remarks: what training would stumble over.
    """

    files: list[File]
    max_tokens: int
    tokenization: str
    vocab_size: int
    lengths: list[tuple[int, int, int]]
    remarks: list[str]
    format: Literal["concord.data/1"] = "concord.data/1"


def within(paths: Iterable[Path]) -> list[Path]:
    """Return files, with those of folders that have a ``train`` in their place.

    Raises:
        SpecError: for a folder without.
    """
    return [file for path in paths for file in by_split(path).values()]


def gather(
    paths: Sequence[Path], layout: str | None, columns: Sequence[str] | None, on_error: str
) -> list[Samples]:
    """Read files, each by itself.

    Raises:
        SpecError: listing what is wrong with all of them.
    """
    return collect(
        *(partial(read, path, layout=layout, columns=columns, on_error=on_error) for path in paths)
    )


def describe(gathered: Sequence[Samples], encoder: TextEncoder, tokenization: str) -> Description:
    """Describe what has been read.

    Args:
        encoder: counts tokens, and cuts off.
        tokenization: its name.
    """
    seen: dict[str, set[Key]] = {}
    files, lengths = [], []
    for samples in gathered:
        file, lasting = _file(samples, encoder, seen)
        files.append(file)
        lengths.append(lasting)
    together = np.concatenate(lengths)
    return Description(
        files,
        encoder.text.max_tokens,
        tokenization,
        encoder.vocab_size,
        _histogram(together),
        _remarks(files),
    )


def _file(
    samples: Samples, encoder: TextEncoder, seen: dict[str, set[Key]]
) -> tuple[File, NDArray[np.int64]]:
    """Return what is in a file, and the lengths of its samples.

    Args:
        seen: what is in earlier ones; this one is added.
    """
    (name,) = samples.files
    texts = [(sample.text_a, sample.text_b) for sample in samples.samples]
    encoded = [
        (len(ids) + cut, cut, int((ids == encoder.unknown_id).sum()))
        for ids, _, cut in encoder.encode_many(texts)
    ]
    whole, cut, unknown = (np.array(column) for column in zip(*encoded, strict=True))
    first: dict[Key, str | None] = {}
    file = File(
        name,
        samples=len(texts),
        longest=int(whole.max()),
        median=float(np.median(whole)),
        truncated=int((cut > 0).sum()),
    )
    file.unknown = float(unknown.sum() / (whole - cut).sum())
    file.bad, file.problems = samples.complaints.count, samples.complaints.listed()
    counts: Counter[str] = Counter()
    for key, sample in zip(texts, samples.samples, strict=True):
        file.pairs += sample.text_b is not None
        file.unlabelled += sample.label is None
        counts.update([] if sample.label is None else [sample.label])
        file.again += key in first
        file.contradictory += first.setdefault(key, sample.label) != sample.label
    file.labels = dict(counts.most_common())
    file.elsewhere = {
        other: count for other, keys in seen.items() if (count := sum(key in keys for key in texts))
    }
    seen[name] = set(first)
    return file, whole


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return how many lengths lie between powers of two."""
    powers = np.int64(1) << np.arange(
        int(lengths.min()).bit_length() - 1, int(lengths.max()).bit_length() + 1
    )
    return [
        (low, high, int(((lengths >= low) & (lengths < high)).sum()))
        for low, high in pairwise(powers.tolist())
    ]


def _remarks(files: Sequence[File]) -> list[str]:
    """Return what training on the first file, and evaluating on the others, would stumble over."""
    train, remarks = files[0], []
    if train.labels and len(train.labels) == 1:
        remarks.append(
            f"{train.name}: has only the label {next(iter(train.labels))!r}; there must be at least two classes to tell apart"
        )
    for file in files:
        new = [repr(label) for label in sorted(file.labels) if label not in train.labels]
        if train.labels and new:
            remarks.append(
                f"{file.name}: has {', '.join(new[:10])}{' and others' if len(new) > 10 else ''}, which {train.name} does not have"
            )
        if file.labels and file.unlabelled:
            remarks.append(f"{file.name}: {file.unlabelled} samples have no label")
        if file.contradictory:
            remarks.append(
                f"{file.name}: {file.contradictory} samples have the texts of an earlier one, and another label"
            )
        remarks += [
            f"{file.name}: {count} samples are in {other} too" for other, count in file.elsewhere.items()
        ]
    return remarks
