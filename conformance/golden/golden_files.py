"""Golden files: tensors of published sources, as jobs for backends (conformance/golden/README.md).

Tables map a source's names to ours (:mod:`concord.spec.sources.schema`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord import CHECKOUT
from concord.conformance.judging.expectation import Expectation, JudgedTraining
from concord.conformance.judging.family import SUM, expect
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.run.campaign import Job
from concord.conformance.wording import counted
from concord.spec import errors
from concord.spec.arrays import Arrays, Shape
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import Deviations
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.files import find, parse_json, read_described, section, typed
from concord.spec.parameters import trainable
from concord.spec.positions import float32_noise
from concord.spec.reference import predict
from concord.spec.sources.layouts import TENSOR_LAYOUTS, contiguous
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import Native, RunEntry
from concord.spec.sources.source_tables import (
    POSITIONS,
    bindings,
    canonical,
    configure,
    gather,
    load,
    sources,
)
from concord.spec.tensors import resolve, sizes_of, taps
from concord.spec.training.recipe import recipe_from_mapping
from concord.spec.training.trajectory import Training

# The selection in this package.
INCLUDED = Path(__file__).parent

# The whole collection, if it is next to a checkout.
SHARED = Path(__file__).parents[3] / "shared" / "golden"

# The folder that the pytest suite checks by default.
DEFAULT = SHARED if CHECKOUT and SHARED.is_dir() else INCLUDED

# Tensors of training files: losses before each step, the clipping norm, and clipped gradients.
LOSSES, NORM, CLIPPED = "outputs/losses", "outputs/global_norm_source", "outputs/clipped_grads/"

STATED = "the metadata's 'config'"


def collect(directory: Path) -> tuple[list[Job], dict[str, str]]:
    """Read every golden file under a folder.

    Returns:
        A job per run of each file, and the reason for each tensor not compared.

    Raises:
        SpecError: if no file exists, or listing the problems of all files.
    """
    paths = find(directory, "*.safetensors")
    if not paths:
        raise SpecError(f"{directory} holds no golden files (*.safetensors)")
    files: list[GoldenFile] = errors.collect(*(partial(read, path) for path in paths))
    unchecked = Counter(
        ("/".join(name.split("/")[:2]), why) for file in files for name, why in file.unchecked.items()
    )
    notes = {f"not compared, {count} x {name}": why for (name, why), count in sorted(unchecked.items())}
    return [job for file in files for job in file.jobs], notes


def read(path: Path | str) -> GoldenFile:
    """Read a golden file.

    Raises:
        SpecError: listing corrupt, unknown, missing or misshapen tensors by the source's names.
    """
    metadata, tensors = read_described(Path(path))
    with located(str(path)):
        return GoldenFile(metadata, tensors)


@dataclass(frozen=True)
class Metadata:
    """Metadata of a golden file; ``config`` is the source's configuration as JSON."""

    source: str
    case: str
    dtype: Literal["float64", "float32"]
    config: str


