"""Golden files, tensors that a published source computed, as runs and training of the model family.

Which name of the source is what is in its table (:mod:`concord.spec.sources.schema`); nothing here knows a
source. On disk they are safetensors, with what they are in the metadata.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.expectation import JudgedTraining
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.files import parse_json, read_described, section
from concord.spec.parameters import parameters
from concord.spec.positions import float32_noise
from concord.spec.sources.layouts import TENSOR_LAYOUTS, contiguous
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import MaskSource, Native, PartTable, RunEntry, Table
from concord.spec.sources.table import (
    POSITIONS,
    Binding,
    bindings,
    canonical,
    configure,
    gather,
    load,
    sources,
)
from concord.spec.tensors import resolve, sizes_of, taps
from concord.spec.training.recipe import Recipe, recipe_from_mapping
from concord.spec.training.trajectory import Training

DTYPES = ("float64", "float32")

LOSSES = "outputs/losses"
"""Only files of a training run have this tensor: the loss before each step."""

STATED = "the metadata's 'config'"


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
    weights: Arrays
    batch: Batch
    expected: Arrays


@dataclass(frozen=True, eq=False)
class GoldenTraining:
    """The training run of a file, in canonical terms.

    Attributes:
        problem: the model, how it was trained, and in what the source's framework deviates.
        expected: what the source reported, by the names that
            :class:`concord.spec.training.trajectory.Trajectory` reports it under.
    """

    problem: JudgedTraining
    expected: Arrays


class GoldenFile:
    """A golden file.

    Args:
        metadata: of the file.
        tensors: by full name, ``weights/…``, ``inputs/…``, ``outputs/…``, ``grads/…``.

    Attributes:
        source, case: as the metadata says.
        dtype: ``"float64"`` or ``"float32"``, in which the source ran.
        stated: the source's own configuration.
        used: full names of the tensors that something was made of.
        part: of the model that it is about.
        config, weights: of the model, before what a run changes of it.
        runs: what the source ran on the same weights and inputs; empty for a training file.
        training: what a training file holds; or, of one batch, what clipping made of its gradients.

    Raises:
        SpecError: listing what is missing, misshapen or unknown.
    """

    def __init__(self, metadata: Mapping[str, str], tensors: Arrays) -> None:
        lacking = [key for key in ("source", "case", "dtype", "config") if key not in metadata]
        if lacking:
            names = ", ".join(map(repr, lacking))
            raise SpecError(f"the metadata lack {names}, which a golden file must have")
        self.source, self.case, self.dtype = (metadata[key] for key in ("source", "case", "dtype"))
        if self.dtype not in DTYPES:
            wanted = " or ".join(map(repr, DTYPES))
            raise SpecError(f"the metadata's 'dtype' is {self.dtype!r} but must be {wanted}")
        self.stated = parse_json(metadata["config"], STATED)
        if not isinstance(self.stated, dict):
            raise SpecError(f"{STATED} is a JSON {type(self.stated).__name__} but must be an object")
        known = [name for name in sources() if any(part.runs for part in load(name).parts.values())]
        if self.source not in known:
            raise SpecError(
                f"the metadata's 'source' is {self.source!r} but must be one of {', '.join(known)}"
            )
        self.tensors, self.used = tensors, set[str]()
        self.table: Table = load(self.source)
        self.deviations = self.table.deviations
        self.part: PartTable = self._part()
        self.config = configure(self.table, self.stated, self.part.name, where=STATED)
        trained = LOSSES in tensors
        positions = self._positions(required=not trained)
        if positions is not None:
            self.config = self.config.replace(max_positions=len(positions))
        self.weights = canonical(self.table, self.config, self.section("weights/"), self.part.name, positions)
        self.used.update(name for name in tensors if name.startswith("weights/"))
        self.runs: list[GoldenRun] = []
        self.training: GoldenTraining | None = None
        if trained:
            self.training = self._trained()
        else:
            batch = self._batch()
            self.runs = [
                self._run(entry, batch)
                for entry in self.part.runs
                if not entry.only or any(f"outputs/{name}" in tensors for name in entry.outputs)
            ]
            self.training = self._clipped(batch)

    # Tensors of the file.

    def section(self, prefix: str) -> Arrays:
        """Return the tensors below a prefix, by the rest of their names."""
        return section(self.tensors, prefix)

    def take(self, name: str) -> NDArray[Any] | None:
        """Return a tensor by its full name and note that it is used; None if it is not there."""
        if name in self.tensors:
            self.used.add(name)
        return self.tensors.get(name)

    def take_parameters(
        self, prefix: str, trainable: bool = True, instead: Mapping[str, Native] | None = None
    ) -> Arrays:
        """Return the tensors of parameters below a prefix, by canonical name.

        Args:
            trainable: whether those alone that are trained are there.
            instead: where some of them are, unlike the weights.

        Raises:
            SpecError: listing what is missing or misshapen.
        """
        entries = parameters(self.config, self.part.name)
        full = {
            name: Binding(tuple(f"{prefix}{own}" for own in place.names), place.layout, place.shape)
            for name, place in bindings(self.part, self.config, instead).items()
            if entries[name].trainable or not trainable
        }
        found, problems = gather(full, self.tensors, f"source={self.source}")
        self.used.update(own for name in found for own in full[name].names)
        refuse(problems)
        return found

    # The model.

    def _part(self) -> PartTable:
        """Return the part of the model that the file is about."""
        key = self.table.part_key
        kind = str(self.stated.get(key, "")) if key else ""
        for part in self.table.parts.values():
            if kind.startswith(part.kind):
                return part
        kinds = ", ".join(repr(part.kind) for part in self.table.parts.values())
        raise SpecError(f"key {key!r} of {STATED} is {kind!r} but must begin with one of {kinds}")

    def _positions(self, required: bool) -> NDArray[Any] | None:
        """Return the position table as the source stored it, where that is no parameter of the source.

        Args:
            required: whether it has to be in the file; files of training lack it.
        """
        if self.part.positions.output is None:
            return None
        name = f"outputs/{self.part.positions.output}"
        found = self.take(name)
        if found is None and not required:
            return None
        if found is None or found.ndim != 2:
            actual = "is missing" if found is None else f"has shape {found.shape}"
            raise SpecError(
                f"{name!r} {actual} but must be (rows, {self.config.d_model}): it is the position table"
            )
        return found

    # A run.

    def _batch(self) -> Batch:
        """Return the inputs of the part."""
        names = {name: f"inputs/{native.name}" for name, native in self.part.inputs.items()}
        refuse(
            [f"{name!r} is missing but is required" for name in names.values() if name not in self.tensors]
        )
        arrays = {
            name: laid_out(names[name], self.tensors[names[name]], native.layout)
            for name, native in self.part.inputs.items()
        }
        self.used.update(names.values())
        if self.part.mask is None:
            self._require_mask_of_ids(arrays["input_ids"] != self.config.pad_id)
        elif (mask := self._key_mask(self.part.mask)) is not None:
            arrays["key_mask"] = mask
        batch = from_arrays(arrays)
        validate_batch(self.config, batch, self.part.name)
        return batch

    def _key_mask(self, source: MaskSource) -> NDArray[np.bool_] | None:
        """Return the key mask, (B, S) or (B, Q, S), True where a key is visible; None: without a mask."""
        masks = fnmatch.filter(self.tensors, f"inputs/{source.stored}")
        if len(masks) > 1:
            raise SpecError(f"{', '.join(map(repr, masks))} are there, but one mask at most may be stored")
        if masks:
            return np.asarray(self.take(masks[0]) != 0)
        if self.stated.get(source.none.key) == source.none.value:
            return None
        ids = self.take(f"inputs/{source.ids}")
        if ids is None:
            raise SpecError(
                f"'inputs/{source.ids}' is missing, but it or 'inputs/{source.stored}' is required: the key "
                f"mask follows from it"
            )
        return np.asarray(ids != self.config.pad_id)

    def _require_mask_of_ids(self, real: NDArray[np.bool_]) -> None:
        """Refuse a stored mask that a part which makes its own of the ids (SPEC MSK-1) could not follow."""
        stored = self.take("inputs/mask")
        if stored is None:
            return
        visible = stored[:, None] != 0 if stored.ndim == 2 else stored != 0  # (B, 1 or Q, S)
        if visible.ndim != 3 or visible.shape[::2] != real.shape or (visible != real[:, None]).any():
            raise SpecError("'inputs/mask' is not the mask of the ids, but must be: this part takes no other")

    def _run(self, entry: RunEntry, batch: Batch) -> GoldenRun:
        """Return a run with every output and gradient that the file has.

        Outputs that the table requires must be there, and gradients of all trainable weights, or none.
        """
        part, config, given = self.part, self.config.replace(**entry.fields), batch.arrays()
        known, sizes = taps(config, part.name, given), sizes_of(config, given)
        expected, problems = Arrays(), list[str]()

        def add(name: str, key: str, layout: str, shape: tuple[int, ...], required: bool) -> None:
            """Expect a tensor that is there; of two that are one tap and hold the same numbers the first."""
            array = self.take(name)
            if array is None:
                problems.extend([f"{name!r} is missing but is required: it is {key!r}"] if required else [])
                return
            kind, wanted = ("i", "an integer") if key == "predictions" else ("f", "a floating-point")
            if array.dtype.kind != kind:
                problems.append(f"{name!r} has dtype {array.dtype} but must be {wanted} type: it is {key!r}")
                return
            with collecting(problems):
                array = laid_out(name, array, layout, sizes, shape, key)
                if not np.array_equal(expected.setdefault(key, array), array, equal_nan=kind == "f"):
                    expected[f"{key} as {name}"] = array

        outputs = entry.outputs if entry.only else {**part.outputs, **entry.outputs}
        for pattern, output in outputs.items():
            for i in range(config.num_layers if "i" in variables(pattern) else 1):
                values: dict[str, int | str] = {"i": i, "n": config.num_layers, "run": entry.label}
                tap = fill(output.tap, values)
                if tap == "predictions" or tap in known:
                    shape = (sizes["batch"],) if tap == "predictions" else resolve(known[tap].shape, sizes)
                    add(f"outputs/{fill(pattern, values)}", tap, output.layout, shape, output.required)
        prefix = f"grads/{fill(part.gradients.under, {'run': entry.label})}"
        if not entry.only and self.section(prefix):
            with collecting(problems):
                found = self.take_parameters(prefix, instead=entry.gradients)
                expected |= {f"gradients.{name}": array for name, array in found.items()}
            for name, gradient in part.gradients.inputs.items():
                key = " + ".join(f"gradients.inputs.{one}" for one in gradient.sum_of)
                add(f"{prefix}{name}", key, gradient.layout, given[gradient.sum_of[0]].shape, False)
        refuse(problems)
        return GoldenRun(entry.label, part.name, config, self.weights, batch, expected)

    @property
    def unchecked(self) -> dict[str, str]:
        """The full name of each tensor that no run expects, and why."""
        reasons = {f"outputs/{name}": reason for name, reason in self.part.unchecked.items()}
        positions = f"outputs/{self.part.positions.output}"
        if self.part.positions.output is not None:
            reasons[positions] = "is loaded as the position table, so that it is used as stored"
        if self.part.mask is not None:
            reasons[f"inputs/{self.part.mask.ids}"] = (
                "is not used: the source was given another mask, or none"
            )
        nowhere = f"the table of {self.source} has no place for it in this configuration"
        return {
            name: next(
                (
                    reason
                    for key, reason in reasons.items()
                    if name == key or (key.endswith("/") and name.startswith(key))
                ),
                nowhere,
            )
            for name in self.tensors
            if name not in self.used or name == positions
        }

    # Training.

    def _trained(self) -> GoldenTraining:
        """Return the training run of the file."""
        if self.table.training is None:
            raise SpecError(
                f"it holds a training run, but the table of {self.source} does not say how that source trains"
            )
        steps = self._steps()
        for (batch,) in steps:
            validate_batch(self.config, batch, self.part.name)
        expected = Arrays()
        for name, ours in ((LOSSES, "losses.0"), ("outputs/global_norm_source", "norm")):
            array = self.take(name)
            if array is not None and array.shape != (len(steps),):
                raise SpecError(
                    f"{name!r} has shape {array.shape} but must be {(len(steps),)}: one number for each step"
                )
            for step, value in enumerate(() if array is None else array):
                expected[f"steps.{step}.{ours}"] = np.asarray(value)
        entries, problems = parameters(self.config, self.part.name), list[str]()
        for prefix, step in (("outputs/step1_weights/", 0), ("outputs/final_weights/", len(steps) - 1)):
            for name, array in self.take_parameters(prefix, trainable=False).items():
                if entries[name].trainable:
                    expected[f"steps.{step}.parameters.{name}"] = array
                elif not np.array_equal(array, self.weights[name]):
                    problems.append(f"{prefix}: {name!r} is not what it was, but must be: it is not trained")
        refuse(problems)
        rounded = self.table.training.float32_positions and POSITIONS in self.weights
        return self._training(steps, expected, {POSITIONS: float32_noise(self.config)} if rounded else {})

    def _steps(self) -> list[list[Batch]]:
        """Return the batch of each step: inputs have a leading axis of steps."""
        losses = self.tensors[LOSSES]
        if losses.ndim != 1 or not losses.size:
            raise SpecError(
                f"{LOSSES!r} has shape {losses.shape} but must have one number for each step, "
                "and at least one"
            )
        found, problems = dict[str, list[NDArray[Any]]](), list[str]()
        for name, native in self.part.inputs.items():
            own = f"inputs/{native.name}"
            array = self.take(own)
            if array is None or array.ndim < 2 or not array.size:
                actual = "is missing" if array is None else f"has shape {array.shape}"
                problems.append(f"{own!r} {actual} but must have a leading axis of steps")
            else:
                found[name] = [laid_out(own, step, native.layout) for step in array]
        lengths = sorted({len(losses), *map(len, found.values())})
        if len(lengths) != 1:
            said = " and ".join(map(str, lengths))
            problems.append(f"inputs and losses have {said} steps but must have as many")
        refuse(problems)
        return [
            [from_arrays({name: steps[step] for name, steps in found.items()})] for step in range(len(losses))
        ]

    def _clipped(self, batch: Batch) -> GoldenTraining | None:
        """Return what the source made of the gradients of one batch; None if the file does not say."""
        prefix = "outputs/clipped_grads/"
        if not self.section(prefix) or self.table.training is None:
            return None
        expected = {f"steps.0.clipped.{name}": array for name, array in self.take_parameters(prefix).items()}
        norm = self.take("outputs/global_norm_source")
        if norm is not None:
            expected["steps.0.norm"] = np.asarray(norm)
        return self._training([[batch]], expected)

    def _training(
        self, steps: list[list[Batch]], expected: Arrays, uncertain: Mapping[str, NDArray[Any]] = {}
    ) -> GoldenTraining:
        """Return training as the source's configuration describes it."""
        assert self.table.training is not None
        training = Training(recipe_of(self.stated, self.table), steps, reported=(0, len(steps) - 1))
        deviations = {**self.deviations, **self.table.training.deviations}
        return GoldenTraining(
            JudgedTraining(
                self.config, self.weights, training, self.part.name, self.dtype, deviations, uncertain
            ),
            expected,
        )


