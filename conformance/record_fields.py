"""Field types of records, for pydantic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from concord.spec.config import EncoderConfig, from_mapping

try:
    from pydantic import AfterValidator, BeforeValidator, PlainValidator
    from pydantic import Field as Field
except ImportError:  # a measuring machine may lack pydantic: it writes records that others read

    def Field(*words: Any, **how: Any) -> Any:  # type: ignore[no-redef]  # noqa: N802
        """Return None: records are not read without pydantic."""

    AfterValidator = BeforeValidator = PlainValidator = Field  # type: ignore[assignment, misc]

# Significant digits of agreeing errors.
DIGITS = 4


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _config(value: Any) -> EncoderConfig:
    if not isinstance(value, Mapping):
        raise ValueError("must be a JSON object")
    return from_mapping(value)


# A number; JSON stores inf, -inf and nan as text.
Number = Annotated[float, BeforeValidator(_number)]

# A count or index: JSON readers represent integers exactly up to 2^53.
Count = Annotated[int, Field(ge=0, le=2**53)]

# Exponent of a power of two, in the range of float64.
Power = Annotated[int, Field(ge=-(2**11), le=2**11)]

# The keys of a variant's TOML file.
Config = Annotated[EncoderConfig, PlainValidator(_config)]

# Fields that are not stored in records (concord.conformance.run.record.plain).
Unwritten = Annotated[Any, BeforeValidator(lambda _: None)]


def among(*words: str) -> AfterValidator:
    """A validator that accepts only these words."""

    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(map(repr, words))}")
        return value

    return AfterValidator(check)


def also(*names: str) -> Any:
    """A writer that adds properties to the fields; reading ignores them."""

    def written(self: Any, fields: dict[str, Any]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        shown = {name: short(value) if isinstance(value, float) else value for name, value in values.items()}
        return {**fields, **shown}

    return written


def short(value: float) -> float:
    """Round a number to a record's digits."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value