class GoldenFile:
    """The jobs of a file.

    Attributes:
        unchecked: each tensor that no job compares, with the reason.
    """

    def __init__(self, metadata: Mapping[str, str], tensors: Arrays) -> None:
        self.about = typed(Metadata, json.dumps(metadata))
        self.tensors, self.used = tensors, set[str]()
        self.stated = parse_json(self.about.config, STATED)
        if not isinstance(self.stated, dict):
            raise SpecError(f"{STATED} is a JSON {type(self.stated).__name__} but must be an object")
        names = [name for name in sources() if any(part.runs for part in load(name).parts.values())]
        refuse(errors.unknowns("source", [self.about.source], names))
        self.table = load(self.about.source)
        key = self.table.part_key or ""
        kind, parts = str(self.stated.get(key, "")), self.table.parts.values()
        candidates = [part for part in parts if kind.startswith(part.kind)]
        if not candidates:
            refuse(errors.unknowns(f"{key!r} in {STATED}", [kind], [part.kind for part in parts]))
        self.part = candidates[0]
        self.config = configure(self.table, self.stated, self.part.name, where=STATED)
        positions = self.take(f"outputs/{self.part.positions.output}")
        # The stored table limits text length.
        if positions is not None and positions.ndim == 2:
            self.config = self.config.replace(max_positions=len(positions))
        weights = section(tensors, "weights/")  # all weights, so that an unknown one is refused
        self.weights = canonical(self.table, self.config, weights, self.part.name, positions)
        self.trainable = trainable(self.config, self.part.name)
        self.jobs = self._trained() if LOSSES in tensors else self._ran()
        nowhere = f"the table of {self.about.source} has no place for it in this configuration"
        self.unchecked = {
            name: self.part.unchecked.get(name.removeprefix("outputs/"), nowhere)
            for name in tensors
            if name not in self.used and not name.startswith("weights/")
        }

    def take(self, name: str, required: bool = False) -> Any:
        """Return a tensor, or None if missing, and mark it as used."""
        self.used.add(name)
        if required and name not in self.tensors:
            raise SpecError(f"{name!r} is missing but is required")
        return self.tensors.get(name)

    def _parameters(
        self, names: Collection[str], prefix: str, instead: Mapping[str, Native] | None = None
    ) -> Arrays:
        places = bindings(self.part, self.config, instead)
        places = {name: place for name, place in places.items() if name in names}
        with located(prefix):
            arrays, problems = gather(places, section(self.tensors, prefix), f"source={self.about.source}")
            refuse(problems)
        self.used.update(f"{prefix}{name}" for place in places.values() for name in place.names)
        return arrays

    def _batches(self, steps: int = 0) -> list[Batch]:
        """Batch of each step; a file without steps has one batch."""
        inputs, problems = [Arrays() for _ in range(steps or 1)], list[str]()
        for key, native in self.part.inputs.items():
            with collecting(problems):
                array = self.take(name := f"inputs/{native.name}", required=True)
                if steps and array.shape[:1] != (steps,):
                    raise SpecError(
                        f"{name!r} has shape {array.shape} but must begin with {counted(steps, 'step')}"
                    )
                for step, value in zip(inputs, array if steps else array[None], strict=True):
                    step[key] = laid_out(name, value, native.layout)
        refuse(problems)
        batches = [from_arrays(step | self._key_mask(step)) for step in inputs]
        for batch in batches:
            validate_batch(self.config, batch, self.part.name)
        return batches

    def _key_mask(self, inputs: Arrays) -> Arrays:
        """The key mask, (B, S) or (B, Q, S), if any."""
        source = self.part.mask
        if source is None:
            # The part derives its mask from the ids (SPEC MSK-1); a stored mask must be the same.
            if (mask := self.take("inputs/mask")) is not None:
                real = inputs["input_ids"] != self.config.pad_id
                if mask.ndim == 3:
                    real = np.repeat(real[:, None], mask.shape[1], axis=1)
                if not np.array_equal(mask != 0, real):
                    raise SpecError("'inputs/mask' must be the mask of the ids, but is not")
            return {}
        names = fnmatch.filter(self.tensors, f"inputs/{source.stored}")
        stated = bool(names) or self.stated.get(source.none.key) == source.none.value
        ids = self.take(f"inputs/{source.ids}", required=not stated)
        if names:
            return {"key_mask": np.asarray(self.take(names[0]) != 0)}
        return {} if stated else {"key_mask": np.asarray(ids != self.config.pad_id)}

    def _ran(self) -> list[Job]:
        (batch,) = self._batches()
        entries = [
            entry
            for entry in self.part.runs
            if not entry.only or any(f"outputs/{name}" in self.tensors for name in entry.outputs)
        ]
        jobs = [self._run(entry, batch, f":{entry.label}" if len(entries) > 1 else "") for entry in entries]
        if section(self.tensors, CLIPPED):
            clipped = self._parameters(self.trainable, CLIPPED)
            expected = self._reported(1) | {
                f"steps.0.clipped.{name}": gradient for name, gradient in clipped.items()
            }
            jobs.append(self._training([batch], expected, ":clipping"))
        return jobs

    def _run(self, entry: RunEntry, batch: Batch, label: str) -> Job:
        part, config, inputs = self.part, self.config.replace(**entry.fields), batch.arrays()
        sizes, expected, problems = sizes_of(config, inputs), Arrays(), list[str]()
        shapes = {name: resolve(tap.shape, sizes) for name, tap in taps(config, part.name, inputs).items()}
        shapes["predictions"] = (sizes["batch"],)

        def expect_tensor(name: str, key: str, layout: str, shape: Shape, required: bool) -> None:
            if (array := self.take(name, required)) is None:
                return
            array = laid_out(name, array, layout, sizes, shape, key)
            if not np.array_equal(expected.setdefault(key, array), array, equal_nan=True):
                raise SpecError(f"{name!r} differs from another tensor that is also {key!r}")

        for pattern, output in (entry.outputs if entry.only else {**part.outputs, **entry.outputs}).items():
            for i in range(config.num_layers if "i" in variables(pattern) else 1):
                values: dict[str, int | str] = {"i": i, "n": config.num_layers, "run": entry.label}
                name, tap = f"outputs/{fill(pattern, values)}", fill(output.tap, values)
                if tap in shapes:
                    with collecting(problems):
                        expect_tensor(name, tap, output.layout, shapes[tap], output.required)
        prefix = f"grads/{fill(part.gradients.under, {'run': entry.label})}"
        if not entry.only and section(self.tensors, prefix):
            with collecting(problems):
                gradients = self._parameters(self.trainable, prefix, entry.gradients)
                expected |= {f"gradients.{name}": array for name, array in gradients.items()}
            for name, gradient in part.gradients.inputs.items():
                key = SUM.join(f"gradients.inputs.{summand}" for summand in gradient.sum_of)
                shape = inputs[gradient.sum_of[0]].shape
                with collecting(problems):
                    expect_tensor(f"{prefix}{name}", key, gradient.layout, shape, required=False)
        refuse(problems)
        classes = expected.pop("predictions", None)
        if classes is not None and not np.array_equal(classes, predict(config, expected["logits"])):
            raise SpecError("the predictions are not the classes that the logits give (SPEC HED-4)")
        return self._job(config, batch, expected, label)

    def _trained(self) -> list[Job]:
        # Each step's reports are compared, and two states of the weights.
        losses = self.tensors[LOSSES]
        if losses.ndim != 1 or not losses.size:
            raise SpecError(f"{LOSSES!r} has shape {losses.shape} but must have one value for each step")
        steps = len(losses)
        batches, expected = self._batches(steps), self._reported(steps)
        problems = list[str]()
        for prefix, step in (("outputs/step1_weights/", 0), ("outputs/final_weights/", steps - 1)):
            for name, array in self._parameters(self.weights, prefix).items():
                if name in self.trainable:
                    expected[f"steps.{step}.parameters.{name}"] = array
                elif not np.array_equal(array, self.weights[name]):
                    problems.append(f"{prefix}: {name!r} has changed, but must not: it is not trained")
        refuse(problems)
        return [self._training(batches, expected)]

    def _reported(self, steps: int) -> Arrays:
        reported = Arrays()
        for name, key in ((LOSSES, "losses.0"), (NORM, "norm")):
            array = self.take(name)
            if array is not None and array.size != steps:
                raise SpecError(f"{name!r} has shape {array.shape} but must have one value for each step")
            for step, value in enumerate([] if array is None else array.reshape(-1)):
                reported[f"steps.{step}.{key}"] = np.asarray(value)
        return reported

    def _training(self, batches: Sequence[Batch], expected: Arrays, label: str = "") -> Job:
        table = self.table.training
        if table is None:
            source = self.about.source
            raise SpecError(
                f"it holds a training run, but the table of {source} does not say how this source trains"
            )
        stated = dict(self.stated)
        for key, value in self.stated.items():
            stated.update(
                {f"{key}.{i}": entry for i, entry in enumerate(value if isinstance(value, list) else [])}
            )
        fields = {name: stated[key] for name, key in table.fields.items() if key in stated}
        recipe = recipe_from_mapping({**table.constants, **fields}, where=STATED)
        training = Training(recipe, [[batch] for batch in batches], reported=(0, len(batches) - 1))
        return self._job(self.config, batches[0], expected, label, training)

    def _job(
        self,
        config: EncoderConfig,
        batch: Batch,
        published: Arrays,
        label: str,
        training: Training | None = None,
    ) -> Job:
        about, table = self.about, self.table
        name = f"{about.source}/{about.case}{label}"
        job = Job(
            about.source, name, about.dtype, self.part.name, config, self.weights, batch, training=training
        )
        deviations, uncertain = table.deviations, Arrays()
        if training and table.training:
            deviations = {**deviations, **table.training.deviations}
            # Training files have no position table, so a source's float32 table is uncertain.
            if table.training.float32_positions and POSITIONS in self.weights and LOSSES in self.tensors:
                uncertain = {POSITIONS: float32_noise(config)}
        return replace(job, expectation=partial(expectation_of, job, published, deviations, uncertain))


