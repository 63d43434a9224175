"""Conversion of configurations and weights from and to published sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from concord.spec.arrays import Arrays, Shape, not_finite, wrong_shape, wrong_type
from concord.spec.config import EncoderConfig, from_mapping, variant
from concord.spec.errors import SpecError, WeightsError, located, refuse, unknown
from concord.spec.files import parse_toml, read_text, typed
from concord.spec.parameters import Weights, parameters, shape_of, validate_weights
from concord.spec.positions import sinusoid
from concord.spec.sources.layouts import WEIGHT_LAYOUTS, contiguous
from concord.spec.sources.names import fill, variables
from concord.spec.sources.schema import Native, PartTable, Table
from concord.spec.sources.validation import check

TABLES = Path(__file__).parent
POSITIONS = "embeddings.position.weight"
# Entries that ``like`` does not copy: runs and their results.
RUN = ("outputs", "gradients", "unchecked", "runs")


def sources() -> list[str]:
    """Names of the sources that have a table."""
    return sorted(path.stem for path in TABLES.glob("*.toml"))


@lru_cache
def load(source: str) -> Table:
    """Table of a published source.

    Raises:
        SpecError: if the table itself is wrong.
    """
    if source not in sources():
        raise unknown("source", source, sources())
    return read(TABLES / f"{source}.toml")


def read(path: Path) -> Table:
    """Read a table and check it against the family's parameters, taps and inputs.

    Raises:
        SpecError: listing all problems by file and key.
    """
    content = _stated(path)
    parts = content["parts"]
    # Parts of another table come first: a part of this one may refer to them.
    if content.get("like") in sources():
        others = _stated(TABLES / f"{content['like']}.toml")["parts"]
        parts = {name: _like(others.get(name, {}), parts.get(name, {})) for name in {**others, **parts}}
    for name, part in parts.items():
        part["name"] = name
        if model := parts.get(part.get("like")):
            exclusions = part.get("without", ())
            weights = {
                key: native for key, native in model.get("weights", {}).items() if key not in exclusions
            }
            ignored = [entry.get("checkpoint", {}).get("ignored", {}) for entry in (model, part)]
            parts[name] = _like({**model, "weights": weights}, part)
            parts[name]["checkpoint"]["ignored"] = {**ignored[0], **ignored[1]}
    with located(path.name):
        table = typed(Table, {**content, "parts": parts})
    refuse(check(table, path.name))
    return table


def _stated(path: Path) -> dict[str, Any]:
    content = parse_toml(read_text(path), str(path))
    with located(path.name):
        # Also checked before merging, so that an error is reported in its own file.
        typed(Table, content)
    return content


def _like(model: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    base = {key: value for key, value in model.items() if key not in RUN}
    return {**base, **own, "checkpoint": {**model.get("checkpoint", {}), **own.get("checkpoint", {})}}


def words(table: Table) -> str:
    """Name of the table whose terms a source's configuration uses."""
    return table.words or table.like or table.source


def part_of(table: Table, part: str | None = None) -> PartTable:
    """Entries for a part, by default the first one."""
    if part is None:
        return next(iter(table.parts.values()))
    if part not in table.parts:
        raise unknown(f"part of {table.source}", part, list(table.parts))
    return table.parts[part]


def configure(
    table: Table, stated: Mapping[str, Any], part: str | None = None, where: str = "configuration"
) -> EncoderConfig:
    """Translate a source's configuration into ours.

    Args:
        stated: the source's configuration; unknown keys are ignored.

    Raises:
        SpecError: listing missing keys and unknown values.
        ConfigError: if the result is invalid.
    """
    entry, problems = part_of(table, part), []
    rules = entry.checkpoint
    counts = {
        key: len(stated[other])
        for key, other in rules.counts.items()
        if isinstance(stated.get(other), (dict, list))
    }
    stated = {
        **stated,
        **{key: value for key, value in {**rules.defaults, **counts}.items() if stated.get(key) is None},
    }
    for key, allowed in rules.requires.items():
        if stated.get(key) is not None and stated[key] not in allowed:
            words = " or ".join(map(json.dumps, allowed))
            problems.append(
                f"{where}: key {key!r} is {json.dumps(stated[key])[:60]} but must be {words}: "
                f"Concord's model family has no such model [source={table.source}]"
            )
    for key, other in rules.equal.items():
        if stated.get(key) != stated.get(other):
            problems.append(
                f"{where}: key {key!r} is {json.dumps(stated.get(key))[:60]} but must be "
                f"{json.dumps(stated.get(other))[:60]}, the value of {other!r}: Concord's model "
                f"family has no such model [source={table.source}]"
            )
    fields = {**variant(table.variant).as_dict(), **entry.constants}
    for field, key in entry.fields.items():
        if key not in stated:
            problems.append(
                f"{where}: key {key!r} is missing but is required: it gives {field!r} [source={table.source}]"
            )
        fields[field] = stated.get(key)
    for field, option in entry.options.items():
        word = stated.get(option.key)
        spelling = word if isinstance(word, str) else json.dumps(word)
        if option.key in stated and spelling not in option.words:
            choices = ", ".join(option.words)
            problems.append(
                f"{where}: key {option.key!r} is {word!r} but must be one of {choices} "
                f"[source={table.source}]"
            )
        elif option.key in stated:
            fields[field] = option.words[spelling]
    if problems:
        raise SpecError(problems)
    return from_mapping(fields, where)


