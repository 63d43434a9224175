"""Encoded samples side by side, and where they are kept so that they are not encoded twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from concord.spec.errors import SpecError
from concord.spec.files import read_described, write_bytes
from concord.training.data.encoder import TextEncoder
from concord.training.data.labels import Labels
from concord.training.data.samples import Sample, Samples, place

FORMAT = "concord.corpus/1"

UNLABELLED = -1
"""The label of a sample that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Encoded samples (N samples of together L tokens).

    Attributes:
        ids: int32 (L,), the tokens of all samples, one sample after the other.
        starts: int64 (N + 1,), where each begins; the last is L.
        borders: int32 (N,), how many tokens of each sample belong to its first text.
        labels: int64 (N,), the numbers of the classes; :data:`UNLABELLED` for none.
        numbers: int64 (N,), of the samples: :attr:`concord.training.data.samples.Sample.number`.
        truncated: int32 (N,), how many tokens of each sample were cut off.
        segments: the segment ids of the first text, of the second, and of padding.
        files: the names of the files that the samples come from.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    borders: NDArray[np.int32]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int64]
    truncated: NDArray[np.int32]
    segments: tuple[int, int, int]
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample (N,)."""
        return np.diff(self.starts)

    @property
    def labelled(self) -> bool:
        """Whether every sample has a label."""
        return bool((self.labels != UNLABELLED).all())

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Return the ids of a sample."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def segment_ids(self, index: int) -> NDArray[np.int64]:
        """Return the segment ids of a sample."""
        return np.where(np.arange(self.lengths[index]) < self.borders[index], *self.segments[:2])

    def where(self, index: int) -> str:
        """Return the file and line that a sample comes from."""
        return place(self.files, int(self.numbers[index]))

    def select(self, indices: NDArray[np.integer]) -> Corpus:
        """Return the corpus of some samples, in the order of their indices."""
        lengths = self.lengths[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([self.tokens(int(i)) for i in indices]) if len(indices) else self.ids[:0]
        taken = {name: getattr(self, name)[indices] for name in ("borders", "labels", "numbers", "truncated")}
        return Corpus(ids=ids, starts=starts, segments=self.segments, files=self.files, **taken)


def encode(
    samples: Samples,
    encoder: TextEncoder,
    labels: Labels | None = None,
    cache: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Encode samples, or take what was encoded before from the same content in the same way.

    Args:
        labels: the classes that the samples may have; without, they are left unlabelled. With them, a sample without a label, or with
            one that is none of these, is a bad line.
        cache: a folder in which encoded samples are kept.
        tell: is told what was found wrong with a kept file, and what could not be kept.

    Raises:
        SpecError: listing bad lines, unless they are skipped; if no sample is left.
    """
    kept, numbers = _classes(samples, labels)
    made = _Tokens.kept(cache, _key(samples, encoder, kept), len(kept), tell) if cache else None
    if made is None:
        made = _Tokens.of(kept, encoder)
        if cache:
            made.keep(cache, _key(samples, encoder, kept), tell)
    where = np.array([sample.number for sample in kept], np.int64)
    return Corpus(
        **made.arrays,
        labels=np.array(numbers, np.int64),
        numbers=where,
        segments=encoder.text.segments,
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
            names = ", ".join(map(repr, labels.names[:10])) + (", …" if len(labels.names) > 10 else "")
            samples.complaints.add(
                samples.where(sample.number),
                "has no label"
                if sample.label is None
                else f"label is {sample.label!r} but must be one of {names}",
            )
        else:
            kept.append(sample)
            numbers.append(number)
    samples.complaints.settle()
    if not kept:
        raise SpecError([f"{', '.join(samples.files)}: no sample is left", *samples.complaints.listed()])
    return kept, numbers


def cache_folder(given: Path | None = None) -> Path:
    """Return the folder in which encoded samples are kept: as given, else in the user's cache folder."""
    if given is not None:
        return given
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "concord"


def _key(samples: Samples, encoder: TextEncoder, kept: list[Sample]) -> str:
    numbers = np.array([sample.number for sample in kept], np.int64)
    return hashlib.sha256(
        b"".join([FORMAT.encode(), samples.digest.encode(), encoder.digest().encode(), numbers.tobytes()])
    ).hexdigest()


@dataclass(frozen=True)
class _Tokens:
    """What costs time: the arrays ``ids``, ``starts``, ``borders`` and ``truncated`` of a corpus."""

    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, samples: list[Sample], encoder: TextEncoder) -> _Tokens:
        ids, borders, truncated = [], [], []
        for tokens, border, cut in encoder.encode_many(
            [(sample.text_a, sample.text_b) for sample in samples]
        ):
            ids.append(tokens.astype(np.int32))
            borders.append(border)
            truncated.append(cut)
        starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])]).astype(np.int64)
        return cls(
            {
                "ids": np.concatenate(ids),
                "starts": starts,
                "borders": np.array(borders, np.int32),
                "truncated": np.array(truncated, np.int32),
            }
        )

    @classmethod
    def kept(cls, cache: Path, key: str, count: int, tell: Callable[[str], None]) -> _Tokens | None:
        """Return what was kept; None if nothing was, or is not whole any more."""
        path = _path(cache, key)
        if not path.exists():
            return None
        try:
            about, arrays = read_described(path)
            found = cls(arrays)
            if (
                about.get("key") != key
                or about.get("digest") != found.digest()
                or len(arrays.get("borders", ())) != count
            ):
                raise SpecError(f"{path}: is not what was written")
        except SpecError as error:
            tell(f"{error.problems[0]}; encoding anew")
            return None
        return found

    def keep(self, cache: Path, key: str, tell: Callable[[str], None]) -> None:
        path = _path(cache, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(
                path, save(self.arrays, metadata={"format": FORMAT, "key": key, "digest": self.digest()})
            )
        except (OSError, SpecError) as error:
            tell(f"{path}: not kept: {error}")

    def digest(self) -> str:
        summed = hashlib.sha256()
        for name in sorted(self.arrays):
            array = self.arrays[name]
            summed.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
        return summed.hexdigest()


def _path(cache: Path, key: str) -> Path:
    return cache / "corpora" / f"{key}.safetensors"
