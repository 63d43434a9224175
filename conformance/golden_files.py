"""Golden files: tensors that published sources computed, as jobs that say whether backends reproduce them.

Which name of the source is what is in its table (:mod:`concord.spec.sources.schema`); nothing here knows a
source. On disk they are safetensors, with what they are in the metadata.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord import CHECKOUT
from concord.conformance.campaign import Job
from concord.conformance.expectation import Expectation, JudgedProblem, JudgedTraining
from concord.conformance.judging import SUM
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.tolerance import expect
from concord.spec import errors
from concord.spec.arrays import Arrays
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.deviations import Deviations
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.files import find, parse_json, read_described, section, typed
from concord.spec.parameters import parameters
from concord.spec.positions import float32_noise
from concord.spec.reference import predict
from concord.spec.sources.layouts import TENSOR_LAYOUTS, contiguous
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import Native, PartTable, RunEntry, Table
from concord.spec.sources.table import (
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

INCLUDED = Path(__file__).parent / "golden"
"""The selection that comes with this package."""

SHARED = Path(__file__).parents[2] / "shared" / "golden"
"""The whole collection, where it lies beside a checkout."""

DEFAULT = SHARED if CHECKOUT and SHARED.is_dir() else INCLUDED
"""The folder that the pytest suite checks by default."""

LOSSES, NORM = "outputs/losses", "outputs/global_norm_source"
"""The loss before each step, which only files of training have, and the norm that clips gradients."""

CLIPPED = "outputs/clipped_grads/"

STATED = "the metadata's 'config'"


def collect(directory: Path) -> tuple[list[Job], dict[str, str]]:
    """Read every golden file under a folder.

    Returns:
        A job for each run of each file; what is not checked, and why.

    Raises:
        SpecError: if there is none, or listing everything that is wrong with those that there are.
    """
    paths = find(directory, "*.safetensors")
    if not paths:
        raise SpecError(f"{directory}: holds no golden files (*.safetensors)")
    files: list[GoldenFile] = errors.collect(*(partial(read, path) for path in paths))
    unchecked = Counter(
        ("/".join(name.split("/")[:2]), why) for file in files for name, why in file.unchecked.items()
    )
    notes = {f"not compared, {count} x {name}": why for (name, why), count in sorted(unchecked.items())}
    return [job for file in files for job in file.jobs], notes


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


@dataclass(frozen=True)
class Metadata:
    """What the metadata of a golden file say; ``config`` is the source's configuration as JSON."""

    source: str
    case: str
    dtype: Literal["float64", "float32"]
    config: str


