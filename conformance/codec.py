"""Dataclasses as JSON data, back again, and as a JSON Schema: their fields are the keys, and their docstrings say what those mean.

What is empty (``""``, null, no entries) and is so by default is left out. A dictionary whose keys are pairs is one of
dictionaries. Where JSON has no number there is text: ``"inf"``, ``"-inf"``, ``"nan"``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from concord.spec.config import EncoderConfig, from_mapping
from concord.spec.errors import refuse

DIGITS = 4
"""Significant digits of what is kept of every tensor and of every step. What does not agree keeps all."""

EMPTY: tuple[Any, ...] = (None, "", (), [], {})

NUMBER = {
    "description": "A number; where JSON has none, the text inf, -inf or nan.",
    "type": ["number", "string"],
    "pattern": "^(-?inf|nan)$",
}

WHOLE = {"type": "integer", "minimum": 0, "maximum": 2**53}
"""A whole number: a count or a place, unless its type says otherwise."""


@dataclasses.dataclass(frozen=True)
class Between:
    """What a whole number lies between, where it is no count."""

    minimum: int
    maximum: int


Power = Annotated[int, Between(-(2**11), 2**11)]
"""A power of two."""

MOST_PROBLEMS = 10


def short(value: float) -> float:
    """Return a number with as many digits as are kept of every tensor."""
    return float(f"{value:.{DIGITS}g}")


def plain(value: Any) -> Any:
    """Return a value as JSON would give it back; of a dataclass its fields, and the properties that its ``DERIVED`` names."""
    kind: Any = type(value)
    if _is_dataclass(kind):
        fields = {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if kept(field)
        }
        shown = {
            name: entry
            for name, entry in fields.items()
            if name in required(kind) or entry not in unsaid(kind, name)
        }
        return {**shown, **{name: plain(getattr(value, name)) for name in getattr(kind, "DERIVED", ())}}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and not value.isascii():  # a name of a file need not be text
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        nested: dict[str, Any] = {}
        for key, entry in value.items():
            *outer, last = key if isinstance(key, tuple) else (key,)
            functools.reduce(lambda within, name: within.setdefault(str(name), {}), outer, nested)[
                str(last)
            ] = plain(entry)
        return nested
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def understood(kind: Any, data: Mapping[str, Any]) -> Any:
    """Return the object of a dataclass that data holds, beside keys that it does not know.

    Raises:
        SpecError: listing where the data departs from the schema of the class.
    """
    mine = {name: data[name] for name in hints_of(kind) if name in data}
    definitions: dict[str, Any] = {"number": NUMBER}
    refuse(list(departures(mine, {**schema_of(kind, definitions), "$defs": definitions}))[:MOST_PROBLEMS])
    return restored(kind, mine)


def restored(hint: Any, data: Any) -> Any:
    """Return the object of a type that :func:`plain` made data of, which keeps to the schema of the type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return restored(inner[0], data)
    if origin in (types.UnionType, typing.Union):
        return (
            None if data is None else restored(next(one for one in inner if one is not types.NoneType), data)
        )
    if hint is EncoderConfig:
        return from_mapping(data)  # which says itself what it has to be
    if _is_dataclass(hint):
        hints = hints_of(hint)
        return hint(**{name: restored(hints[name], entry) for name, entry in data.items() if name in hints})
    if origin is tuple:
        kinds = inner[:1] * len(data) if inner[1:] == (...,) else inner
        return tuple(restored(kind, entry) for kind, entry in zip(kinds, data, strict=True))
    if origin is list:
        return [restored(inner[0], entry) for entry in data]
    if _is_mapping(hint):
        value = inner[1] if len(inner) > 1 else int
        if typing.get_origin(inner[0]) is tuple:
            return {
                (outer, last): restored(value, entry)
                for outer, within in data.items()
                for last, entry in within.items()
            }
        found = {key: restored(value, entry) for key, entry in data.items()}
        return found if len(inner) > 1 else origin(found)  # a Counter
    return hint(data) if hint in (float, int) else data


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a type; those of dataclasses are put into ``definitions``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is Annotated:
        return {**schema_of(inner[0], definitions), **dataclasses.asdict(inner[1])}
    if origin in (types.UnionType, typing.Union):
        found = schema_of(next(one for one in inner if one is not types.NoneType), definitions)
        return (
            {"anyOf": [found, {"type": "null"}]}
            if "$ref" in found
            else {**found, "type": [found["type"], "null"]}
        )
    if _is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # it may hold one of its own kind
            definitions[hint.__name__] = _of_dataclass(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin in (tuple, list):
        kinds = [schema_of(one, definitions) for one in inner if one is not ...]
        if origin is list or ... in inner:
            return {"type": "array", "items": kinds[0]}
        return {"type": "array", "prefixItems": kinds, "minItems": len(kinds), "maxItems": len(kinds)}
    if _is_mapping(hint):
        value = schema_of(inner[1] if len(inner) > 1 else int, definitions)
        nested = typing.get_origin(inner[0]) is tuple
        return {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": value} if nested else value,
        }
    if hint is float:
        return {"$ref": "#/$defs/number"}
    named: dict[Any, dict[str, Any]] = {str: {"type": "string"}, int: WHOLE, bool: {"type": "boolean"}}
    return named.get(hint, {})


def _of_dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    said, hints = meanings(kind), hints_of(kind)
    properties = {
        name: {"description": said.get(name, ""), **schema_of(hint, definitions)}
        for name, hint in hints.items()
    }
    for name in getattr(kind, "DERIVED", ()):
        found = getattr(kind, name)
        found = found.func if isinstance(found, functools.cached_property) else found.fget
        hint = typing.get_type_hints(found)["return"]
        properties[name] = {"description": _first_line(found), **schema_of(hint, definitions)}
    return {
        "description": _first_line(kind),
        "type": "object",
        "additionalProperties": False,
        "required": list(required(kind)),
        "properties": properties,
    }


def kept(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field of a dataclass is data: what is not shown is none."""
    return field.repr


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass that are data."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if kept(field)}


LATER = "later"
"""In the metadata of a field: it is left out where it is its default, as in records that were written before there was one."""


@functools.cache
def required(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that are never left out."""
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if kept(field) and LATER not in field.metadata and _default(field) not in EMPTY
    )


@functools.cache
def unsaid(kind: Any, name: str) -> tuple[Any, ...]:
    """Return what a field that may be left out is where it is left out."""
    field = kind.__dataclass_fields__[name]
    return (_default(field),) if LATER in field.metadata else EMPTY


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def meanings(kind: Any) -> dict[str, str]:
    """Return what the docstring of a dataclass, and those of the classes that it inherits from, say of each field."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        _, _, attributes = (one.__doc__ or "").partition("Attributes:\n")
        for names, text in re.findall(r"^ {8}(\w+(?:, \w+)*): (.*(?:\n {12}.*)*)", attributes, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), _words(text))
    return found


def _first_line(thing: Any) -> str:
    return _words((thing.__doc__ or "").partition("\n\n")[0])


def _words(text: str) -> str:
    """Return a piece of a docstring without what only its own markup needs."""
    text = re.sub(r":\w+:`(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("``", "")
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _is_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def departures(data: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Yield where data departs from a JSON Schema, a line each."""
    from jsonschema import Draft202012Validator  # which need not be installed where no record is read

    for error in Draft202012Validator(schema).iter_errors(data):
        yield from _departure(error)


def _departure(error: Any) -> Iterator[str]:
    while error.context:  # what may be null too
        error = max(error.context, key=lambda one: len(one.absolute_path))
    where, value, wanted = (
        error.json_path.removeprefix("$").removeprefix(".") or "it",
        str(error.instance)[:40],
        error.validator_value,
    )
    if error.validator == "required":
        yield f"{where} lacks {error.message.partition(' is a required')[0]}"
    elif error.validator == "additionalProperties":
        yield from (
            f"{where} has an unknown key {key!r}"
            for key in error.instance
            if key not in error.schema.get("properties", {})
        )
    elif error.validator == "type":
        yield f"{where} is {value!r} but must be of type {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
    elif error.validator in ("minItems", "maxItems"):
        yield f"{where} has {len(error.instance)} entries but must have {wanted}"
    elif error.validator in ("minimum", "maximum"):
        yield f"{where} is {value} but must be at {'least' if error.validator == 'minimum' else 'most'} {wanted}"
    else:
        yield f"{where} is {value!r} but must {'match' if error.validator == 'pattern' else 'be'} {f'one of {str(wanted)[1:-1]}' if error.validator == 'enum' else wanted}"
