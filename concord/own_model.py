"""The user's checkpoint instead of standard cases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.run.campaign import Job
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

# Libraries' names of inputs.
ALIASES = {"token_type_ids": "segment_ids", "attention_mask": "key_mask"}

MOST_SHOWN = 5  # maximum truncated texts to list one by one

TEXTS = 8  # in a case

TOKENS = 11  # in random texts, if there is room

# The parts that take ids, which a checkpoint can run as.
PARTS = ("model", "pooled", "encoder")

JUDGED = {  # for a checkpoint without a classifier
    "pooled": "the embedding of each text, from ids to the pooled vector",
    "encoder": "the encoder, from ids to the last layer's output",
}


@dataclass(frozen=True)
class Own:
    """A part of a checkpoint with its inputs, ready for jobs."""

    name: str  # name of the group of results
    config: EncoderConfig
    part: str  # one of PARTS
    weights: Weights
    batches: Mapping[str, Batch]  # by the name of the case
    remarks: list[str]  # for the user


@dataclass(frozen=True)
class OwnModel(OptionGroup):
    """The user's checkpoint, and its inputs.

    Attributes:
        checkpoint ([CHECKPOINT]): A checkpoint in any format, in place of the standard cases.
        inputs: Arrays to run the model on, as safetensors: input_ids, and segment_ids, labels and
            cotangent if you have them.
    """

    panel = "A model of your own"

    checkpoint: Path | None = None
    form: str = "auto"
    table: Path | None = None
    texts: Path | None = None
    inputs: Path | None = None

    def check(self, **instead: Any) -> bool:
        """Whether there is a checkpoint; refuses options that exclude each other or need one."""
        wrong, why = instead, "with CHECKPOINT, which replaces it; leave one out"
        if self.checkpoint is None:
            why = "but CHECKPOINT, which must provide the weights, is not"
            form = None if self.form == "auto" else self.form
            wrong = {"from": form, "table": self.table, "texts": self.texts, "inputs": self.inputs}
        problems = [f"--{name} is given {why}" for name, value in wrong.items() if value]
        problems += ["--texts and --inputs are both given; give only one"] * bool(self.texts and self.inputs)
        refuse(problems)
        return self.checkpoint is not None

    def load(self, part: str = "model", gradients: bool = True, size: int = TEXTS) -> Own:
        """Read the checkpoint and its inputs.

        Args:
            part: one of :data:`PARTS`; ``"model"`` means all that the checkpoint contains.
            gradients: whether to generate missing labels or cotangents.
            size: texts in a batch.
        """
        from concord import porting
        from concord.porting.folder import name_of

        self.check()
        assert self.checkpoint is not None
        checkpoint = porting.read(self.checkpoint, self.form, self.table)
        remarks = self._describe(checkpoint)
        part = _part(checkpoint, part, remarks)
        config, name = checkpoint.config, file_name(name_of(self.checkpoint))
        if self.texts is not None:
            batches = self._batch_texts(self.texts, checkpoint, part, remarks, size)
        elif self.inputs is not None:
            batches = {file_name(self.inputs.stem): _read_batch(self.inputs, config, part, remarks)}
        else:
            batches = {"drawn": _draw_batch(config, part)}
            remarks.append(
                "neither --texts nor --inputs is given: ids are random, with rows for every edge case"
            )
        drawn, cases = set[str](), dict[str, Batch]()
        for case, batch in batches.items():
            cases[f"{name}-{case}"] = full_batch = completed(config, batch, part, drawn=gradients)
            with located(str(self.texts or self.inputs or self.checkpoint)):
                validate_batch(config, full_batch, part)
            drawn |= full_batch.arrays().keys() - batch.arrays().keys()
        if gradients and drawn:
            verb = "are" if len(drawn) > 1 or "labels" in drawn else "is"
            remarks.append(
                f"{' and '.join(sorted(drawn))} {verb} random, because none "
                f"{'were' if verb == 'are' else 'was'} given: gradients are those of the resulting loss"
            )
        return Own(name, config, part, weights_of(checkpoint, part), cases, remarks)

    def jobs(self, part: str, dtypes: Sequence[str], gradients: bool) -> list[Job]:
        """Return the jobs of the model, and describe it on standard error."""
        refuse(unknowns("dtype", dtypes, PRECISIONS))
        own = self.load(part, gradients)
        for line in own.remarks:
            Terminal(stderr=True).tell(line)
        arguments = (own.part, own.config, own.weights)
        return [
            Job(own.name, case, dtype, *arguments, batch, gradients=gradients)
            for case, batch in own.batches.items()
            for dtype in dtypes
        ]

    def _describe(self, checkpoint: Checkpoint) -> list[str]:
        from concord import porting

        assert self.checkpoint is not None
        form = self.form
        if form == "auto":
            recognition = porting.recognise(self.checkpoint)
            form = f"{recognition.format}, since {recognition.why}"
        count = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
        ignored = [entry for entry in checkpoint.ledger if entry.status == "ignored"]
        return [
            f"{self.checkpoint}: {form}; {count:,} parameters",
            *(f"ignored: {entry.foreign}: {entry.reason}" for entry in ignored),
        ]

    def _batch_texts(
        self, path: Path, checkpoint: Checkpoint, part: str, remarks: list[str], size: int
    ) -> dict[str, Batch]:
        from concord.porting.texts import TextEncoder, batch_of, read_texts

        texts, config = read_texts(path), checkpoint.config
        with located(str(self.checkpoint)):
            encoder = TextEncoder(checkpoint)
        with located(str(path)):
            encoded = encoder.encode(texts)
        labels = [text.label for text in texts if text.label is not None]
        classes = None
        if part == "model" and len(labels) == len(texts):
            names = checkpoint.classes
            among = ", ".join(map(repr, names[:20]))
            refuse(
                [
                    f"{path}:{number}: label is {label!r} but must be one of {among}"
                    for number, label in enumerate(labels, start=1)
                    if label not in names
                ]
            )
            classes = np.array([names.index(label) for label in labels], np.int64)
        cut = [
            f"{path}:{number}: tokens cut off: {text.truncated}; a text may have at most {encoder.max_tokens}"
            for number, text in enumerate(encoded, start=1)
            if text.truncated
        ]
        remarks += cut[:MOST_SHOWN]
        if len(cut) > MOST_SHOWN:
            remarks.append(f"and {len(cut) - MOST_SHOWN} more texts were cut off")
        batches = {}
        for start in range(0, len(texts), size):
            rows = slice(start, start + size)
            labelled = None if classes is None else classes[rows]
            batches[f"{file_name(path.stem)}-{start + 1}"] = batch_of(config, encoded[rows], labelled)
        return batches


def file_name(text: str) -> str:
    """Convert a name to one that any file system accepts."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "checkpoint"


