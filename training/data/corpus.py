"""Encoded samples side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.spec.errors import SpecError
from concord.training.data.encoder import TextEncoder
from concord.training.data.labels import Labels
from concord.training.data.samples import Sample, Samples

UNLABELLED = -1
"""The label of a sample that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Encoded samples (N samples of together L tokens).

    Attributes:
        ids: int32 (L,), the tokens of all samples, one sample after the other.
        starts: int64 (N + 1,), where each begins; the last is L.
        segment_ids: int8 (L,).
        labels: int64 (N,), the numbers of the classes; :data:`UNLABELLED` for none.
        numbers: int64 (N,), of the samples: :attr:`concord.training.data.samples.Sample.number`.
        truncated: int32 (N,), how many tokens of each sample were cut off.
        files: the names of the files that the samples come from.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    segment_ids: NDArray[np.int8]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]
    truncated: NDArray[np.int32]
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample (N,)."""
        return np.diff(self.starts)


def encode(samples: Samples, encoder: TextEncoder, labels: Labels | None = None) -> Corpus:
    """Encode samples.

    Args:
        labels: the classes that the samples may have; without, they are left unlabelled. With them, a sample
            without a label, or with one that is none of these, is a bad line.

    Raises:
        SpecError: listing bad lines, unless they are skipped; if no sample is left.
    """
    kept, numbers = _classes(samples, labels)
    found = list(encoder.encode_many([(sample.text_a, sample.text_b) for sample in kept]))
    return Corpus(
        ids=np.concatenate([one.ids for one in found]).astype(np.int32),
        segment_ids=np.concatenate([one.segment_ids for one in found]).astype(np.int8),
        starts=np.cumsum([0, *(len(one.ids) for one in found)]),
        truncated=np.array([one.truncated for one in found], np.int32),
        labels=np.array(numbers, np.int64),
        numbers=np.array([sample.number for sample in kept], np.int64),
        files=samples.files,
    )


def _classes(samples: Samples, labels: Labels | None) -> tuple[list[Sample], list[int]]:
    """Return the samples that have a class, and its number."""
    if labels is None:
        return list(samples.samples), [UNLABELLED] * len(samples.samples)
    kept, numbers = [], []
    known = {name: number for number, name in enumerate(labels.names)}
    for sample in samples.samples:
        number = known.get(sample.label or "")
        if number is None:
            names = ", ".join(map(repr, labels.names[:20]))
            said = f"label is {sample.label!r} but must be one of {names}"
            said = "has no label" if sample.label is None else said
            samples.complaints.problems.append(f"{samples.where(sample.number)}: {said}")
        else:
            kept.append(sample)
            numbers.append(number)
    samples.complaints.settle()
    if not kept:
        raise SpecError([f"{', '.join(samples.files)}: no sample is left", *samples.complaints.listed()])
    return kept, numbers
