"""A model of one's own: a checkpoint of any format, and texts or inputs, as the jobs of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord import porting
from concord.conformance.campaign import Job
from concord.porting.checkpoint import Checkpoint
from concord.porting.folder import folder_of, name_of
from concord.spec.batch import Batch, completed, example_batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError, SpecError, optional, unknowns
from concord.spec.files import opened, read_arrays
from concord.spec.parameters import Weights, parameters
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import POOLED, inputs
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.training.data.encoder import Encoded
    from concord.training.data.samples import Sample, Samples

BATCH = 8
"""Texts of a case, unless it is said otherwise."""

TOKENS = 11
"""Of a case that is drawn, where there is room for them."""

ALIASES = {"token_type_ids": "segment_ids", "attention_mask": "key_mask"}
"""What inputs are called elsewhere, to what they are called here."""

PARTS = ("model", "pooled", "encoder")
"""The parts of the model that a checkpoint can hold."""

JUDGED = {
    "pooled": "the embedding of each text, from ids to the pooled vector",
    "encoder": "the encoder, from ids to the last layer's output",
}
"""What is judged of a checkpoint without a classifier."""

MOST_SHOWN = 5
"""Texts of which it is said one by one that they were cut off."""


@dataclass(frozen=True)
class Given:
    """What a command was given in place of standard cases.

    Attributes:
        checkpoint: a folder, or the file of weights in it.
        format: one of :func:`concord.porting.formats`, or ``"auto"``.
        table: names and layouts in place of the format's own.
        texts: a file of texts.
        inputs: a file of arrays.
        batch: samples of a case; by default :data:`BATCH` texts, and all samples of a file of arrays.
        max_tokens: of a text; what is longer is cut off, and that is said.
    """

    checkpoint: Path
    format: str = "auto"
    table: Path | None = None
    texts: Path | None = None
    inputs: Path | None = None
    batch: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = ["--texts and --inputs are both given; give either"] if self.texts and self.inputs else []
        problems += (
            [f"--batch is {self.batch} but must be at least 1"]
            if self.batch is not None and self.batch < 1
            else []
        )
        problems += (
            ["--max-tokens is given but --texts is not: it is about texts"]
            if self.max_tokens is not None and self.texts is None
            else []
        )
        if problems:
            raise SpecError(problems)

    @property
    def name(self) -> str:
        """What results are gathered under."""
        return legible(name_of(self.checkpoint))


@dataclass(frozen=True)
class Own:
    """A model of one's own, and what it is run on.

    Attributes:
        name: what results are gathered under.
        part: one of :data:`PARTS`.
        batches: by the name of the case.
        remarks: what is to be said of it, a line each.
        tokens: what each text became, a line each.
    """

    name: str
    config: EncoderConfig
    part: str
    weights: Weights
    batches: Mapping[str, Batch]
    remarks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = field(default=(), repr=False)

    def jobs(self, dtypes: Sequence[str], gradients: bool = True) -> list[Job]:
        """Return a job for each batch and precision."""
        return [
            Job(self.name, case, dtype, self.part, self.config, self.weights, batch, gradients=gradients)
            for case, batch in self.batches.items()
            for dtype in dtypes
        ]


def load(given: Given, part: str = "model", gradients: bool = True) -> Own:
    """Read a checkpoint, and what it is to be run on.

    Args:
        part: one of :data:`PARTS`; ``"model"`` is what the checkpoint holds.
        gradients: whether any are wanted: then labels or cotangents that nobody gave are drawn, and that is said.

    Raises:
        SpecError: listing what is wrong with the checkpoint, or with texts or inputs.
    """
    found = porting.read(given.checkpoint, given.format, given.table)
    remarks = [*_of_checkpoint(given, found)]
    part = _part(found, part, remarks)
    known = parameters(found.config, part)
    weights = {name: array for name, array in found.weights().items() if name in known}
    tokens: tuple[str, ...] = ()
    if given.texts is not None:
        batches, tokens = _Texts(given, found, part, remarks).batches()
    elif given.inputs is not None:
        batches = _of_inputs(given, found.config, part, remarks)
    else:
        batches = {f"{given.name}-drawn": _drawn(found.config, part)}
        remarks.append(
            "neither --texts nor --inputs is given: ids are drawn, with rows of every awkward kind"
        )
    made: set[str] = set()
    for name, batch in batches.items():
        batches[name] = completed(found.config, batch, part, drawn=gradients, made=made)
        validate_batch(found.config, batches[name], part)
    if gradients and made:
        remarks.append(
            f"{' and '.join(sorted(made))} {'are' if len(made) > 1 or 'labels' in made else 'is'} drawn, since nobody gave any: gradients are those of the loss that follows"
        )
    return Own(given.name, found.config, part, weights, batches, tuple(remarks), tokens)


def jobs(
    given: Given, part: str, dtypes: Sequence[str], gradients: bool = True, show_tokens: bool = False
) -> list[Job]:
    """Return the jobs of a model of one's own, and say on standard error what it is.

    Args:
        part: one of :data:`PARTS`; ``"model"`` is what the checkpoint holds.

    Raises:
        SpecError: as :func:`load`, and for an unknown precision.
    """
    problems = unknowns("dtype", dtypes, PRECISIONS)
    if problems:
        raise SpecError(problems)
    found = load(given, part, gradients)
    tell(found, show_tokens)
    return found.jobs(dtypes, gradients)


def tell(found: Own, show_tokens: bool) -> None:
    """Say on standard error what is run, and what texts became."""
    console = Terminal(stderr=True)
    for line in (*found.remarks, *(found.tokens if show_tokens else ())):
        console.print(line, highlight=False, soft_wrap=True)


def legible(text: str) -> str:
    """Return what a folder can be called, from what a file is called."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "checkpoint"


