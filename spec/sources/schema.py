"""The TOML tables of ``spec/sources`` as data classes: how a published source names and stores things.

A table describes one source, or the format of its checkpoints. Names may hold the placeholders of
:mod:`concord.spec.sources.names`; layouts are those of :mod:`concord.spec.sources.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from concord.spec.deviations import Deviations, declared
from concord.spec.sources.layouts import TENSOR_LAYOUTS, WEIGHT_LAYOUTS
from concord.spec.sources.names import problem


def _pattern(name: str) -> str:
    if wrong := problem(name):
        raise ValueError(wrong)
    return name


def _one_of(known: Mapping[str, Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"is {name!r} but must be one of {', '.join(known)}")
        return name

    return check


def _declared(entries: Any) -> Any:
    plain = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    return declared(entries) if plain else entries


Pattern = Annotated[str, AfterValidator(_pattern)]

WeightLayoutName = Annotated[str, AfterValidator(_one_of(WEIGHT_LAYOUTS))]

TensorLayoutName = Annotated[str, AfterValidator(_one_of(TENSOR_LAYOUTS))]

Declared = Annotated[Deviations, BeforeValidator(_declared)]


class _Section(BaseModel):
    # A misspelt key or a number for a string is an error, never a silent default.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Native(_Section):
    """The name and layout of a source's weight."""

    name: Pattern
    layout: WeightLayoutName


class NativeInput(_Section):
    """The name and layout of a source's input."""

    name: Pattern
    layout: TensorLayoutName = "same"


class Option(_Section):
    """A configuration key whose values the source words differently."""

    key: str
    values: dict[str, Any] = {}  # from the source's word to our value
    absent: str | None = None  # the source's word where our configuration lacks the field

    @property
    def words(self) -> dict[str, Any]:
        """From every word of the source to our value; None means that the field is absent."""
        return {**self.values, **({} if self.absent is None else {self.absent: None})}


class NoMask(_Section):
    """The configuration entry that says that there is no mask."""

    key: str
    value: str


class MaskSource(_Section):
    """Where the key mask comes from: stored, computed from ids, or absent."""

    stored: str  # pattern of an input with the mask itself
    ids: str  # pattern of an input of ids that the mask follows from
    none: NoMask


class Output(_Section):
    """The activation that a source's output corresponds to."""

    tap: Pattern
    layout: TensorLayoutName = "same"
    required: bool = False


class InputGradient(_Section):
    """The inputs whose gradients sum to one gradient of a source."""

    sum_of: list[str]
    layout: TensorLayoutName = "same"


class Gradients(_Section):
    """Where a source's file keeps gradients."""

    under: Pattern = ""  # prefix of all names
    inputs: dict[Pattern, InputGradient] = {}


class Positions(_Section):
    """Where a file keeps a position table that is no parameter of the source."""

    output: str | None = None


class RunEntry(_Section):
    """One of the runs in a file, on the same weights and inputs; formats of checkpoints have none."""

    label: str
    fields: dict[str, Any] = {}
    outputs: dict[Pattern, Output] = {}
    gradients: dict[Pattern, Native] = {}  # other names for some weights' gradients
    only: bool = False  # checks its own outputs and nothing else, and exists where the file has them


class Ignored(_Section):
    """Why a tensor that is no parameter can be ignored."""

    reason: str
    holds: str = ""  # content that the reason requires, "positions" or "zeros"; empty for any


def _ignored(value: Any) -> Any:
    return {"reason": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class CheckpointTable(_Section):
    """What weight files hold beyond the names and layouts of parameters."""

    prefixes: list[str] = []  # possible prefixes of all names; the table itself uses the first
    older: dict[str, str] = {}  # suffix: the suffix that older versions wrote
    # Tensor, or pattern with *: why it can be ignored. Every tensor of a file is accounted for
    # (decision 0027).
    ignored: dict[str, Annotated[Ignored, BeforeValidator(_ignored)]] = {}
    tied: dict[str, str] = {}  # a tensor that copies another one: that one's name
    positions: Native | None = None  # the table of fixed positions; the specification computes it otherwise
    # A parameter of the whole model that this part lacks, or "heads.<name>" of a head outside the family:
    # where a file may keep it, so that conversion to another kind of file does not lose it.
    carried: dict[Pattern, Native] = {}
    # By key of a configuration: the values that it may have, if it is there.
    requires: dict[str, Annotated[list[Any], BeforeValidator(_listed)]] = {}
    equal: dict[str, str] = {}  # another key, which must have the same value
    defaults: dict[str, Any] = {}  # its value where it is missing
    counts: dict[str, str] = {}  # where it is missing: another key, whose entries are counted
    sizes: dict[str, str] = {}  # where it is missing: "tensor:axis", whose length it is
    writes: dict[str, Any] = {}  # the value to write


class PartTable(_Section):
    """What a table says about one part of the model."""

    name: str = ""
    kind: str = ""  # how the value of the table's part_key begins for this part
    # Another part above, whose entries hold here too, except for runs and the weights in ``without``.
    like: str = ""
    without: list[str] = []
    fields: dict[str, str] = {}  # configuration field: the source's key, which must exist
    options: dict[Pattern, Option] = {}  # configuration field: from the source's word to ours
    constants: dict[str, Any] = {}  # configuration field: value
    weights: dict[Pattern, Native] = {}  # by canonical parameter
    positions: Positions = Positions()
    inputs: dict[Pattern, NativeInput] = {}  # by canonical input
    mask: MaskSource | None = None
    outputs: dict[Pattern, Output] = {}  # by the source's output
    gradients: Gradients = Gradients()
    unchecked: dict[str, str] = {}  # the source's output: why it is not checked
    checkpoint: CheckpointTable = CheckpointTable()
    runs: list[RunEntry] = []

    @model_validator(mode="after")
    def _gradients_have_a_place(self) -> PartTable:
        if self.runs and "under" not in self.gradients.model_fields_set:
            raise ValueError("'gradients.under' is missing but must be text, for there are runs")
        return self


class TrainingTable(_Section):
    """How a source trains, as a :class:`concord.spec.training.recipe.Recipe`."""

    constants: dict[str, Any] = {}  # field of a recipe: value
    fields: dict[str, str] = {}  # field: the source's key, or ``key.0`` for the first entry of a list
    deviations: Declared = {}  # those of the optimizer
    float32_positions: bool = False  # the position table was computed in float32 and is not stored


class Table(_Section):
    """How a published source names and lays out the family's tensors."""

    source: str
    variant: str  # gives the configuration fields that the source does not state
    parts: dict[Pattern, PartTable] = Field(min_length=1)
    part_key: str | None = None  # configuration key that names the part that was run, if there are several
    deviations: Declared = {}
    training: TrainingTable | None = None
    like: str = ""  # another table, for the same configuration in another kind of file
    words: str = ""  # another table, in whose terms the configuration is written
