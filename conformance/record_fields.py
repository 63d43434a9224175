"""The types of the fields of records.

What pydantic reads and writes of the data classes that hold results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from concord.spec.config import EncoderConfig, from_mapping

try:
    from pydantic import AfterValidator, BeforeValidator, PlainValidator
    from pydantic import Field as Field
except ImportError:  # a machine that has none writes records, and others read them

    def Field(*words: Any, **how: Any) -> Any:  # type: ignore[no-redef]  # noqa: N802
        """Return nothing: without pydantic, nothing is read."""

    AfterValidator = BeforeValidator = PlainValidator = Field  # type: ignore[assignment, misc]

DIGITS = 4
"""Significant digits of errors that agree."""


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _config(value: Any) -> EncoderConfig:
    if not isinstance(value, Mapping):
        raise ValueError("must be a JSON object")
    return from_mapping(value)


Number = Annotated[float, BeforeValidator(_number)]
"""A number; where JSON has none, the text inf, -inf or nan."""

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count or a place."""

Power = Annotated[int, Field(ge=-(2**11), le=2**11)]
"""A power of two."""

Config = Annotated[EncoderConfig, PlainValidator(_config)]
"""A configuration: the keys of a variant's TOML file."""

Unwritten = Annotated[Any, BeforeValidator(lambda _: None)]
"""What no record holds (:func:`concord.conformance.run.record.plain`)."""


def among(*words: str) -> AfterValidator:
    """Return what refuses text that is none of some words."""

    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(map(repr, words))}")
        return value

    return AfterValidator(check)


def also(*names: str) -> Any:
    """Return what writes properties of an object beside its fields, for who reads JSON alone.

    Reading leaves them out.
    """

    def written(self: Any, fields: dict[str, Any]) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in names}
        shown = {name: short(value) if isinstance(value, float) else value for name, value in found.items()}
        return {**fields, **shown}

    return written


def short(value: float) -> float:
    """Return a number with as many digits as are written of what agrees."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
