"""The TOML tables of ``spec/sources`` as data classes.

A table describes a source or checkpoint format. :mod:`concord.spec.sources.names` explains placeholders,
:mod:`concord.spec.sources.layouts` layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from concord.spec.deviations import Deviations, parse_deviations
from concord.spec.sources.layouts import TENSOR_LAYOUTS, WEIGHT_LAYOUTS
from concord.spec.sources.names import problem


def _pattern(name: str) -> str:
    if wrong := problem(name):
        raise ValueError(wrong)
    return name


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in choices:
            raise ValueError(f"is {name!r} but must be one of {', '.join(choices)}")
        return name

    return check


def _declared(entries: Any) -> Any:
    plain = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    return parse_deviations(entries) if plain else entries


Pattern = Annotated[str, AfterValidator(_pattern)]

WeightLayoutName = Annotated[str, AfterValidator(_one_of(WEIGHT_LAYOUTS))]

TensorLayoutName = Annotated[str, AfterValidator(_one_of(TENSOR_LAYOUTS))]

Declared = Annotated[Deviations, BeforeValidator(_declared)]


class StrictTable(BaseModel):
    """A table of a TOML file."""

    # A misspelt key or a number for a string is an error, never a silent default.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Native(StrictTable):
    """Name and layout of a source's weight."""

    name: Pattern
    layout: WeightLayoutName


class NativeInput(StrictTable):
    """Name and layout of a source's input."""

    name: Pattern
    layout: TensorLayoutName = "same"


class Option(StrictTable):
    """A configuration key whose values differ in the source."""

    key: str
    values: dict[str, Any] = {}  # from the source's word to ours
    absent: str | None = None  # the source's word if our configuration lacks the field

    @property
    def words(self) -> dict[str, Any]:
        """Map every word of the source to our value, or to None for an absent field."""
        return {**self.values, **({} if self.absent is None else {self.absent: None})}


class NoMask(StrictTable):
    """The configuration entry for a missing mask."""

    key: str
    value: str


class MaskSource(StrictTable):
    """Origin of the key mask: stored, computed from ids, or absent."""

    stored: str  # pattern of an input with the mask itself
    ids: str  # pattern of an input of ids that determine the mask
    none: NoMask


class Output(StrictTable):
    """The activation that a source's output corresponds to."""

    tap: Pattern
    layout: TensorLayoutName = "same"
    required: bool = False


class InputGradient(StrictTable):
    """Inputs whose gradients sum to one gradient of a source."""

    sum_of: list[str]
    layout: TensorLayoutName = "same"


class Gradients(StrictTable):
    """Location of gradients in a source's file."""

    under: Pattern = ""  # prefix of all names
    inputs: dict[Pattern, InputGradient] = {}


class Positions(StrictTable):
    """Location of a position table outside the source's parameters."""

    output: str | None = None


class RunEntry(StrictTable):
    """One run in a file, on the same weights and inputs; checkpoint formats have none."""

    label: str
    fields: dict[str, Any] = {}
    outputs: dict[Pattern, Output] = {}
    gradients: dict[Pattern, Native] = {}  # different names for some weights' gradients
    only: bool = False  # exists only in files with its outputs, and checks only those


class Ignored(StrictTable):
    """Reason to ignore a tensor that is not a parameter."""

    reason: str
    holds: str = ""  # content that the reason requires, "positions" or "zeros"; empty for any


def _ignored(value: Any) -> Any:
    return {"reason": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class CheckpointTable(StrictTable):
    """Contents of weight files other than names and layouts of parameters."""

    prefixes: list[str] = []  # possible prefixes of all names; the table itself uses the first
    older: dict[str, str] = {}  # older spelling of each suffix
    # Reason to ignore a tensor, by name or pattern with *. Every tensor of a file is accounted for (decision
    # 0027).
    ignored: dict[str, Annotated[Ignored, BeforeValidator(_ignored)]] = {}
    tied: dict[str, str] = {}  # name of the original, by name of the copy
    positions: Native | None = None  # the table of fixed positions, computed otherwise by the specification
    # Places of parameters that only the whole model has, and of "heads.<name>" outside the family.
    # Conversion to another file type keeps them.
    carried: dict[Pattern, Native] = {}
    # Allowed values of a configuration key, if present.
    requires: dict[str, Annotated[list[Any], BeforeValidator(_listed)]] = {}
    equal: dict[str, str] = {}  # another key that must have the same value
    defaults: dict[str, Any] = {}  # value of a missing key
    counts: dict[str, str] = {}  # for a missing key: another key with entries to count
    sizes: dict[str, str] = {}  # for a missing key: "tensor:axis" with this length
    writes: dict[str, Any] = {}  # value to write


class PartTable(StrictTable):
    """The entries for one part of the model."""

    name: str = ""
    kind: str = ""  # prefix of the value of part_key for this part
    # Another part above, whose entries also apply here, except for runs and the weights in ``without``.
    like: str = ""
    without: list[str] = []
    fields: dict[str, str] = {}  # the source's key by configuration field; it must exist
    options: dict[Pattern, Option] = {}  # by configuration field
    constants: dict[str, Any] = {}  # value by configuration field
    weights: dict[Pattern, Native] = {}  # by canonical parameter
    positions: Positions = Positions()
    inputs: dict[Pattern, NativeInput] = {}  # by canonical input
    mask: MaskSource | None = None
    outputs: dict[Pattern, Output] = {}  # by the source's output
    gradients: Gradients = Gradients()
    unchecked: dict[str, str] = {}  # reason not to check it, by the source's output
    checkpoint: CheckpointTable = CheckpointTable()
    runs: list[RunEntry] = []

    @model_validator(mode="after")
    def _gradients_have_a_place(self) -> PartTable:
        if self.runs and "under" not in self.gradients.model_fields_set:
            raise ValueError("'gradients.under' is missing but must be text, because 'runs' are given")
        return self


class TrainingTable(StrictTable):
    """A source's training options, as a :class:`concord.spec.training.recipe.Recipe`."""

    constants: dict[str, Any] = {}  # value by recipe field
    fields: dict[str, str] = {}  # the source's key by recipe field; ``key.0``: first entry of a list
    deviations: Declared = {}  # of the optimizer
    float32_positions: bool = False  # the position table was computed in float32 and is not stored


class Table(StrictTable):
    """Names and layouts of the family's tensors in a published source."""

    source: str
    variant: str  # gives the configuration fields that the source does not state
    parts: dict[Pattern, PartTable] = Field(min_length=1)
    part_key: str | None = None  # configuration key that names the part, if there are several
    deviations: Declared = {}
    training: TrainingTable | None = None
    like: str = ""  # another table, for the same configuration in a different file type
    words: str = ""  # another table with the terms that the configuration uses