def weights_of(checkpoint: Checkpoint, part: str) -> dict[str, NDArray[Any]]:
    """Parameters of a part."""
    names = parameters(checkpoint.config, part)
    return {name: array for name, array in checkpoint.weights().items() if name in names}


def _read_batch(path: Path, config: EncoderConfig, part: str, remarks: list[str]) -> Batch:
    with located(str(path)):
        arrays = _renamed(read_arrays(path))
        ids, mask = arrays.get("input_ids"), arrays.pop("key_mask", None)
        if ids is not None and mask is not None:
            _check_mask(mask, ids, config.pad_id)
        segments = arrays.get("segment_ids")
        if segments is not None and not config.num_segments and not segments.any():
            del arrays["segment_ids"]  # tokenizers return zeros even for a model without segments
        if segments is None and ids is not None and "segment_ids" in inputs(config, part):
            arrays["segment_ids"] = np.zeros_like(ids)
            remarks.append("segment_ids are 0, because none were given")
        return from_arrays(arrays)


def _renamed(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    renamed: dict[str, NDArray[Any]] = {}
    for key, array in arrays.items():
        name = ALIASES.get(key, key)
        if name in renamed:
            raise SpecError(f"{key!r} and {name!r} are both given, but they mean the same; give only one")
        renamed[name] = array
    return renamed


def _check_mask(mask: NDArray[Any], ids: NDArray[Any], pad_id: int) -> None:
    # The family masks by id, so any other mask would be silently ignored.
    if mask.shape != ids.shape:
        raise SpecError(f"the mask has shape {mask.shape} but must be {ids.shape}, the shape of 'input_ids'")
    differences = np.argwhere(mask.astype(bool) != (ids != pad_id))
    if len(differences):
        at = tuple(differences[0].tolist())
        raise SpecError(
            f"the mask is {mask[at].item()} at {at}, where 'input_ids' is {ids[at]}, but must hide "
            f"exactly the tokens with 'pad_id' {pad_id} [clause=MSK-1]"
        )


def _part(checkpoint: Checkpoint, option: str, remarks: list[str]) -> str:
    if option not in PARTS:
        raise SpecError(
            f"--part is {option!r} but must be {' or '.join(PARTS)}: a checkpoint can run only as these parts"
        )
    part = checkpoint.part if option == "model" else option
    # A checkpoint may run as a smaller part, but not as a larger one.
    lacking = [name for name in parameters(checkpoint.config, part) if name not in checkpoint.tensors]
    if lacking:
        raise SpecError(
            f"--part is {option!r} but the checkpoint holds only the part {checkpoint.part!r}, "
            f"without {', '.join(lacking[:5])}"
        )
    if checkpoint.part != "model":
        remarks.append(f"it has no classifier: Concord judges {JUDGED[part]}")
    return part


def _draw_batch(config: EncoderConfig, part: str) -> Batch:
    room = config.max_tokens
    tokens = room if config.pooling == "flatten" else min(TOKENS, room)
    return example_batch(config, batch=5, tokens=tokens, part=part)