def read(path: Path | str) -> GoldenFile:
    """Read a golden file.

    Raises:
        SpecError: if it is missing, truncated or corrupt, if its source is unknown, if its configuration
            describes no model of the family, or if a tensor is missing or misshapen; each line says file,
            what, and what is required, tensors in the source's own names.
    """
    metadata, tensors = read_described(Path(path))
    with located(str(path)):
        return GoldenFile(metadata, tensors)


def recipe_of(stated: Mapping[str, Any], table: Table) -> Recipe:
    """Return the recipe that a source's configuration describes.

    Raises:
        ConfigError: if it describes none.
    """
    assert table.training is not None
    fields = dict(table.training.constants)
    for name, key in table.training.fields.items():
        first, _, place = key.partition(".")
        if first not in stated:
            continue
        try:
            fields[name] = stated[first][int(place)] if place else stated[first]
        except (TypeError, IndexError, KeyError):
            raise SpecError(
                f"key {first!r} of {STATED} is {stated[first]!r} but must be a "
                f"list: its entry {place} gives {name!r}"
            ) from None
    return recipe_from_mapping(fields, where=STATED)


def laid_out(
    name: str,
    array: NDArray[Any],
    layout: str,
    sizes: Mapping[str, int] = {},
    shape: tuple[int, ...] | None = None,
    key: str = "",
) -> NDArray[Any]:
    """Return a tensor of a source in the canonical layout.

    Args:
        layout: that it has in the source.
        sizes: of axes.
        shape: that it must have then, as ``key``; any by default.

    Raises:
        SpecError: if it does not have the layout.
    """
    meaning, function = TENSOR_LAYOUTS[layout]
    with contextlib.suppress(ValueError, IndexError):
        found = contiguous(function(array, sizes))
        if shape in (None, found.shape):
            return found
    made = f", which makes {shape} of it for {key!r}" if shape is not None else ""
    raise SpecError(f"{name!r} has shape {array.shape} but must be {meaning}{made}")
