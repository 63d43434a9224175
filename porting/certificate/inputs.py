"""What the target is run on: sentences, and inputs that ports get wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from concord.porting.certificate.certificate import Rows
from concord.spec.batch import Batch, completed, example_batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError
from concord.spec.tensors import OF_IDS, POOLED, inputs

LENGTHS = (8, 5, 11, 3)
"""Real tokens of the sentences that are taken where nobody gave any."""

NARROW = 7
"""Tokens of the awkward rows."""

LONGEST = 512
"""Tokens of the longest input of a model that has room for more than twice as many."""

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
    for name, meaning, rows in islice(_cases(config, texts, seed), 1 if quick else None):
        try:
            batches[name] = _batch(config, part, rows)
            tried[name] = meaning
        except BatchError as error:
            left_out[name] = error.problems[0]
    return Inputs(batches, left_out, tried)


def _cases(config: EncoderConfig, texts: Rows | None, seed: int) -> Iterator[tuple[str, str, Rows]]:
    """Yield each input's name, what it means, and its rows."""
    room, pad = config.max_positions - config.position_start, config.pad_id
    words = np.setdiff1d(range(config.vocab_size), pad).tolist() or [0]
    generator = np.random.default_rng(seed)

    def drawn(length: int) -> list[int]:
        return [int(word) for word in generator.choice(words, length)]

    def plain(*rows: Sequence[int]) -> Rows:
        return [(ids, [0] * len(ids)) for ids in rows]

    if texts:
        yield SENTENCES, f"{len(texts)} texts that were given", texts
    else:
        rows = [(ids, [0] * len(ids)) for ids in (drawn(min(length, room)) for length in LENGTHS)]
        for ids, segments in rows[::2] if config.num_segments > 1 else ():
            segments[len(ids) - len(ids) // 2 :] = [1] * (len(ids) // 2)
        lengths = ", ".join(map(str, LENGTHS))
        meaning = f"ids drawn at random, {lengths} of them in a row, every other row of two segments"
        yield SENTENCES, meaning, rows
    width = min(NARROW, room)
    full = drawn(width)
    yield (
        AWKWARD,
        "one token and padding, a repeated token, padding inside, padding first, the first and last id, "
        "nothing but padding",
        plain(
            full[:1],
            full[:1] * width,
            [*full[:1], pad, *full[2:]][:width],
            [pad, *full[1:]],
            [words[0], words[-1]] * (width // 2),
            [pad] * width,
        ),
    )
    yield SINGLE, "one row of one token", plain(full[:1])
    longest = room if room <= 2 * LONGEST else LONGEST
    more = "" if longest == room else f"; the model has room for {room}"
    yield LONG, f"one row of {longest} tokens{more}", plain(drawn(longest))


def _batch(config: EncoderConfig, part: str, rows: Rows) -> Batch:
    """Return rows as a batch that ends in padding, with labels or a cotangent.

    Raises:
        BatchError: if the model does not take it.
    """
    flat = part in POOLED and config.pooling == "flatten"
    width = max([config.max_positions] * flat + [len(ids) for ids, _ in rows])
    ids, segments = (np.full((len(rows), width), fill, np.int64) for fill in (config.pad_id, 0))
    for row, (of_text, in_segments) in enumerate(rows):
        ids[row, : len(of_text)], segments[row, : len(of_text)] = of_text, in_segments
    arrays = {"input_ids": ids, "segment_ids": segments}
    takes = inputs(config, part)
    given = from_arrays({name: array for name, array in arrays.items() if name in takes})
    batch = completed(config, given, part, drawn=True)
    validate_batch(config, batch, part)
    return batch
