"""Batches of a corpus, by seed and epoch alone, so that training goes on where it stopped."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import refuse
from concord.spec.training.dropout import philox
from concord.training.data.corpus import UNLABELLED, Corpus

STREAM = zlib.crc32(b"order of samples")
"""The last word of the counters by which samples are ordered: dropout has other words there (SPEC DRP-3)."""

BUCKETS = 64
"""Batches whose samples are sorted by length together: those of one are alike, and epochs differ."""


def batches(
    corpus: Corpus,
    config: EncoderConfig,
    batch_size: int,
    seed: int | None = None,
    epoch: int = 0,
    bucketed: bool = False,
    multiple: int = 1,
    together: int = 1,
) -> Iterator[tuple[NDArray[np.int64], Batch]]:
    """Yield the samples of an epoch in batches, each sample once; the last batch may be short.

    Args:
        config: says which inputs the model takes, and what padding is (SPEC INP-1, MSK-1, EMB-5).
        batch_size: samples in a batch.
        seed: below 2^64; the order follows from it and the epoch. None: as in the corpus.
        epoch: counted from 0.
        bucketed: whether samples of like length come together, so that there is less padding.
        multiple: of what number a batch's tokens are one: those of its longest sample are rounded up to it,
            as far as the model has positions. Frameworks that compile do so for each width. A ``flatten``
            head has ``max_positions`` tokens (SPEC INP-5).
        together: so many batches that follow each other have the same width: those of a step, which is
            compiled for all of them.

    Yields:
        Numbers of the samples (B,), and what the model is given. A sample without a label has the first
        class that counts in the loss.

    Raises:
        SpecError: if the samples do not fit the model, before the first batch.
    """
    refuse(_unfit(corpus, config))
    planned = _plan(corpus.lengths, batch_size, seed, epoch, bucketed)
    steps = (planned[start : start + together] for start in range(0, len(planned), together))
    return (
        _batch(corpus, config, chosen, width)
        for step in steps
        for width in [_width(corpus.lengths, config, step, multiple)]
        for chosen in step
    )


def order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers below ``count`` in an order by seed, epoch and Philox (SPEC DRP-3)."""
    index = np.arange(count, dtype=np.uint32)
    fixed = (np.full_like(index, word) for word in (0, epoch, STREAM))
    high, low, *_ = philox((index, *fixed), (seed & 0xFFFFFFFF, seed >> 32))  # type: ignore[arg-type]
    return np.lexsort((low, high))


def _plan(
    lengths: NDArray[np.int64], batch_size: int, seed: int | None, epoch: int, bucketed: bool
) -> list[NDArray[np.int64]]:
    """Return the indices of the samples of each batch."""
    indices = np.arange(len(lengths)) if seed is None else order(len(lengths), seed, epoch)
    if bucketed:
        some = range(0, len(indices), batch_size * BUCKETS)
        indices = np.concatenate(
            [
                found[np.argsort(-lengths[found], kind="stable")]
                for start in some
                for found in [indices[start : start + batch_size * BUCKETS]]
            ]
        )
    planned = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    if not bucketed or seed is None:
        return planned
    whole = len(lengths) // batch_size  # a short batch stays the last
    return [planned[number] for number in order(whole, seed, epoch)] + planned[whole:]


def _width(
    lengths: NDArray[np.int64], config: EncoderConfig, step: list[NDArray[np.int64]], multiple: int
) -> int:
    """Return how many tokens the batches of a step have."""
    if config.pooling == "flatten":
        return config.max_positions
    longest = max(int(lengths[chosen].max()) for chosen in step)
    return min(-(-longest // multiple) * multiple, config.max_positions - config.position_start)


def _batch(
    corpus: Corpus, config: EncoderConfig, chosen: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], Batch]:
    rows = [slice(*corpus.starts[place : place + 2]) for place in chosen]
    labels = corpus.labels[chosen]
    counted = 1 if config.ignore_label == 0 else 0
    return corpus.numbers[chosen], padded(
        config,
        [(corpus.ids[row], corpus.segment_ids[row]) for row in rows],
        width,
        np.where(labels == UNLABELLED, counted, labels),
    )


def padded(
    config: EncoderConfig,
    rows: Sequence[tuple[NDArray[np.integer], NDArray[np.integer]]],
    width: int,
    labels: NDArray[np.int64] | None = None,
) -> Batch:
    """Return the ids and segments of texts (T,) as a batch, filled up with padding (B, width)."""
    ids = np.full((len(rows), width), config.pad_id, np.int64)
    segments = np.zeros_like(ids)
    for row, (some, parts) in enumerate(rows):
        ids[row, : len(some)], segments[row, : len(parts)] = some, parts
    return Batch(input_ids=ids, segment_ids=segments if config.num_segments else None, labels=labels)


def _unfit(corpus: Corpus, config: EncoderConfig) -> list[str]:
    """Return what keeps a model from taking the samples of a corpus."""
    room, classes = config.max_positions - config.position_start, max(2, config.num_classes)
    longest, widest, segment, label = (
        int(array.max(initial=0)) for array in (corpus.lengths, corpus.ids, corpus.segment_ids, corpus.labels)
    )
    problems = {
        f"a sample has {longest} tokens but must have at most {room} [clause=INP-2]": longest > room,
        f"a token has id {widest} but must be below {config.vocab_size}, "
        "which is 'vocab_size' [clause=INP-1]": widest >= config.vocab_size,
        f"a segment is {segment} but must be below {config.num_segments}, "
        "which is 'num_segments' [clause=EMB-5]": 0 < config.num_segments <= segment,
        f"a label is {label} but must be below {classes} [clause=INP-3]": label >= classes,
    }
    return [problem for problem, wrong in problems.items() if wrong]
