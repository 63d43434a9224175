"""Validation of a source's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from concord.spec.config import FIELDS, EncoderConfig, variant, variants
from concord.spec.errors import SpecError
from concord.spec.parameters import parameters
from concord.spec.sources.layouts import WEIGHT_LAYOUTS
from concord.spec.sources.names import fill
from concord.spec.sources.schema import Native, Output, PartTable, Table
from concord.spec.tensors import PARTS, differentiable_inputs, inputs, taps

# Name prefix of heads outside the family.
HEADS = "heads."


def check(table: Table, where: str) -> list[str]:
    """All problems of a table, with file, key and requirement."""
    if table.variant not in variants():
        return [f"{where}: 'variant' is {table.variant!r} but must be one of {', '.join(variants())}"]
    problems = []
    for name, part in table.parts.items():
        if name not in PARTS:
            problems.append(f"{where}: 'parts.{name}' must be one of {', '.join(PARTS)}")
            continue
        # With two layers, names without a layer number collide.
        try:
            config = variant(
                table.variant,
                **{
                    **{field: value for field, value in part.constants.items() if field in FIELDS},
                    "num_layers": 2,
                },
            )
        except SpecError as error:
            problems += [f"{where}: 'parts.{name}.constants': {problem}" for problem in error.problems]
            continue
        problems += [f"{where}: 'parts.{name}.{problem}" for problem in _part_problems(part, config)]
        if table.part_key is not None and not part.kind:
            problems.append(
                f"{where}: 'parts.{name}.kind' is missing but must say how {table.part_key!r} begins"
            )
    return problems


def _part_problems(part: PartTable, config: EncoderConfig) -> Iterator[str]:
    yield from _unknown("fields", part.fields, FIELDS)
    yield from _unknown("options", part.options, FIELDS)
    yield from _unknown("constants", part.constants, FIELDS)
    yield from _weight_problems("weights", part.weights, part, config)
    yield from _unknown(
        "checkpoint.carried",
        [name for name in part.checkpoint.carried if not name.startswith(HEADS)],
        parameters(config),
    )
    tensors = inputs(config, part.name)
    yield from _unknown("inputs", part.inputs, tensors)
    for name, tensor in tensors.items():
        if tensor.required and name not in part.inputs:
            yield f"inputs' lacks {name!r}, which the part requires"
    yield from _output_problems("outputs", part.outputs, part, config)
    for gradient in part.gradients.inputs.values():
        yield from _unknown("gradients.inputs", gradient.sum_of, differentiable_inputs(part.name))
    if part.outputs and not part.runs:
        yield "runs' is empty but must hold at least one run, because 'outputs' are given"
    for run in part.runs:
        yield from _unknown("runs.fields", run.fields, FIELDS)
        yield from _output_problems("runs.outputs", run.outputs, part, config)
        yield from _weight_problems("runs.gradients", {**part.weights, **run.gradients}, part, config)


def _unknown(key: str, names: Iterable[str], choices: Iterable[str]) -> Iterator[str]:
    choices = list(choices)
    for name in names:
        if name not in choices:
            yield f"{key}' names {name!r} but must name one of {', '.join(choices)}"


def _weight_problems(
    key: str, weights: Mapping[str, Native], part: PartTable, config: EncoderConfig
) -> Iterator[str]:
    required = parameters(config, part.name)
    owners: dict[str, str] = {}
    bindings = {
        fill(pattern, {"i": i}): (fill(native.name, {"i": i}), native)
        for pattern, native in weights.items()
        for i in range(config.num_layers)
    }
    for name, (source_name, native) in bindings.items():
        if name not in required:
            yield f"{key}' names {name!r}, which is not a parameter of the part"
            continue
        if owners.setdefault(source_name, name) != name:
            yield (
                f"{key}' gives {source_name!r} to both {owners[source_name]!r} and {name!r}; it must "
                f"belong to one"
            )
        rank, layout_rank = len(required[name].shape.split()), WEIGHT_LAYOUTS[native.layout].rank
        if rank != layout_rank:
            yield (
                f"{key}' gives {name!r} the layout {native.layout!r} for rank {layout_rank}; it must be one "
                f"for rank {rank}"
            )
    for name, parameter in required.items():
        if name not in bindings and (parameter.kind != "positions" or part.positions.output is None):
            yield f"{key}' lacks {name!r}, which the part requires"


def _output_problems(
    key: str, outputs: Mapping[str, Output], part: PartTable, config: EncoderConfig
) -> Iterator[str]:
    tensors = taps(config, part.name)
    for name, output in outputs.items():
        tap = fill(output.tap, {"i": 0, "n": config.num_layers})
        if tap not in tensors and tap != "predictions":
            yield f"{key}' maps {name!r} to {tap!r}, which is not a tap of the part"
