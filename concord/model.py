"""A model of one's own: a checkpoint of any format, and texts or inputs, in place of standard cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from concord.conformance.campaign import Job
from concord.options import OptionGroup, outside
from concord.spec.batch import Batch, completed, example_batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, optional, refuse, unknowns
from concord.spec.parameters import Weights, parameters
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting import Checkpoint
    from concord.training.data.given import GivenBatches
    from concord.training.prediction import TextModel

BATCH = 8
"""Texts of a case, unless it is said otherwise."""

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
        checkpoint ([CHECKPOINT]): In place of standard cases: a checkpoint of any format, or a
            run, of which the best.
        inputs: Arrays to run it on, as safetensors: input_ids, and segment_ids, labels, cotangent
            where you have them.
        batch: Samples in a batch. Default: 8 texts, or all samples of --inputs.
        max_tokens: With --texts: tokens that a text may have; what is longer is cut off. Default:
            as many as the model takes.
    """

    panel = "A model of your own"

    checkpoint: Path | None = None
    form: str = "auto"
    table: Path | None = None
    texts: Path | None = None
    inputs: Path | None = None
    batch: int | None = None
    max_tokens: int | None = None

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
        problems += outside(("batch", self.batch, 1, inf))
        if self.max_tokens is not None and self.texts is None:
            problems.append("--max-tokens is given but --texts is not: it is about texts")
        refuse(problems)
        return there

    def load(self, part: str = "model", gradients: bool = True) -> Own:
        """Read the checkpoint, and what it is to be run on.

        Args:
            part: one of :data:`PARTS`; ``"model"`` is what the checkpoint holds.
            gradients: whether any are wanted: then labels or cotangents that nobody gave are drawn.

        Raises:
            SpecError: listing what is wrong with the checkpoint, or with texts or inputs.
        """
        from concord import porting
        from concord.porting.folder import name_of
        from concord.training.data import given

        self.check()
        assert self.checkpoint is not None
        found = porting.read(self.checkpoint, self.form, self.table)
        remarks = [*self._of_checkpoint(found)]
        part = _part(found, part, remarks)
        config, name = found.config, given.legible(name_of(self.checkpoint))
        if self.texts is not None:
            batches = self._of_texts(self.texts, found, part)
        elif self.inputs is not None:
            batches = given.of_arrays(self.inputs, config, part, self.batch)
        else:
            drawn = "neither --texts nor --inputs is given: ids are drawn, with rows of every awkward kind"
            batches = given.GivenBatches({"drawn": _drawn(config, part)}, [drawn])
        made: set[str] = set()
        cases = {}
        for case, batch in batches.batches.items():
            cases[f"{name}-{case}"] = whole = completed(config, batch, part, drawn=gradients)
            validate_batch(config, whole, part)
            made |= whole.arrays().keys() - batch.arrays().keys()
        remarks += batches.remarks
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

    def _of_texts(self, texts: Path, found: Checkpoint, part: str) -> GivenBatches:
        from concord.porting.folder import folder_of

        with optional("--texts", "training"):
            from concord.training.data import given
            from concord.training.data.ready import encoder_of

        assert self.checkpoint is not None
        with located(str(self.checkpoint)):
            encoder = encoder_of(folder_of(self.checkpoint), found.files, found.config, self.max_tokens)
        return given.of_texts(texts, encoder, found.config, part, found.labels, self.batch or BATCH)


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


def reader(path: Path, spelled: bool, max_tokens: int | None = None) -> TextModel:
    """Return the model of a checkpoint of any format, or a run's best, with its own tokenizer.

    Args:
        spelled: whether a text may spell a mark, as its own library has it; samples of training may not.
        max_tokens: that a text may have; by default as many as the model takes.

    Raises:
        SpecError: if it cannot be read, takes no texts, or has no tokenizer.
    """
    from concord import porting
    from concord.porting.folder import folder_of
    from concord.training.data import Labels
    from concord.training.data.ready import encoder_of
    from concord.training.prediction import TextModel

    found, folder = porting.read(path), folder_of(path)
    if found.part not in PARTS:
        raise SpecError(
            f"{path}: holds the part {found.part!r} but must hold one of {', '.join(PARTS)}: "
            "nothing else takes texts"
        )
    with located(str(path)):
        encoder = encoder_of(folder, found.files, found.config, max_tokens, spelled=spelled)
    labels = Labels(found.labels or tuple(map(str, range(max(found.config.num_classes, 2)))))
    return TextModel(folder, found.config, dict(found.weights()), labels, encoder, found.part)
