"""Texts and arrays that somebody gives to a model, as batches of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from concord.spec.batch import Batch, completed, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located
from concord.spec.files import read_arrays
from concord.spec.tensors import inputs
from concord.training.data.batching import batches
from concord.training.data.corpus import encode
from concord.training.data.labels import Labels
from concord.training.data.samples import FIELDS, USUAL, Samples, first_line_of, layout_of, read

if TYPE_CHECKING:
    from concord.training.data.encoder import TextEncoder

ALIASES = {"token_type_ids": "segment_ids", "attention_mask": "key_mask"}
"""What libraries call inputs, to what they are called here."""

MOST_SHOWN = 5
"""Truncated texts that are named one by one."""


class GivenBatches(NamedTuple):
    """Batches of a model.

    Attributes:
        batches: by the number of the first sample, from 1.
        remarks: what was changed or left out, a line each.
    """

    batches: dict[str, Batch]
    remarks: list[str]


def legible(text: str) -> str:
    """Return what a folder can be called, from what a file is called."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "checkpoint"


def of_arrays(path: Path, config: EncoderConfig, part: str, size: int | None) -> GivenBatches:
    """Return the arrays of a file as batches.

    Args:
        path: safetensors with ``input_ids`` (B, T), and other inputs of the part by name.
        size: samples of a batch; by default all.

    Raises:
        SpecError: listing what does not fit.
    """
    remarks = []
    with located(str(path)):
        named = _named(read_arrays(path), config)
        if "segment_ids" in inputs(config, part) and "segment_ids" not in named and "input_ids" in named:
            named["segment_ids"] = np.zeros_like(named["input_ids"])
            remarks.append("segment_ids are 0, since nobody gave any")
        validate_batch(config, completed(config, from_arrays(named), part), part)
    count = len(named["input_ids"])
    size, stem = size or count, legible(path.stem)
    batches = {
        stem if size >= count else f"{stem}-{start + 1}": from_arrays(
            {name: array[start : start + size] for name, array in named.items()}
        )
        for start in range(0, count, size)
    }
    return GivenBatches(batches, remarks)


def _named(found: Mapping[str, NDArray[Any]], config: EncoderConfig) -> dict[str, NDArray[Any]]:
    """Return arrays by the names of the specification; a mask must say what padding says.

    Raises:
        SpecError: if a name is given twice, or a mask hides something else.
    """
    named: dict[str, NDArray[Any]] = {}
    for key, array in found.items():
        name = ALIASES.get(key, key)
        if name in named:
            raise SpecError(f"{key!r} is there beside {name!r}: both say the same")
        named[name] = array
    mask, ids = named.pop("key_mask", None), named.get("input_ids")
    if not config.num_segments and "segment_ids" in named and not named["segment_ids"].any():
        del named["segment_ids"]  # of a model without segments, libraries give zeros all the same
    if mask is None or ids is None:
        return named
    if mask.shape != ids.shape:
        raise SpecError(f"the mask has shape {mask.shape} but must be {ids.shape}, as 'input_ids' is")
    apart = np.argwhere(mask.astype(bool) != (ids != config.pad_id))
    if len(apart):
        at = tuple(int(i) for i in apart[0])
        raise SpecError(
            f"the mask is {mask[at].item()} at {at}, where 'input_ids' is {ids[at]}, but must hide "
            f"{config.pad_id} ('pad_id') and nothing else [clause=MSK-1]"
        )
    return named


def of_texts(
    path: Path,
    encoder: TextEncoder,
    config: EncoderConfig,
    part: str,
    labels: Sequence[str] | None,
    size: int,
) -> GivenBatches:
    """Return the texts of a file as batches, filled up with padding.

    Args:
        encoder: the model's own tokenizer.
        labels: the names of the model's classes; None: they are numbers.
        size: samples of a batch.

    Raises:
        SpecError: listing lines that are no texts, or whose ids or labels the model does not have.
    """
    samples = read_texts(path)
    labelled = part == "model" and all(sample.label is not None for sample in samples.samples)
    known = Labels(tuple(labels or map(str, range(max(2, config.num_classes)))))
    corpus, found = encode(samples, encoder, known if labelled else None), dict[str, Batch]()
    with located(str(path)):
        made = list(batches(corpus, config, size))
    for start, (_, batch) in zip(range(0, len(corpus), size), made, strict=True):
        found[f"{legible(path.stem)}-{start + 1}"] = batch if labelled else replace(batch, labels=None)
    cut = [
        f"{samples.where(number)}: {more} tokens were cut off: {length} are as many as it may have"
        for number, more, length in zip(
            corpus.numbers.tolist(), corpus.truncated.tolist(), corpus.lengths.tolist(), strict=True
        )
        if more
    ]
    more = [f"and {len(cut) - MOST_SHOWN} more texts were cut off"] if len(cut) > MOST_SHOWN else []
    return GivenBatches(found, cut[:MOST_SHOWN] + more)


def read_texts(path: Path) -> Samples:
    """Read texts: one on each line, or two with a tab between them; a header or JSON Lines may say more.

    Raises:
        SpecError: for what cannot be read, listing bad lines.
    """
    layout, columns = layout_of(path), None
    if layout == "tsv":
        first = first_line_of(path).split("\t")
        header = "text_a" in {USUAL.get(value, value) for value in first}
        columns = FIELDS[:2] if len(first) == 2 and not header else None
    return read(path, columns=columns)