class GoldenFile:
    """What a golden file holds, in canonical terms.

    Args:
        metadata: of the file.
        tensors: by full name, ``weights/…``, ``inputs/…``, ``outputs/…``, ``grads/…``.

    Attributes:
        about: the metadata.
        stated: the source's own configuration.
        used: full names of the tensors that something was made of.
        part: of the model that it is about.
        config, weights: of the model, before what a run changes of it.
        jobs: what the source ran or trained on these weights, to be run again.

    Raises:
        SpecError: listing what is missing, misshapen or unknown.
    """

    def __init__(self, metadata: Mapping[str, str], tensors: Arrays) -> None:
        self.about = typed(Metadata, json.dumps(metadata))
        self.tensors, self.used = tensors, set[str]()
        self.stated = parse_json(self.about.config, STATED)
        if not isinstance(self.stated, dict):
            raise SpecError(f"{STATED} is a JSON {type(self.stated).__name__} but must be an object")
        known = [name for name in sources() if any(part.runs for part in load(name).parts.values())]
        refuse(errors.unknowns("source", [self.about.source], known))
        self.table: Table = load(self.about.source)
        self.part: PartTable = self._part()
        self.config = configure(self.table, self.stated, self.part.name, where=STATED)
        positions = self.take(f"outputs/{self.part.positions.output}")
        if positions is not None and positions.ndim == 2:
            self.config = self.config.replace(max_positions=len(positions))
        weights = section(tensors, "weights/")  # all of them: what has no place is refused
        self.weights = canonical(self.table, self.config, weights, self.part.name, positions)
        self.jobs = [self._trained()] if LOSSES in tensors else self._ran()

    @property
    def unchecked(self) -> dict[str, str]:
        """The full name of each tensor that nothing was made of, and why."""
        nowhere = f"the table of {self.about.source} has no place for it in this configuration"
        return {
            name: self.part.unchecked.get(name.removeprefix("outputs/"), nowhere)
            for name in self.tensors
            if name not in self.used and not name.startswith("weights/")
        }

    # Tensors of the file.

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
        places = {
            name: place
            for name, place in bindings(self.part, self.config, instead).items()
            if entries[name].trainable or not trainable
        }
        with located(prefix):
            found, problems = gather(places, section(self.tensors, prefix), f"source={self.about.source}")
            refuse(problems)
        self.used.update(f"{prefix}{own}" for place in places.values() for own in place.names)
        return found

    def _part(self) -> PartTable:
        """Return what the table says of the part of the model that the file is about."""
        key = self.table.part_key
        kind = str(self.stated.get(key, "")) if key else ""
        for part in self.table.parts.values():
            if kind.startswith(part.kind):
                return part
        kinds = ", ".join(repr(part.kind) for part in self.table.parts.values())
        raise SpecError(f"key {key!r} of {STATED} is {kind!r} but must begin with one of {kinds}")

    def _inputs(self, steps: int | None = None) -> list[Arrays]:
        """Return the inputs; of training those of each step, over which they have a leading axis."""
        found, problems = [Arrays() for _ in range(steps or 1)], list[str]()
        for name, native in self.part.inputs.items():
            own = f"inputs/{native.name}"
            array = self.take(own)
            if array is None:
                problems.append(f"{own!r} is missing but is required")
            elif steps is not None and array.shape[:1] != (steps,):
                problems.append(
                    f"{own!r} has shape {array.shape} but must have a leading axis of {steps} steps"
                )
            else:
                for batch, given in zip(found, [array] if steps is None else array, strict=True):
                    batch[name] = laid_out(own, given, native.layout)
        refuse(problems)
        return found

    def _batch(self, arrays: Arrays) -> Batch:
        """Return a batch that is valid for the part."""
        batch = from_arrays(arrays)
        validate_batch(self.config, batch, self.part.name)
        return batch

    def _key_mask(self, inputs: Arrays) -> Arrays:
        """Return the key mask, (B, S) or (B, Q, S), True where a key is visible; nothing: there is none.

        Raises:
            SpecError: if a stored mask is not that of the ids, where the part makes its own (SPEC MSK-1).
        """
        source = self.part.mask
        if source is None:
            stored, real = self.take("inputs/mask"), inputs["input_ids"] != self.config.pad_id
            if stored is None:
                return {}
            visible = stored[:, None] != 0 if stored.ndim == 2 else stored != 0  # (B, 1 or Q, S)
            if visible.ndim != 3 or visible.shape[::2] != real.shape or (visible != real[:, None]).any():
                raise SpecError(
                    "'inputs/mask' is not the mask of the ids, but must be: this part takes no other"
                )
            return {}
        masks = fnmatch.filter(self.tensors, f"inputs/{source.stored}")
        if len(masks) > 1:
            raise SpecError(f"{', '.join(map(repr, masks))} are there, but one mask at most may be stored")
        stored = self.take(masks[0]) if masks else None
        ids = self.take(f"inputs/{source.ids}")
        if stored is not None:
            return {"key_mask": np.asarray(stored != 0)}
        if self.stated.get(source.none.key) == source.none.value:
            return {}
        if ids is None:
            raise SpecError(
                f"'inputs/{source.ids}' is missing, but it or 'inputs/{source.stored}' is required: the key "
                f"mask follows from it"
            )
        return {"key_mask": np.asarray(ids != self.config.pad_id)}

    # What the source ran.

    def _ran(self) -> list[Job]:
        """Return a job for each run on the inputs, and one for what clipping made of its gradients."""
        (inputs,) = self._inputs()
        batch = self._batch({**inputs, **self._key_mask(inputs)})
        entries = [
            entry
            for entry in self.part.runs
            if not entry.only or any(f"outputs/{name}" in self.tensors for name in entry.outputs)
        ]
        jobs = [self._run(entry, batch, f":{entry.label}" if len(entries) > 1 else "") for entry in entries]
        if section(self.tensors, CLIPPED):
            clipped = self.take_parameters(CLIPPED)
            expected = self._reported(1) | {f"steps.0.clipped.{name}": one for name, one in clipped.items()}
            jobs.append(self._training([batch], expected, ":clipping"))
        return jobs

    def _run(self, entry: RunEntry, batch: Batch, label: str) -> Job:
        """Return the job of a run, with every output and gradient that the file has.

        Outputs that the table requires must be there, and gradients of all trainable weights, or none.
        """
        part, config, given = self.part, self.config.replace(**entry.fields), batch.arrays()
        sizes, expected, problems = sizes_of(config, given), Arrays(), list[str]()
        shapes = {name: resolve(tap.shape, sizes) for name, tap in taps(config, part.name, given).items()}
        shapes["predictions"] = (sizes["batch"],)

        def add(name: str, key: str, layout: str, shape: tuple[int, ...], required: bool) -> None:
            """Expect a tensor that is there; two that are one tap hold the same numbers."""
            array = self.take(name)
            if array is None:
                problems.extend([f"{name!r} is missing but is required: it is {key!r}"] if required else [])
            elif array.dtype.kind != "f" and key != "predictions":
                problems.append(f"{name!r} has dtype {array.dtype} but must be floating-point: it is {key!r}")
            else:
                with collecting(problems):
                    array = laid_out(name, array, layout, sizes, shape, key)
                    if not np.array_equal(expected.setdefault(key, array), array, equal_nan=True):
                        problems.append(f"{name!r} differs from another tensor that is {key!r} too")

        outputs = entry.outputs if entry.only else {**part.outputs, **entry.outputs}
        for pattern, output in outputs.items():
            for i in range(config.num_layers if "i" in variables(pattern) else 1):
                values: dict[str, int | str] = {"i": i, "n": config.num_layers, "run": entry.label}
                tap = fill(output.tap, values)
                if tap in shapes:
                    own = f"outputs/{fill(pattern, values)}"
                    add(own, tap, output.layout, shapes[tap], output.required)
        prefix = f"grads/{fill(part.gradients.under, {'run': entry.label})}"
        if not entry.only and section(self.tensors, prefix):
            with collecting(problems):
                found = self.take_parameters(prefix, instead=entry.gradients)
                expected |= {f"gradients.{name}": array for name, array in found.items()}
            for name, gradient in part.gradients.inputs.items():
                key = SUM.join(f"gradients.inputs.{one}" for one in gradient.sum_of)
                add(f"{prefix}{name}", key, gradient.layout, given[gradient.sum_of[0]].shape, False)
        refuse(problems)
        classes = expected.pop("predictions", None)
        if classes is not None and not np.array_equal(classes, predict(config, expected["logits"])):
            raise SpecError("the predictions are not the classes of the logits (SPEC HED-4)")
        about = self.about
        problem = JudgedProblem(config, self.weights, batch, part.name, about.dtype, self.table.deviations)
        return self._job(problem, batch, expected, label)

    # How the source trained.

    def _trained(self) -> Job:
        """Return the job of a training run: what was reported of each step, and two states of the weights."""
        losses = self.tensors[LOSSES]
        if losses.ndim != 1 or not losses.size:
            raise SpecError(f"{LOSSES!r} has shape {losses.shape} but must have one number for each step")
        steps = len(losses)
        batches = [self._batch(arrays) for arrays in self._inputs(steps)]
        expected = self._reported(steps)
        entries, problems = parameters(self.config, self.part.name), list[str]()
        for prefix, step in (("outputs/step1_weights/", 0), ("outputs/final_weights/", steps - 1)):
            for name, array in self.take_parameters(prefix, trainable=False).items():
                if entries[name].trainable:
                    expected[f"steps.{step}.parameters.{name}"] = array
                elif not np.array_equal(array, self.weights[name]):
                    problems.append(f"{prefix}: {name!r} is not what it was, but must be: it is not trained")
        refuse(problems)
        return self._training(batches, expected)

    def _reported(self, steps: int) -> Arrays:
        """Return the loss and the norm of each step, as far as they are there."""
        found = Arrays()
        for name, ours in ((LOSSES, "losses.0"), (NORM, "norm")):
            array = self.take(name)
            if array is not None and array.size != steps:
                raise SpecError(f"{name!r} has shape {array.shape} but must have one number for each step")
            for step, value in enumerate(() if array is None else array.reshape(-1)):
                found[f"steps.{step}.{ours}"] = np.asarray(value)
        return found

    def _training(self, batches: Sequence[Batch], expected: Arrays, label: str = "") -> Job:
        """Return the job that trains on a batch in each step, as the source's configuration describes it."""
        table = self.table.training
        if table is None:
            raise SpecError(
                f"it holds a training run, but the table of {self.about.source} does not say how that source "
                "trains"
            )
        entries = {
            f"{key}.{place}": value
            for key, values in self.stated.items()
            if isinstance(values, list)
            for place, value in enumerate(values)
        }
        known = {**self.stated, **entries}
        fields = {name: known[key] for name, key in table.fields.items() if key in known}
        recipe = recipe_from_mapping({**table.constants, **fields}, where=STATED)
        training = Training(recipe, [[batch] for batch in batches], reported=(0, len(batches) - 1))
        computed = table.float32_positions and POSITIONS in self.weights and LOSSES in self.tensors
        problem = JudgedTraining(
            self.config,
            self.weights,
            training,
            self.part.name,
            self.about.dtype,
            {**self.table.deviations, **table.deviations},
            {POSITIONS: float32_noise(self.config)} if computed else {},
        )
        return self._job(problem, batches[0], expected, label)

    def _job(
        self, problem: JudgedProblem | JudgedTraining, batch: Batch, expected: Arrays, label: str
    ) -> Job:
        source, name = self.about.source, f"{self.about.source}/{self.about.case}{label}"
        return Job(
            source,
            name,
            problem.dtype,
            problem.part,
            problem.config,
            problem.weights,
            batch,
            partial(expectation_of, problem, expected),
            training=problem.training if isinstance(problem, JudgedTraining) else None,
        )


