"""What the target is run on: sentences, and inputs that ports get wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.porting.certificate.certificate import Rows
from concord.spec.batch import Batch, example_batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError
from concord.spec.tensors import OF_IDS, POOLED, axis_sizes, inputs, resolve

LENGTHS = (8, 5, 11, 3)
"""Real tokens of the sentences that are taken where nobody gave any."""

NARROW = 7
"""Tokens of the awkward rows."""

LONGEST = 512
"""Tokens of the longest input that is tried; a model that has room for more is tried with as many."""

SENTENCES, AWKWARD, SINGLE, LONG = "sentences", "awkward rows", "one token", "longest input"


@dataclass(frozen=True)
class Inputs:
    """What a target is run on.

    Attributes:
        batches: by name; the first are the sentences, on which gradients and the optimizer step are judged
            too.
        left_out: what cannot be tried with this model, and why.
        tried: what each name means.
    """

    batches: dict[str, Batch]
    left_out: dict[str, str]
    tried: dict[str, str]


def of(config: EncoderConfig, part: str, texts: Rows | None, seed: int, quick: bool = False) -> Inputs:
    """Return what a model is run on.

    Args:
        texts: of the user; None: ids are drawn in their place.
        seed: of the ids that are drawn.
        quick: whether the first is enough.
    """
    if part not in OF_IDS:
        drawn = {
            padding: example_batch(config, batch=5, tokens=NARROW, seed=seed, padding=padding, part=part)
            for padding in ("ragged", "left")
        }
        return Inputs(
            drawn,
            {SENTENCES: f"the part {part} takes no ids"},
            dict.fromkeys(drawn, "given tensors, with rows of every awkward kind"),
        )
    batches: dict[str, Batch] = {}
    left_out: dict[str, str] = {}
    tried: dict[str, str] = {}
    cases = _cases(config, texts, np.random.default_rng(seed))
    for name, meaning, rows in islice(cases, 1 if quick else None):
        try:
            batches[name] = batch_of(config, part, rows, seed)
            tried[name] = meaning
        except BatchError as error:
            left_out[name] = error.problems[0]
    return Inputs(batches, left_out, tried)


def _cases(
    config: EncoderConfig, texts: Rows | None, generator: np.random.Generator
) -> Iterator[tuple[str, str, Rows]]:
    """Yield each input's name, what it means, and its rows."""
    room = config.max_positions - config.position_start
    words = [number for number in (0, config.vocab_size - 1) if number != config.pad_id]

    def drawn(length: int) -> list[int]:
        found = generator.integers(0, max(config.vocab_size - 1, 1), length)
        return [
            int(number) + (int(number) >= config.pad_id) if config.vocab_size > 1 else 0 for number in found
        ]

    def plain(ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return ids, [0] * len(ids)

    if texts:
        yield SENTENCES, f"{len(texts)} texts that were given", texts
    else:
        pairs = [drawn(min(length, room)) for length in LENGTHS]
        segments = [
            [
                int(2 * place >= len(ids)) if config.num_segments > 1 and number % 2 == 0 else 0
                for place in range(len(ids))
            ]
            for number, ids in enumerate(pairs)
        ]
        yield (
            SENTENCES,
            (
                f"ids drawn at random, {', '.join(map(str, LENGTHS))} of them in a row, every other row of "
                "two segments"
            ),
            list(zip(pairs, segments, strict=True)),
        )
    width, pad = min(NARROW, room), config.pad_id
    full, word = drawn(width), drawn(1)[0]
    rows = [
        [word],
        [word] * width,
        [*full[:1], pad, *full[2:]][:width],
        [pad, *full[1:]][:width],
        [words[place % len(words)] for place in range(width)] if words else full,
        [pad] * width,
    ]
    yield (
        AWKWARD,
        (
            "one token and padding, a repeated token, padding inside, padding first, the first and last id, "
            "nothing but padding"
        ),
        [plain(ids) for ids in rows],
    )
    yield SINGLE, "one row of one token", [plain([word])]
    longest = min(room, max(LONGEST, room if room <= 2 * LONGEST else LONGEST))
    yield (
        LONG,
        f"one row of {longest} tokens{'' if longest == room else f'; the model has room for {room}'}",
        [plain(drawn(longest))],
    )


def batch_of(config: EncoderConfig, part: str, rows: Rows, seed: int) -> Batch:
    """Return rows as a batch that ends in padding, with labels or a cotangent.

    Raises:
        BatchError: if the model does not take it.
    """
    flat = part in POOLED and config.pooling == "flatten"
    width = config.max_positions if flat else max(len(ids) for ids, _ in rows)
    wanted = inputs(config, part)
    ids, segments = (np.full((len(rows), width), fill, np.int64) for fill in (config.pad_id, 0))
    for row, (of_text, in_segments) in enumerate(rows):
        if len(of_text) > width:
            raise BatchError(f"a row has {len(of_text)} tokens but the model has room for {width}")
        ids[row, : len(of_text)], segments[row, : len(of_text)] = of_text, in_segments
    classes = max(config.num_classes, 2)
    labels = np.arange(len(rows)) % classes
    labels = np.where(labels == config.ignore_label, (labels + 1) % classes, labels)
    made: dict[str, NDArray[Any]] = {"input_ids": ids, "segment_ids": segments, "labels": labels}
    arrays = {name: array for name, array in made.items() if name in wanted}
    if "cotangent" in wanted:
        shape = resolve(wanted["cotangent"].shape, axis_sizes(config, batch=len(rows), tokens=width))
        drawn = np.random.default_rng([seed, len(rows)]).standard_normal(shape)
        arrays["cotangent"] = drawn.astype(np.float32).astype(np.float64)
    batch = from_arrays(arrays)
    validate_batch(config, batch, part)
    return batch