def expectation_of(
    job: Job, published: Arrays, followed: Deviations, uncertain: Arrays, deviations: Deviations
) -> Expectation:
    """A source's tensors with the reference's sigmas; training adds the reference's other tensors.

    Args:
        published: tensors by name; a sum by all its names (:data:`SUM`).
        followed: deviations of the source.
        uncertain: bounds on the source's differences from the stored weights.
    """

    def reference(deviations: Deviations, uncertain: Arrays) -> Expectation:
        if job.training is None:
            return expect(job.config, job.weights, job.batch, job.part, job.dtype, deviations)
        case = (job.config, job.weights, job.training, job.part, job.dtype, deviations, uncertain)
        return of_training(JudgedTraining(*case))

    source, base = reference(followed, uncertain), reference(deviations, {})
    order, clauses = list(base.values), dict(base.clauses)
    values, sigmas = (dict(base.values), dict(base.sigmas)) if job.training else ({}, {})
    for key in sorted(published, key=lambda key: order.index(key.split(SUM)[0])):
        names = key.split(SUM)
        # If the backend's deviations differ from the source's, the published tensor is shifted by the
        # difference between both references.
        shift = sum(base.values[name] - source.values[name] for name in names)
        values[key] = published[key].astype(np.float64) + shift
        # The source rounded as much as a backend, unlike the reference, so both errors count.
        sigmas[key] = reduce(
            np.hypot, [expectation.sigmas[name] for name in names for expectation in (base, source)]
        )
        clauses[key] = base.clauses[names[0]]
    return replace(base, values=values, sigmas=sigmas, clauses=clauses)


def laid_out(
    name: str,
    array: NDArray[Any],
    layout: str,
    sizes: Mapping[str, int] = {},
    shape: Shape | None = None,
    key: str = "",
) -> NDArray[Any]:
    """Convert to the canonical layout and the shape of ``key``."""
    meaning, function = TENSOR_LAYOUTS[layout]
    with contextlib.suppress(ValueError, IndexError):
        tensor = contiguous(function(array, sizes))
        if shape in (None, tensor.shape):
            return tensor
    result = f"; the result must have shape {shape} for {key!r}" if shape is not None else ""
    raise SpecError(f"{name!r} has shape {array.shape}, but layout {layout!r} takes {meaning}{result}")
