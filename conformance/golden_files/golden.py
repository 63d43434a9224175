"""Golden files, tensors that a published source computed, as runs of the model family.

Which name of the source is what is in its table (:mod:`concord.spec.sources.schema`); nothing here knows a
source. On disk they are safetensors, with what they are in the metadata.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.golden_files.file import SourceFile, laid_out, read_file
from concord.conformance.golden_files.training import GoldenTraining, read_clipping, read_training
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.parameters import parameters
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import MaskSource, PartTable, RunEntry, Table
from concord.spec.sources.table import bindings, canonical, configure, load, sources
from concord.spec.tensors import resolve, sizes_of, taps

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
            ``gradients.<name>``. Beside single tensors there are ``gradients.inputs.query +
            gradients.inputs.key``, the sum of two; ``predictions``, classes (B), int64; and
            ``<tap> as <name>`` where two of the source's tensors are one tap and hold different numbers.
    """

    label: str
    part: str
    config: EncoderConfig
    weights: dict[str, NDArray[Any]]
    batch: Batch
    expected: dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class GoldenFile:
    """A golden file.

    Attributes:
        source, case: as the file says.
        dtype: ``"float64"`` or ``"float32"``, in which the source ran.
        runs: what the source ran on the same weights and inputs; empty for a training file.
        unchecked: full name of each tensor that no run expects, and why.
        training: what a training file holds; or, of one batch, what clipping made of its gradients.
        deviations: in what the source's framework deviates from the specification.
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
    file = read_file(Path(path))
    with located(str(path)):
        return _golden(file)


def _golden(file: SourceFile) -> GoldenFile:
    known = [source for source in sources() if any(part.runs for part in load(source).parts.values())]
    if file.source not in known:
        raise SpecError(f"the metadata's 'source' is {file.source!r} but must be one of {', '.join(known)}")
    table = load(file.source)
    part = _part(file, table)
    config = configure(table, file.config, part.name, where="the metadata's 'config'")
    training = TRAINING in file.tensors
    config, weights = _weights(file, table, part, config, stored=not training)
    runs: list[GoldenRun] = []
    if training:
        trained: GoldenTraining | None = read_training(file, table, part, config, weights)
    else:
        batch = _batch(file, part, config)
        runs = [
            _run(file, part, entry, config, weights, batch)
            for entry in part.runs
            if not entry.only or any(f"outputs/{name}" in file.tensors for name in entry.outputs)
        ]
        trained = read_clipping(file, table, part, config, weights, batch)
    return GoldenFile(
        file.source, file.case, file.dtype, runs, _unchecked(file, part), trained, table.deviations
    )


def _part(file: SourceFile, table: Table) -> PartTable:
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
    file: SourceFile, table: Table, part: PartTable, config: EncoderConfig, stored: bool = True
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


def _batch(file: SourceFile, part: PartTable, config: EncoderConfig) -> Batch:
    """Return the inputs of the part."""
    refuse(
        [
            f"'inputs/{native.name}' is missing but is required"
            for native in part.inputs.values()
            if f"inputs/{native.name}" not in file.tensors
        ]
    )
    arrays = {
        name: laid_out(f"inputs/{native.name}", file.tensors[f"inputs/{native.name}"], native.layout)
        for name, native in part.inputs.items()
    }
    file.used.update(f"inputs/{native.name}" for native in part.inputs.values())
    if part.mask is None:
        _require_mask_of_ids(file, arrays["input_ids"] != config.pad_id)
    elif (mask := _key_mask(file, part.mask, config.pad_id)) is not None:
        arrays["key_mask"] = mask
    batch = from_arrays(arrays)
    validate_batch(config, batch, part.name)
    return batch


def _key_mask(file: SourceFile, source: MaskSource, pad_id: int) -> NDArray[np.bool_] | None:
    """Return the key mask, (B, S) or (B, Q, S), True where a key is visible; None: without a mask."""
    masks = fnmatch.filter(file.tensors, f"inputs/{source.stored}")
    if len(masks) > 1:
        raise SpecError(f"{', '.join(map(repr, masks))} are there, but one mask at most may be stored")
    if masks:
        stored = file.take(masks[0])
        assert stored is not None
        return np.asarray(stored != 0)
    if file.config.get(source.none.key) == source.none.value:
        return None
    ids = file.take(f"inputs/{source.ids}")
    if ids is None:
        raise SpecError(
            f"'inputs/{source.ids}' is missing, but it or 'inputs/{source.stored}' is required: the key "
            f"mask follows from it"
        )
    return np.asarray(ids != pad_id)


def _require_mask_of_ids(file: SourceFile, real: NDArray[np.bool_]) -> None:
    """Refuse a stored mask that a part which makes its own of the ids (SPEC MSK-1) could not follow."""
    stored = file.take("inputs/mask")
    if stored is None:
        return
    visible = stored[:, None] != 0 if stored.ndim == 2 else stored != 0  # (B, 1 or Q, S)
    if visible.ndim != 3 or visible.shape[::2] != real.shape or (visible != real[:, None]).any():
        raise SpecError("'inputs/mask' is not the mask of the ids, but must be: this part takes no other")


def _run(
    file: SourceFile,
    part: PartTable,
    entry: RunEntry,
    config: EncoderConfig,
    weights: dict[str, NDArray[Any]],
    batch: Batch,
) -> GoldenRun:
    """Return a run with every output and gradient that the file has.

    Outputs that the table requires must be there, and gradients of all trainable weights, or none.
    """
    config, given = config.replace(**entry.fields), batch.arrays()
    known, sizes = taps(config, part.name, given), sizes_of(config, given)
    expected: dict[str, NDArray[Any]] = {}
    problems: list[str] = []

    def put(key: str, name: str, array: NDArray[Any]) -> None:
        """Expect a tensor; of two that are one tap and hold the same numbers the first."""
        if key not in expected:
            expected[key] = array
        elif not np.array_equal(expected[key], array, equal_nan=array.dtype.kind == "f"):
            expected[f"{key} as {name}"] = array

    def add(name: str, key: str, layout: str, shape: tuple[int, ...], required: bool) -> None:
        """Expect a tensor of the file, if it is there, in a canonical shape."""
        array = file.take(name)
        if array is None:
            problems.extend([f"{name!r} is missing but is required: it is {key!r}"] if required else [])
            return
        kind, wanted = ("i", "an integer") if key == "predictions" else ("f", "a floating-point")
        if array.dtype.kind != kind:
            problems.append(f"{name!r} has dtype {array.dtype} but must be {wanted} type: it is {key!r}")
            return
        with collecting(problems):
            put(key, name, laid_out(name, array, layout, sizes, shape, key))

    outputs = entry.outputs if entry.only else {**part.outputs, **entry.outputs}
    for pattern, output in outputs.items():
        for i in range(config.num_layers if "i" in variables(pattern) else 1):
            values: dict[str, int | str] = {"i": i, "n": config.num_layers, "run": entry.label}
            tap = fill(output.tap, values)
            if tap == "predictions" or tap in known:
                shape = (sizes["batch"],) if tap == "predictions" else resolve(known[tap].shape, sizes)
                add(f"outputs/{fill(pattern, values)}", tap, output.layout, shape, output.required)
    prefix = f"grads/{fill(part.gradients.under, {'run': entry.label})}"
    if not entry.only and file.section(prefix):
        table = parameters(config, part.name)
        places = bindings(part, config, entry.gradients)
        found, wrong = file.gather(
            prefix, {name: one for name, one in places.items() if table[name].trainable}
        )
        problems += wrong
        expected |= {f"gradients.{name}": array for name, array in found.items()}
        for name, gradient in part.gradients.inputs.items():
            key = " + ".join(f"gradients.inputs.{one}" for one in gradient.sum_of)
            add(f"{prefix}{name}", key, gradient.layout, given[gradient.sum_of[0]].shape, False)
    refuse(problems)
    return GoldenRun(entry.label, part.name, config, weights, batch, expected)


def _unchecked(file: SourceFile, part: PartTable) -> dict[str, str]:
    """Return every tensor that no run came to use, and why."""
    reasons = {f"outputs/{name}": reason for name, reason in part.unchecked.items()}
    positions = f"outputs/{part.positions.output}"
    if part.positions.output is not None:
        reasons[positions] = "is loaded as the position table, so that it is used as stored"
    if part.mask is not None:
        reasons[f"inputs/{part.mask.ids}"] = "is not used: the source was given another mask, or none"
    found = {}
    for name in file.tensors:
        given = [
            reason
            for key, reason in reasons.items()
            if name == key or (key.endswith("/") and name.startswith(key))
        ]
        if name not in file.used:
            given.append(f"the table of {file.source} has no place for it in this configuration")
        if name not in file.used or name == positions:
            found[name] = given[0]
    return found