def expectation_of(
    problem: JudgedProblem | JudgedTraining, published: Arrays, deviations: Deviations
) -> Expectation:
    """Return a source's tensors, with the sigmas of those of ours that they are, or are the sum of.

    Of training the reference's tensors too, which the source did not report.

    Args:
        problem: what the source computed, with what its framework deviates in.
        published: its tensors by our name; a sum of ours by all their names (:data:`SUM`).
        deviations: that the backend declares. Where the source has others, its tensors are moved by what the
            reference says that the difference makes.
    """
    source = _truth(problem)
    if isinstance(problem, JudgedTraining):
        base = _truth(replace(problem, deviations=deviations, uncertain={}))
        values, sigmas = dict(base.values), dict(base.sigmas)
    else:
        base, values, sigmas = _truth(replace(problem, deviations=deviations)), {}, {}
    order, clauses = list(base.values), dict(base.clauses)
    for key in sorted(published, key=lambda key: order.index(key.split(SUM)[0])):
        names = key.split(SUM)
        moved = sum(base.values[name] - source.values[name] for name in names)
        values[key] = published[key].astype(np.float64) + moved
        # The source rounded as much as a backend does; the oracle does not.
        sigmas[key] = reduce(np.hypot, [each.sigmas[name] for name in names for each in (base, source)])
        clauses[key] = base.clauses[names[0]]
    return replace(base, values=values, sigmas=sigmas, clauses=clauses)


def _truth(problem: JudgedProblem | JudgedTraining) -> Expectation:
    if isinstance(problem, JudgedTraining):
        return of_training(problem)
    return expect(
        problem.config, problem.weights, problem.batch, problem.part, problem.dtype, problem.deviations
    )


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
