"""Golden files of training: what a source did to its weights, step by step, in canonical terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.expectation import JudgedTraining
from concord.conformance.golden_files.file import SourceFile, laid_out
from concord.spec.batch import Batch, from_arrays, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, refuse
from concord.spec.parameters import parameters
from concord.spec.positions import float32_noise
from concord.spec.sources.schema import PartTable, Table
from concord.spec.sources.table import bindings
from concord.spec.training.recipe import Recipe, recipe_from_mapping
from concord.spec.training.trajectory import Training

POSITIONS = "embeddings.position.weight"


@dataclass(frozen=True, eq=False)
class GoldenTraining:
    """The training run of a file, in canonical terms.

    Attributes:
        problem: the model, how it was trained, and in what the source's framework deviates.
        expected: what the source reported, by the names that
            :class:`concord.spec.training.trajectory.Trajectory` reports it under.
    """

    problem: JudgedTraining
    expected: dict[str, NDArray[Any]]


def read_training(
    file: SourceFile, table: Table, part: PartTable, config: EncoderConfig, weights: dict[str, NDArray[Any]]
) -> GoldenTraining:
    """Read the training run of a file.

    Raises:
        SpecError: listing what is missing or misshapen.
    """
    if table.training is None:
        raise SpecError(
            f"it holds a training run, but the table of {table.source} does not say how that source trains"
        )
    inputs, steps = _inputs(file, part)
    given = [[from_arrays({name: array[step] for name, array in inputs.items()})] for step in range(steps)]
    for batches in given:
        validate_batch(config, batches[0], part.name)
    expected = _results(file, part, config, weights, steps)
    rounded = table.training.float32_positions and POSITIONS in weights
    uncertain = {POSITIONS: float32_noise(config)} if rounded else {}
    return _golden(file, table, part, config, weights, given, expected, uncertain)


def read_clipping(
    file: SourceFile,
    table: Table,
    part: PartTable,
    config: EncoderConfig,
    weights: dict[str, NDArray[Any]],
    batch: Batch,
) -> GoldenTraining | None:
    """Read what a source made of the gradients of one batch; None if the file does not say.

    Raises:
        SpecError: listing what is missing or misshapen.
    """
    prefix = "outputs/clipped_grads/"
    if not file.section(prefix) or table.training is None:
        return None
    known = parameters(config, part.name)
    places = {name: place for name, place in bindings(part, config).items() if known[name].trainable}
    found, problems = file.gather(prefix, places)
    refuse(problems)
    expected = {f"steps.0.clipped.{name}": array for name, array in found.items()}
    norm = file.take("outputs/global_norm_source")
    if norm is not None:
        expected["steps.0.norm"] = np.asarray(norm)
    return _golden(file, table, part, config, weights, [[batch]], expected)


def _golden(
    file: SourceFile,
    table: Table,
    part: PartTable,
    config: EncoderConfig,
    weights: dict[str, NDArray[Any]],
    steps: list[list[Batch]],
    expected: dict[str, NDArray[Any]],
    uncertain: Mapping[str, NDArray[Any]] = {},
) -> GoldenTraining:
    assert table.training is not None
    training = Training(recipe_of(file.config, table), steps, reported=(0, len(steps) - 1))
    deviations = {**table.deviations, **table.training.deviations}
    problem = JudgedTraining(config, weights, training, part.name, file.dtype, deviations, uncertain)
    return GoldenTraining(problem, expected)


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
                f"key {first!r} of the metadata's 'config' is {stated[first]!r} but must be a "
                f"list: its entry {place} gives {name!r}"
            ) from None
    return recipe_from_mapping(fields, where="the metadata's 'config'")


def _inputs(file: SourceFile, part: PartTable) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the inputs, each with a leading axis of steps, and how many steps there are."""
    losses = file.tensors["outputs/losses"]
    if losses.ndim != 1 or not losses.size:
        raise SpecError(
            f"'outputs/losses' has shape {losses.shape} but must have one number for each step, "
            "and at least one"
        )
    found: dict[str, NDArray[Any]] = {}
    problems = []
    for name, native in part.inputs.items():
        array = file.take(f"inputs/{native.name}")
        if array is None or array.ndim < 2 or not array.size:
            actual = "is missing" if array is None else f"has shape {array.shape}"
            problems.append(f"'inputs/{native.name}' {actual} but must have a leading axis of steps")
        else:
            found[name] = np.stack([laid_out(f"inputs/{native.name}", step, native.layout) for step in array])
    lengths = {len(array) for array in found.values()} | {len(losses)}
    if len(lengths) != 1:
        problems.append(
            f"inputs and losses have {' and '.join(map(str, sorted(lengths)))} steps but must have as many"
        )
    if problems:
        raise SpecError(problems)
    return found, lengths.pop()


def _results(
    file: SourceFile, part: PartTable, config: EncoderConfig, weights: Mapping[str, NDArray[Any]], steps: int
) -> dict[str, NDArray[Any]]:
    """Return what the source reported."""
    expected: dict[str, NDArray[Any]] = {}
    for name, ours in (("losses", "losses.0"), ("global_norm_source", "norm")):
        for step, value in enumerate(_of_steps(file, f"outputs/{name}", steps)):
            expected[f"steps.{step}.{ours}"] = np.asarray(value)
    places, table = bindings(part, config), parameters(config, part.name)
    for prefix, step in (("outputs/step1_weights/", 0), ("outputs/final_weights/", steps - 1)):
        found, problems = file.gather(prefix, places)
        problems += [
            f"{prefix}{places[name].names[0]} is not what it was, but must be: {name!r} is not trained"
            for name in found
            if not table[name].trainable and not np.array_equal(found[name], weights[name])
        ]
        refuse(problems)
        expected |= {
            f"steps.{step}.parameters.{name}": array for name, array in found.items() if table[name].trainable
        }
    return expected


def _of_steps(file: SourceFile, name: str, steps: int) -> NDArray[Any]:
    """Return a tensor that has one number for each step; nothing if it is not there."""
    array = file.take(name)
    if array is None:
        return np.zeros(0)
    if array.shape != (steps,):
        raise SpecError(f"{name!r} has shape {array.shape} but must be {(steps,)}: one number for each step")
    return array
