"""A model of one's own: a checkpoint of any format, and texts or inputs, in place of standard cases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.campaign import Job
from concord.options import OptionGroup
from concord.spec.batch import Batch, completed, example_batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, refuse, unknowns
from concord.spec.files import read_arrays
from concord.spec.parameters import Weights, parameters
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import inputs
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting import Checkpoint

ALIASES = {"token_type_ids": "segment_ids", "attention_mask": "key_mask"}
"""What libraries call inputs, to what they are called here."""

MOST_SHOWN = 5
"""Truncated texts that are named one by one."""

BATCH = 8
"""Texts of a case."""

TOKENS = 11
"""Of a case that is drawn, where there is room for them."""

PARTS = ("model", "pooled", "encoder")
"""The parts of the model that take ids: a checkpoint can be run as one of them."""

JUDGED = {
    "pooled": "the embedding of each text, from ids to the pooled vector",
    "encoder": "the encoder, from ids to the last layer's output",
}
"""What is judged of a checkpoint without a classifier."""


@dataclass(frozen=True)
class Own:
    """A model of one's own, and what it is run on.

    Attributes:
        name: what results are gathered under.
        part: one of :data:`PARTS`.
        batches: by the name of the case.
        remarks: what is to be said of it, a line each.
    """

    name: str
    config: EncoderConfig
    part: str
    weights: Weights
    batches: Mapping[str, Batch]
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class OwnModel(OptionGroup):
    """A model of one's own, and what it is run on.

    Attributes:
        checkpoint ([CHECKPOINT]): In place of standard cases: a checkpoint of any format.
        inputs: Arrays to run it on, as safetensors: input_ids, and segment_ids, labels, cotangent
            where you have them.
    """

    panel = "A model of your own"

    checkpoint: Path | None = None
    form: str = "auto"
    table: Path | None = None
    texts: Path | None = None
    inputs: Path | None = None

    def check(self, **instead: Any) -> bool:
        """Return whether there is a model of one's own.

        Args:
            instead: values of options that have no meaning beside it.

        Raises:
            SpecError: listing options that exclude each other, or are about what is not given.
        """
        there = self.checkpoint is not None
        about = {"from": self.form != "auto", "table": self.table, "texts": self.texts, "inputs": self.inputs}
        without = "but CHECKPOINT is not: whose weights?"
        why = "beside CHECKPOINT, which takes its place; leave one out" if there else without
        wrong = instead if there else about
        problems = [f"--{name} is given {why}" for name, value in wrong.items() if value]
        problems += ["--texts and --inputs are both given; give either"] * bool(self.texts and self.inputs)
        refuse(problems)
        return there

    def load(self, part: str = "model", gradients: bool = True, size: int = BATCH) -> Own:
        """Read the checkpoint, and what it is to be run on.

        Args:
            part: one of :data:`PARTS`; ``"model"`` is what the checkpoint holds.
            gradients: whether any are wanted: then labels or cotangents that nobody gave are drawn.
            size: texts of a batch.

        Raises:
            SpecError: listing what is wrong with the checkpoint, or with texts or inputs.
        """
        from concord import porting
        from concord.porting.folder import name_of

        self.check()
        assert self.checkpoint is not None
        found = porting.read(self.checkpoint, self.form, self.table)
        remarks = [*self._of_checkpoint(found)]
        part = _part(found, part, remarks)
        config, name = found.config, legible(name_of(self.checkpoint))
        if self.texts is not None:
            batches = self._of_texts(self.texts, found, part, remarks, size)
        elif self.inputs is not None:
            batches = self._of_arrays(self.inputs, config, part, remarks)
        else:
            batches = {"drawn": _drawn(config, part)}
            remarks.append(
                "neither --texts nor --inputs is given: ids are drawn, with rows of every awkward kind"
            )
        made: set[str] = set()
        cases = {}
        for case, batch in batches.items():
            cases[f"{name}-{case}"] = whole = completed(config, batch, part, drawn=gradients)
            with located(str(self.texts or self.inputs or self.checkpoint)):
                validate_batch(config, whole, part)
            made |= whole.arrays().keys() - batch.arrays().keys()
        if gradients and made:
            are = "are" if len(made) > 1 or "labels" in made else "is"
            remarks.append(
                f"{' and '.join(sorted(made))} {are} drawn, since nobody gave any: "
                "gradients are those of the loss that follows"
            )
        known = parameters(config, part)
        weights = {name: array for name, array in found.weights().items() if name in known}
        return Own(name, config, part, weights, cases, remarks)

    def jobs(self, part: str, dtypes: Sequence[str], gradients: bool) -> list[Job]:
        """Return the jobs of the model, and say on standard error what it is.

        Raises:
            SpecError: as :meth:`load`, and for an unknown precision.
        """
        refuse(unknowns("dtype", dtypes, PRECISIONS))
        own = self.load(part, gradients)
        for line in own.remarks:
            Terminal(stderr=True).tell(line)
        about = (own.part, own.config, own.weights)
        return [
            Job(own.name, case, dtype, *about, batch, gradients=gradients)
            for case, batch in own.batches.items()
            for dtype in dtypes
        ]

    def _of_checkpoint(self, found: Checkpoint) -> Iterator[str]:
        """Say what a checkpoint is, and what of it is left out."""
        from concord import porting

        assert self.checkpoint is not None
        how = porting.recognise(self.checkpoint) if self.form == "auto" else None
        count = sum(int(np.prod(tensor.shape)) for tensor in found.tensors.values())
        form = f"{how.format}, since {how.why}" if how else self.form
        yield f"{self.checkpoint}: {form}; {count:,} parameters"
        for entry in found.ledger:
            if entry.status == "ignored":
                yield f"ignored: {entry.foreign}: {entry.reason}"

    def _of_texts(
        self, path: Path, found: Checkpoint, part: str, remarks: list[str], size: int
    ) -> dict[str, Batch]:
        """Return the texts of a file as batches, by the number of the first."""
        from concord.porting.texts import TextEncoder, batch_of, read_texts

        texts = read_texts(path)
        with located(str(self.checkpoint)):
            encoder = TextEncoder(found)
        encoded = encoder.encode(texts)
        labels = [text.label for text in texts if text.label is not None]
        labelled = part == "model" and len(labels) == len(texts)
        names = found.labels or tuple(map(str, range(max(2, found.config.num_classes))))
        refuse(
            [
                f"{path}:{number}: label is {label!r} but must be one of {', '.join(map(repr, names[:20]))}"
                for number, label in enumerate(labels if labelled else [], start=1)
                if label not in names
            ]
        )
        cut = [
            f"{path}:{number}: {text.truncated} tokens were cut off: "
            f"{encoder.max_tokens} are as many as it may have"
            for number, text in enumerate(encoded, start=1)
            if text.truncated
        ]
        more = [f"and {len(cut) - MOST_SHOWN} more texts were cut off"] if len(cut) > MOST_SHOWN else []
        remarks += cut[:MOST_SHOWN] + more
        classes = np.array([names.index(label) for label in labels], np.int64) if labelled else None
        return {
            f"{legible(path.stem)}-{start + 1}": batch_of(
                found.config,
                encoded[start : start + size],
                None if classes is None else classes[start : start + size],
            )
            for start in range(0, len(texts), size)
        }

    def _of_arrays(
        self, path: Path, config: EncoderConfig, part: str, remarks: list[str]
    ) -> dict[str, Batch]:
        """Return the arrays of a file, ``input_ids`` (B, T) and other inputs of the part, as a batch."""
        with located(str(path)):
            named = _named(read_arrays(path), config)
            if "segment_ids" in inputs(config, part) and "segment_ids" not in named and "input_ids" in named:
                named["segment_ids"] = np.zeros_like(named["input_ids"])
                remarks.append("segment_ids are 0, since nobody gave any")
            return {legible(path.stem): from_arrays(named)}


def legible(text: str) -> str:
    """Return what a folder can be called, from what a file is called."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "checkpoint"


