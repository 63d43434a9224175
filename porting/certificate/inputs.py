"""What the target is run on: sentences, and inputs that ports get wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from concord.porting.certificate.certificate import Rows
from concord.spec.batch import Batch, completed, example_batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError
from concord.spec.tensors import POOLED, inputs

LONGEST = 512
"""Tokens of the longest input of a model that has room for more than twice as many."""

SENTENCES, LONG = "sentences", "longest input"

DRAWN = {
    SENTENCES: (4, 11, "ragged"),
    "awkward rows": (5, 7, "ragged"),
    "padding first": (5, 7, "left"),
    "one token": (1, 1, "none"),
    LONG: (1, LONGEST, "none"),
}
"""Samples and tokens of each input, and which rows it has (:data:`concord.spec.batch.PADDINGS`)."""


@dataclass(frozen=True)
class Inputs:
    """What a target is run on.

    Attributes:
        batches: by name; the first are the sentences, on which gradients and the optimizer step are judged
            too.
        left_out: what cannot be tried with this model, and why.
        tried: what each name means.
    """

    batches: dict[str, Batch] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tried: dict[str, str] = field(default_factory=dict)


def inputs_of(config: EncoderConfig, part: str, texts: Rows | None, seed: int, quick: bool = False) -> Inputs:
    """Return what a model is run on.

    Args:
        texts: of the user; None: all is drawn.
        seed: of what is drawn.
        quick: whether the first is enough.
    """
    found, room = Inputs(), config.max_positions - config.position_start
    flat = part in POOLED and config.pooling == "flatten"
    for name, (samples, tokens, padding) in list(DRAWN.items())[: 1 if quick else None]:
        longest = room if name == LONG and room <= 2 * LONGEST else tokens
        width = config.max_positions if flat else min(longest, room)
        try:
            if name == SENTENCES and texts:
                batch, meaning = _of_texts(config, part, texts, flat), f"{len(texts)} texts that were given"
            else:
                batch = example_batch(config, samples, width, seed, padding, part)
                meaning = f"{samples} of {width} tokens, drawn at random, padding {padding}"
            if name == "awkward rows" and batch.input_ids is not None:
                batch, meaning = _with_ends(config, batch), f"{meaning}; the first has the first and last id"
            found.batches[name], found.tried[name] = batch, meaning
        except BatchError as error:
            found.left_out[name] = error.problems[0]
    return found


def _with_ends(config: EncoderConfig, batch: Batch) -> Batch:
    """Return a batch whose first sample has the first id and the last in turns, but for that of padding."""
    words = np.setdiff1d(range(config.vocab_size), config.pad_id)
    ids = batch.required("input_ids").copy()
    ids[0] = np.resize(words[[0, -1]], ids.shape[1])
    return replace(batch, input_ids=ids)


def _of_texts(config: EncoderConfig, part: str, texts: Rows, flat: bool) -> Batch:
    """Return texts as a batch that ends in padding, with labels or a cotangent.

    Raises:
        BatchError: if the model does not take it.
    """
    width = max([config.max_positions] * flat + [len(ids) for ids, _ in texts])
    ids, segments = (np.full((len(texts), width), fill, np.int64) for fill in (config.pad_id, 0))
    for row, (of_text, in_segments) in enumerate(texts):
        ids[row, : len(of_text)], segments[row, : len(of_text)] = of_text, in_segments
    arrays = {"input_ids": ids, "segment_ids": segments}
    takes = inputs(config, part)
    given = from_arrays({name: array for name, array in arrays.items() if name in takes})
    batch = completed(config, given, part, drawn=True)
    validate_batch(config, batch, part)
    return batch