def stated(table: Table, config: EncoderConfig, part: str | None = None) -> dict[str, Any]:
    """Translate our configuration into the source's.

    Raises:
        SpecError: listing every option and parameter that the source lacks.
    """
    entry, end = part_of(table, part), f"[source={table.source}]"
    translated = {key: getattr(config, field) for field, key in entry.fields.items()}
    allowed: dict[str, list[Any]] = {field: [value] for field, value in entry.constants.items()}
    for field, option in entry.options.items():
        allowed[field] = list(option.words.values())
        words = [word for word, value in option.words.items() if value == getattr(config, field)]
        translated[option.key] = next(iter(words), None)
    translated |= {key: translated[other] for key, other in entry.checkpoint.equal.items()}
    problems = [
        f"{field} is {getattr(config, field)!r} but must be {' or '.join(map(repr, values))} {end}"
        for field, values in allowed.items()
        if getattr(config, field) not in values
    ]
    # One layer represents all: ``i`` is 0.
    required = parameters(config, entry.name)
    absent = [name for name in (fill(pattern, {"i": 0}) for pattern in entry.weights) if name not in required]
    problems += [f"{name!r} is required but the configuration has no such parameter {end}" for name in absent]
    if problems:
        raise SpecError(problems)
    return translated


@dataclass(frozen=True)
class Binding:
    """A source's tensors for a canonical parameter."""

    names: tuple[str, ...]  # several if each tensor contains one head
    layout: str  # one of sources.layouts.WEIGHT_LAYOUTS
    shape: Shape  # of each of the source's tensors


def bindings(
    entry: PartTable, config: EncoderConfig, instead: Mapping[str, Native] | None = None
) -> dict[str, Binding]:
    """Where the source keeps each parameter, in order of computation.

    Args:
        instead: different places for some parameters, as for gradients.
    """
    places = {}
    for pattern, native in {**entry.weights, **(instead or {})}.items():
        for i in range(config.num_layers if "i" in variables(pattern) else 1):
            places[fill(pattern, {"i": i})] = Native(name=fill(native.name, {"i": i}), layout=native.layout)
    bound = {}
    for name, parameter in parameters(config, entry.name).items():
        if name in places:
            native, heads = places[name], config.num_heads
            count = heads if "h" in variables(native.name) else 1
            shape = WEIGHT_LAYOUTS[native.layout].shape(shape_of(config, parameter), heads)
            bound[name] = Binding(
                tuple(fill(native.name, {"h": h}) for h in range(count)), native.layout, shape
            )
    return bound


def gather(
    places: Mapping[str, Binding], arrays: Mapping[str, NDArray[Any]], context: str
) -> tuple[Arrays, list[str]]:
    """Convert a source's tensors to canonical names and layouts; also return all problems."""
    arrays_by_name, problems = {}, []
    for canonical_name, place in places.items():
        wrong = []
        for name in place.names:
            end = f"[parameter={canonical_name}, {context}]"
            if name not in arrays:
                wrong.append(f"{name!r} is missing but is required {end}")
            elif problem := wrong_type(name, arrays[name]) or wrong_shape(name, arrays[name], place.shape):
                wrong.append(f"{problem} {end}")
        if not wrong:
            arrays_by_name[canonical_name] = contiguous(
                WEIGHT_LAYOUTS[place.layout].canonical([arrays[name] for name in place.names])
            )
        problems += wrong
    return arrays_by_name, problems


def canonical(
    table: Table,
    config: EncoderConfig,
    native: Mapping[str, NDArray[Any]],
    part: str | None = None,
    positions: NDArray[Any] | None = None,
) -> Arrays:
    """Convert a source's weights to canonical names and layouts, keeping values and dtypes.

    Args:
        positions: (max_positions, d_model), if not a parameter of the source; by default the float64
            sinusoid.

    Raises:
        WeightsError: listing missing, unexpected, misshapen, non-float or non-finite weights by the source's
            names.
    """
    entry, context = part_of(table, part), f"source={table.source}"
    places, required = bindings(entry, config), parameters(config, entry.name)
    converted, problems = gather(places, native, context)
    names = {name for place in places.values() for name in place.names}
    for name, array in native.items():
        problem = (
            not_finite(name, array)
            if name in names
            else (f"{name!r} is unexpected: the source has no such weight in this configuration")
        )
        problems += [f"{problem} [{context}]"] if problem else []
    problems += _homeless(required, places, config, table)
    if not problems and POSITIONS in required and POSITIONS not in places:
        converted[POSITIONS] = contiguous(sinusoid(config) if positions is None else positions)
        problem = wrong_shape(
            "the position table", converted[POSITIONS], shape_of(config, required[POSITIONS])
        )
        problems += [f"{problem} [{context}]"] if problem else []
    if problems:
        raise WeightsError(problems)
    return {name: converted[name] for name in required}


def native(table: Table, config: EncoderConfig, canonical: Weights, part: str | None = None) -> Arrays:
    """Convert canonical weights to a source's names and layouts, keeping values and dtypes.

    Raises:
        WeightsError: if the weights do not fit the configuration, or the source has no place for one.
    """
    entry = part_of(table, part)
    validate_weights(config, canonical, entry.name, where=f"source={table.source}")
    places = bindings(entry, config)
    if problems := _homeless(canonical, places, config, table):
        raise WeightsError(problems)
    converted = {}
    for name, place in places.items():
        pieces = WEIGHT_LAYOUTS[place.layout].native(canonical[name], config.num_heads)
        converted.update(
            {native_name: contiguous(piece) for native_name, piece in zip(place.names, pieces, strict=True)}
        )
    return converted


def _homeless(
    names: Iterable[str], places: Mapping[str, Binding], config: EncoderConfig, table: Table
) -> list[str]:
    # A fixed table follows from the configuration, so it needs no place (decision 0002).
    computed = [POSITIONS] if config.positions == "sinusoidal" else []
    return [
        f"{name!r} is required by this configuration but the source has no weight for it "
        f"[source={table.source}]"
        for name in names
        if name not in (*places, *computed)
    ]