def _named(found: Mapping[str, NDArray[Any]], config: EncoderConfig) -> dict[str, NDArray[Any]]:
    """Return arrays by the names of the specification; a mask must say what padding says."""
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


def _part(found: Checkpoint, asked: str, remarks: list[str]) -> str:
    """Return the part that is judged."""
    if asked not in PARTS:
        raise SpecError(f"--part is {asked!r} but must be {' or '.join(PARTS)}: so a checkpoint can be run")
    part = found.part if asked == "model" else asked
    lacking = [name for name in parameters(found.config, part) if name not in found.tensors]
    if lacking:
        raise SpecError(
            f"--part is {asked!r} but the checkpoint is the part {found.part!r}, "
            f"without {', '.join(lacking[:5])}"
        )
    if found.part != "model":
        remarks.append(f"it has no classifier: what is judged is {JUDGED[part]}")
    return part


def _drawn(config: EncoderConfig, part: str) -> Batch:
    room = config.max_positions - config.position_start
    tokens = room if config.pooling == "flatten" else min(TOKENS, room)
    return example_batch(config, batch=5, tokens=tokens, part=part)


def lengths(batch: Batch, config: EncoderConfig) -> list[int]:
    """Return how many tokens each row of a batch has before its padding."""
    ids = batch.required("input_ids")
    found: list[int] = (ids.shape[1] - (ids[:, ::-1] != config.pad_id).argmax(axis=1)).tolist()
    return found
