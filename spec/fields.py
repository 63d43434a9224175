"""Dataclasses as plain data: TOML text, types, and options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from concord.spec.errors import ConfigError, unknown

Kind = TypeVar("Kind")

# float64 cannot represent every integer from here on; no model has such a size.
LARGEST = 2**53


def build(kind: type[Kind], fields: Mapping[str, Any], where: str, clause: str = "") -> Kind:
    """Build a dataclass from plain data.

    Args:
        where: the data's name in messages.

    Raises:
        ConfigError: listing all unknown, missing and wrong fields.
    """
    field_by_name = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    source = clause and f" [clause={clause}]"
    required = [name for name, field in field_by_name.items() if field.default is dataclasses.MISSING]
    problems = [
        f"{where}: {unknown('field', name, list(field_by_name))}"
        for name in fields
        if name not in field_by_name
    ]
    problems += [
        f"{where}: field {name!r} is missing but is required{source}"
        for name in required
        if name not in fields
    ]
    if problems:
        raise ConfigError(problems)
    large = [name for name, value in fields.items() if type(value) is int and abs(value) >= LARGEST]
    if large:
        raise ConfigError(
            [
                f"{where}: field {name!r} has more than 53 significant bits but must have at most 53{source}"
                for name in large
            ]
        )
    try:
        data = kind(**{name: _plain(value, str(field_by_name[name].type)) for name, value in fields.items()})
        if problems := type_problems(data, {}, clause):
            raise ConfigError(problems)
        return data
    except ConfigError as error:
        raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from None


def _plain(value: Any, annotation: str) -> Any:
    # TOML and JSON lack tuples, and writers may drop the decimal point of a whole number.
    if "float" in annotation and type(value) is int:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def to_toml(fields: Mapping[str, Any]) -> str:
    """TOML text, one field per line."""
    # TOML and JSON write scalars of these types, and lists of them, in the same way.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


def replaced(data: Kind, noun: str, fields: Mapping[str, Any]) -> Kind:
    """Return a copy with some fields replaced.

    Raises:
        UnknownNameError: for an unknown field.
        ConfigError: if the result is invalid.
    """
    names = [field.name for field in dataclasses.fields(data)]  # type: ignore[arg-type]
    for name in fields:
        if name not in names:
            raise unknown(noun, name, names)
    return dataclasses.replace(data, **fields)  # type: ignore[type-var]


def type_problems(data: Any, choices: Mapping[str, tuple[str, ...]], clause: str) -> list[str]:
    """Describe fields with wrong types or unknown options."""
    problems, source = [], clause and f" [clause={clause}]"
    for field in dataclasses.fields(data):
        name, value = field.name, getattr(data, field.name)
        allowed = [kind.partition("[")[0] for kind in str(field.type).split(" | ")]
        actual = "None" if value is None else type(value).__name__
        if actual not in allowed:
            problems.append(f"{name!r} is {value!r} ({actual}) but must be {' or '.join(allowed)}{source}")
        elif name in choices and value is not None and value not in choices[name]:
            problems.append(f"{name!r} is {value!r} but must be one of {', '.join(choices[name])}{source}")
    return problems