def _of_checkpoint(given: Given, found: Checkpoint) -> Iterator[str]:
    """Say what a checkpoint is, and what of it is left out."""
    how = porting.recognise(given.checkpoint) if given.format == "auto" else None
    count = sum(int(np.prod(tensor.shape)) for tensor in found.tensors.values())
    yield f"{given.checkpoint}: {how.format + ', since ' + how.why if how else given.format}; {count:,} parameters"
    ignored = [entry for entry in found.ledger if entry.status == "ignored"]
    for reason in dict.fromkeys(entry.reason for entry in ignored):
        yield f"ignored: {', '.join(entry.foreign for entry in ignored if entry.reason == reason)}: {reason}"


def _part(found: Checkpoint, asked: str, remarks: list[str]) -> str:
    """Return the part that is judged."""
    if asked not in PARTS:
        raise SpecError(f"--part is {asked!r} but must be {' or '.join(PARTS)}: so a checkpoint can be run")
    part = found.part if asked == "model" else asked
    lacking = [name for name in parameters(found.config, part) if name not in found.tensors]
    if lacking:
        raise SpecError(
            f"--part is {asked!r} but the checkpoint is the part {found.part!r}, without {', '.join(lacking[:5])}"
        )
    if found.part != "model":
        remarks.append(f"it has no classifier: what is judged is {JUDGED[part]}")
    return part


def _drawn(config: EncoderConfig, part: str) -> Batch:
    room = config.max_positions - config.position_start
    return example_batch(
        config, batch=5, tokens=room if config.pooling == "flatten" else min(TOKENS, room), part=part
    )


# Inputs


def _of_inputs(given: Given, config: EncoderConfig, part: str, remarks: list[str]) -> dict[str, Batch]:
    """Return the arrays of a file as batches.

    Raises:
        SpecError: listing what does not fit.
    """
    assert given.inputs is not None
    found = read_arrays(given.inputs)
    try:
        named = _named(found, config)
        if "segment_ids" in inputs(config, part) and "segment_ids" not in named and "input_ids" in named:
            named["segment_ids"] = np.zeros_like(named["input_ids"])
            remarks.append("segment_ids are 0, since nobody gave any")
        validate_batch(config, completed(config, from_arrays(named), part), part)
    except SpecError as error:
        raise BatchError([f"{given.inputs}: {problem}" for problem in error.problems]) from None
    stem, size = legible(given.inputs.stem), given.batch or len(named["input_ids"])
    starts = range(0, len(named["input_ids"]), size)
    names = [stem] if len(starts) == 1 else [f"{stem}-{start + 1}" for start in starts]
    return {
        f"{given.name}-{name}": from_arrays(
            {key: array[start : start + size] for key, array in named.items()}
        )
        for name, start in zip(names, starts, strict=True)
    }


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
            f"the mask is {mask[at].item()} at {at}, where 'input_ids' is {ids[at]}, but must hide {config.pad_id} ('pad_id') and nothing else [clause=MSK-1]"
        )
    return named


# Texts


