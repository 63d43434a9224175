"""Golden files, tensors that a published source computed, as runs of the model family.

Which name of the source is what is in its table (:mod:`concord.spec.sources.schema`); nothing here knows a
source.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.golden_files.container import Container, read_container
from concord.conformance.golden_files.expected import Expectations, input_array
from concord.conformance.golden_files.training import GoldenTraining, read_clipping, read_training
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.errors import SpecError
from concord.spec.parameters import parameters
from concord.spec.reference import predict
from concord.spec.sources.schema import MaskSource, PartTable, RunEntry, Table
from concord.spec.sources.table import bindings, canonical, configure, load, sources

TRAINING = "outputs/losses"
"""Only files of a training run have this tensor: the loss before each step."""


@dataclass(frozen=True, eq=False)
class GoldenRun:
    """One run of a source, in canonical terms.

    Attributes:
        label: tells the runs of a file apart, for example ``"mode0"``.
        part: one of :data:`spec.PARTS`.
        config: the member of the family that the source's configuration describes.
        weights: canonical name to array, in the file's dtype.
        batch: the inputs of the part.
        expected: what the source computed, in canonical layout, by the name of the tap or
            ``gradients.<name>``, which :func:`computed` looks up in what a backend computed. Beside single
            tensors there are
            ``gradients.inputs.query + gradients.inputs.key``, the sum of two; ``predictions``, classes (B),
            int64; and
            ``<tap> as <name>`` where two of the source's tensors are one tap and hold different numbers.
        expected_native: the same names to the source's own.
        notes: what a reader of a report should know.
    """

    label: str
    part: str
    config: EncoderConfig
    weights: dict[str, NDArray[Any]]
    batch: Batch
    expected: dict[str, NDArray[Any]]
    expected_native: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class GoldenFile:
    """A golden file.

    Attributes:
        source, case: as the file says.
        dtype: ``"float64"`` or ``"float32"``, in which the source ran.
        runs: what the source ran on the same weights and inputs; empty for a training file.
        training: what a training file holds; or, of one batch, what clipping made of its gradients.
        deviations: in what the source's framework deviates from the specification.
        unchecked: full name of each tensor that no run expects, and why.
    """

    source: str
    case: str
    dtype: str
    runs: list[GoldenRun]
    unchecked: dict[str, str] = field(default_factory=dict)
    training: GoldenTraining | None = None
    deviations: Deviations = field(default_factory=lambda: NONE)


def read(path: Path | str) -> GoldenFile:
    """Read a golden file.

    Raises:
        SpecError: if it is missing, truncated or corrupt, if its source is unknown, if its configuration
            describes no model of the family, or if a tensor is missing or misshapen; each line says file,
            what, and what is required, tensors in the source's own names.
    """
    file = read_container(Path(path))
    try:
        return _golden(file)
    except SpecError as error:
        raise type(error)([f"{file.path}: {problem}" for problem in error.problems]) from None


def computed(run: GoldenRun, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what a backend or the reference computed, under the names of ``run.expected``.

    Args:
        tensors: taps by name, and gradients as ``gradients.<name>``.

    What cannot be had from ``tensors`` is left out.
    """
    found: dict[str, NDArray[Any]] = {}
    for key in run.expected:
        names = key.partition(" as ")[0].split(" + ")
        if names == ["predictions"]:
            if "logits" in tensors:
                found[key] = predict(run.config, tensors["logits"])
        elif all(name in tensors for name in names):
            found[key] = np.asarray(reduce(np.add, [tensors[name] for name in names]))
    return found


def _golden(file: Container) -> GoldenFile:
    known = [source for source in sources() if any(part.runs for part in load(source).parts.values())]
    if file.source not in known:
        raise SpecError(f"the metadata's 'source' is {file.source!r} but must be one of {', '.join(known)}")
    table = load(file.source)
    part = _part(file, table)
    config = configure(table, file.config, part.name, where="the metadata's 'config'")
    if TRAINING in file.tensors:
        config, weights = _weights(file, table, part, config, stored=False)
        training = read_training(file, table, part, config, weights)
        return GoldenFile(file.source, file.case, file.dtype, [], _unchecked(file, part), training=training)
    config, weights = _weights(file, table, part, config)
    batch, note = _batch(file, part, config)
    runs = [
        _run(file, part, entry, config, weights, batch, note) for entry in part.runs if _exists(file, entry)
    ]
    clipping = read_clipping(file, table, part, config, weights, batch)
    return GoldenFile(
        file.source, file.case, file.dtype, runs, _unchecked(file, part), clipping, table.deviations
    )


def _part(file: Container, table: Table) -> PartTable:
    """Return the part of the model that a file is about."""
    kind = str(file.config.get(table.part_key, "")) if table.part_key else ""
    for part in table.parts.values():
        if kind.startswith(part.kind):
            return part
    kinds = ", ".join(repr(part.kind) for part in table.parts.values())
    raise SpecError(
        f"key {table.part_key!r} of the metadata's 'config' is {kind!r} but must begin with one of {kinds}"
    )


def _weights(
    file: Container, table: Table, part: PartTable, config: EncoderConfig, stored: bool = True
) -> tuple[EncoderConfig, dict[str, NDArray[Any]]]:
    """Return the weights; the position table as the source stored it, and the configuration with as many
    rows.

    Args:
        stored: whether a table that is no parameter of the source has to be in the file; those of training
            lack it.
    """
    positions = None
    if part.positions.output is not None and (stored or f"outputs/{part.positions.output}" in file.tensors):
        name = f"outputs/{part.positions.output}"
        positions = file.take(name)
        if positions is None or positions.ndim != 2:
            actual = "is missing" if positions is None else f"has shape {positions.shape}"
            raise SpecError(
                f"{name!r} {actual} but must be (rows, {config.d_model}): it is the position table"
            )
        config = config.replace(max_positions=len(positions))
    found = file.section("weights/")
    file.used.update(f"weights/{name}" for name in found)
    return config, canonical(table, config, found, part.name, positions)


def _batch(file: Container, part: PartTable, config: EncoderConfig) -> tuple[Batch, str]:
    """Return the inputs of the part, and where the key mask came from."""
    arrays, problems = {}, []
    for name, native in part.inputs.items():
        array = file.take(f"inputs/{native.name}")
        if array is None:
            problems.append(f"'inputs/{native.name}' is missing but is required")
        else:
            arrays[name] = input_array(f"inputs/{native.name}", array, native.layout)
    if problems:
        raise SpecError(problems)
    if part.mask is None:
        _require_mask_of_ids(file, arrays["input_ids"] != config.pad_id)
        note = ""
    else:
        mask, note = _key_mask(file, part.mask, config.pad_id)
        arrays = arrays if mask is None else {**arrays, "key_mask": mask}
    batch = from_arrays(arrays)
    validate_batch(config, batch, part.name)
    return batch, note


def _key_mask(file: Container, source: MaskSource, pad_id: int) -> tuple[NDArray[np.bool_] | None, str]:
    """Return the key mask, (B, S) or (B, Q, S), True where a key is visible; and where it came from."""
    masks = fnmatch.filter(file.tensors, f"inputs/{source.stored}")
    if len(masks) > 1:
        raise SpecError(f"{', '.join(map(repr, masks))} are there, but one mask at most may be stored")
    if masks:
        stored = file.take(masks[0])
        assert stored is not None
        return stored != 0, f"the key mask is {masks[0]!r}"
    if file.config.get(source.none.key) == source.none.value:
        return None, "without a key mask"
    ids = file.take(f"inputs/{source.ids}")
    if ids is None:
        raise SpecError(
            f"'inputs/{source.ids}' is missing, but it or 'inputs/{source.stored}' is required: the key "
            f"mask follows from it"
        )
    return ids != pad_id, f"the key mask hides id {pad_id} of 'inputs/{source.ids}'"


def _require_mask_of_ids(file: Container, real: NDArray[np.bool_]) -> None:
    """Refuse a stored mask that a part which makes its own of the ids (SPEC MSK-1) could not follow."""
    stored = file.take("inputs/mask")
    if stored is None:
        return
    visible = stored[:, None] != 0 if stored.ndim == 2 else stored != 0  # (B, 1 or Q, S)
    if visible.ndim != 3 or visible.shape[::2] != real.shape or (visible != real[:, None]).any():
        raise SpecError("'inputs/mask' is not the mask of the ids, but must be: this part takes no other")


def _exists(file: Container, entry: RunEntry) -> bool:
    """Return whether a file holds a run: one that checks only some outputs may be left out."""
    return not entry.only or any(f"outputs/{name}" in file.tensors for name in entry.outputs)


def _run(
    file: Container,
    part: PartTable,
    entry: RunEntry,
    config: EncoderConfig,
    weights: dict[str, NDArray[Any]],
    batch: Batch,
    note: str,
) -> GoldenRun:
    config = config.replace(**entry.fields)
    expectations = Expectations(file, part, config, batch, entry.label)
    expectations.add_outputs(entry.outputs if entry.only else {**part.outputs, **entry.outputs})
    if not entry.only:
        trainable = {name for name, parameter in parameters(config, part.name).items() if parameter.trainable}
        places = {
            name: place
            for name, place in bindings(part, config, entry.gradients).items()
            if name in trainable
        }
        expectations.add_gradients(places)
    expectations.finish()
    notes = tuple(filter(None, (note, *expectations.notes)))
    return GoldenRun(
        entry.label, part.name, config, weights, batch, expectations.arrays, expectations.native, notes
    )


def _unchecked(file: Container, part: PartTable) -> dict[str, str]:
    """Return every tensor that no run came to use, and why."""
    reasons = {f"outputs/{name}": reason for name, reason in part.unchecked.items()}
    if part.positions.output is not None:
        reasons[f"outputs/{part.positions.output}"] = (
            "is loaded as the position table, so that it is used as stored"
        )
    if part.mask is not None:
        reasons[f"inputs/{part.mask.ids}"] = "is not used: the source was given another mask, or none"
    found = {}
    for name in file.tensors:
        given = [
            reason
            for key, reason in reasons.items()
            if name == key or (key.endswith("/") and name.startswith(key))
        ]
        if given and (name not in file.used or name == f"outputs/{part.positions.output}"):
            found[name] = given[0]
        elif name not in file.used:
            found[name] = f"the table of {file.source} has no place for it in this configuration"
    return found