class _Texts:
    """Texts on their way to batches."""

    def __init__(self, given: Given, found: Checkpoint, part: str, remarks: list[str]) -> None:
        with optional("--texts", "training"):
            from concord.training.data.ready import encoder_of
        assert given.texts is not None
        self.given, self.path, self.found, self.part, self.remarks = given, given.texts, found, part, remarks
        self.config = found.config
        encoder = encoder_of(folder_of(given.checkpoint), found.files, found.config, given.max_tokens)
        if encoder is None:
            raise SpecError(
                f"{given.checkpoint}: has no tokenizer.json and no vocab.txt: put one beside the weights, or give ids as --inputs FILE.safetensors"
            )
        self.encoder = encoder

    def batches(self) -> tuple[dict[str, Batch], tuple[str, ...]]:
        """Return batches by name, and what each text became.

        Raises:
            SpecError: listing lines that are no texts, or whose ids the model does not have.
        """
        samples = read_texts(self.path)
        encoded = [self.encode(sample, samples) for sample in samples.samples]
        problems = [
            problem
            for sample, one in zip(samples.samples, encoded, strict=True)
            for problem in self.wrong(samples.where(sample.number), one)
        ]
        if problems:
            raise BatchError(problems[:20])
        self.tell_truncated(samples, encoded)
        labels = self.labels(samples.samples)
        size = self.given.batch or BATCH
        found = {}
        for start in range(0, len(encoded), size):
            some = slice(start, start + size)
            found[f"{self.given.name}-{legible(self.path.stem)}-{start + 1}"] = self.batch(
                encoded[some], None if labels is None else labels[some]
            )
        lines = zip(samples.samples, encoded, strict=True)
        return found, tuple(
            f"{samples.where(sample.number)}: {' '.join(one.tokens)}" for sample, one in lines
        )

    def encode(self, sample: Sample, samples: Samples) -> Encoded:
        """Encode a text, or a pair."""
        try:
            return self.encoder.encode(sample.text_a, sample.text_b)
        except SpecError as error:
            raise SpecError(
                [f"{samples.where(sample.number)}: {problem}" for problem in error.problems]
            ) from None

    def wrong(self, where: str, one: Encoded) -> Iterator[str]:
        """Yield what a model cannot do with the ids of a text, each once."""
        config = self.config
        for place, (number, token) in enumerate(zip(one.ids.tolist(), one.tokens, strict=True)):
            if not 0 <= number < config.vocab_size:
                yield f"{where}: token {place}, {token!r}, has id {number} but the model's table has {config.vocab_size} rows: is it another model's tokenizer? [clause=INP-1]"
                return
            if number == config.pad_id:
                yield f"{where}: token {place}, {token!r}, has id {number}, which is padding ('pad_id') to the model: it is masked wherever it stands [clause=MSK-1]"
                return
        if config.num_segments and len(one.segment_ids) and one.segment_ids.max() >= config.num_segments:
            yield f"{where}: is a pair, but the model has {config.num_segments} segment{'' if config.num_segments == 1 else 's'} [clause=EMB-5]"

    def tell_truncated(self, samples: Samples, encoded: Sequence[Encoded]) -> None:
        """Say what was cut off."""
        cut = [
            (samples.where(sample.number), one.truncated, len(one.ids))
            for sample, one in zip(samples.samples, encoded, strict=True)
            if one.truncated
        ]
        self.remarks += [
            f"{where}: {lost} tokens were cut off: {kept} are as many as it may have"
            for where, lost, kept in cut[:MOST_SHOWN]
        ]
        if len(cut) > MOST_SHOWN:
            self.remarks.append(f"and {len(cut) - MOST_SHOWN} more texts were cut off")

    def labels(self, samples: Sequence[Sample]) -> NDArray[np.int64] | None:
        """Return labels, if every text has one and the model takes any.

        Raises:
            SpecError: for a name that no class bears.
        """
        if self.part != "model" or any(sample.label is None for sample in samples):
            return None
        count = max(2, self.config.num_classes)
        known = self.found.labels or tuple(map(str, range(count)))
        unknown = sorted({str(sample.label) for sample in samples} - {*known})
        if unknown:
            raise SpecError(
                f"{self.path}: has the labels {', '.join(map(repr, unknown[:5]))} but the model's are {', '.join(map(repr, known[:20]))}"
            )
        return np.array([known.index(str(sample.label)) for sample in samples], np.int64)

    def batch(self, encoded: Sequence[Encoded], labels: NDArray[np.int64] | None) -> Batch:
        """Return texts side by side, filled up with padding."""
        config = self.config
        tokens = (
            config.max_positions
            if config.pooling == "flatten" and self.part in POOLED
            else max(len(one.ids) for one in encoded)
        )
        ids, segments = (
            np.full((len(encoded), tokens), config.pad_id, np.int64),
            np.zeros((len(encoded), tokens), np.int64),
        )
        for row, one in enumerate(encoded):
            ids[row, : len(one.ids)], segments[row, : len(one.ids)] = one.ids, one.segment_ids
        return Batch(input_ids=ids, segment_ids=segments if config.num_segments else None, labels=labels)


def read_texts(path: Path) -> Samples:
    """Read texts: one on each line, or two with a tab between them; a header or JSON Lines may say more.

    Raises:
        SpecError: for what cannot be read, listing bad lines.
    """
    from concord.training.data import read
    from concord.training.data.lines import Complaints, numbered
    from concord.training.data.samples import FIELDS, USUAL, layout_of

    layout, columns = layout_of(path, None), None
    if layout == "tsv":
        with opened(path) as file:
            _, first = next(numbered(file, str(path), Complaints()), (0, ""))
        header = "text_a" in {USUAL.get(value, value) for value in first.split("\t")}
        columns = FIELDS[:2] if first.count("\t") == 1 and not header else None
    samples = read(path, layout=layout, columns=columns)
    mixed = [
        samples.where(sample.number)
        for sample in samples.samples
        if layout == "plain" and "\t" in sample.text_a
    ]
    if mixed:
        raise SpecError(
            f"{mixed[0]}: has a tab, but the first line has none: either each line is a pair or none is"
        )
    return samples
