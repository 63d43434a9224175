"""What the table of a source says: the tables of ``spec/sources`` as data classes.

A table is one TOML file for a published source or the format of its checkpoints. At the top: ``source``, its
name; ``variant``, the member of the family that gives every configuration field that the source does not
state; ``like``, another table, for the same configuration in another kind of file: what a part does not state
is as there; ``words``, another table, in whose words the configuration is though the parts are others;
``part_key``, the key of the source's configuration that tells which part was run, where there are several;
``deviations``, a list of ``{ name, value, reason }``, where the source's framework could not do what it says
(:mod:`concord.spec.deviations`); ``training``, how the source trains: ``constants``, field of a recipe
(:class:`concord.spec.training.recipe.Recipe`) = value; ``fields``, field = the source's key, ``key.0`` for
the first entry of a list, where the source has it; ``deviations``, those of the optimizer;
``float32_positions``, whether the position table is computed in float32 and files do not hold it. Below
``[parts.<part of the model>]``:

==============  ============================================================================================
``kind``        how the value of ``part_key`` begins for this part
``fields``      configuration field = the source's key; each must be there
``options``     configuration field = ``{ key, values, absent }``: the source's word to ours, where the
                source has the key; ``absent``, which may be left out: its word where our configuration does
                not have the field
``constants``   configuration field = value
``weights``     canonical parameter = ``{ name, layout }``
``positions``   ``output``: where a file keeps the position table of a source that has no such parameter
``inputs``      canonical input = ``{ name, layout }``
``mask``        ``stored``, a pattern of an input with the mask itself; ``ids``, one that it follows from;
                ``none = { key, value }``, what the source's configuration says where there is no mask
``outputs``     the source's output = ``{ tap, layout, required }``
``gradients``   ``under``: a prefix of all their names; ``inputs``: the source's input = ``{ sum_of, layout
                }``
``unchecked``   the source's output = why it is not checked
``checkpoint``  what files of weights have besides (:class:`CheckpointTable`); a published source's files of
                tensors have nothing of it
``like``        another part above: what this one does not state is as there, but for the weights in the
                list ``without`` and for runs; what it states in ``checkpoint.ignored`` is ignored besides
                what is there
``runs``        a list of ``{ label, fields, outputs, gradients, only }``: what was run on the same weights
                and inputs; ``gradients`` replaces the names of some weights' gradients; ``only``: the run
                checks its own outputs and nothing else, and exists where the file has them; a format of
                checkpoints has none
==============  ============================================================================================

Names may hold the placeholders of :mod:`concord.spec.sources.names`; layouts are those of
:mod:`concord.spec.sources.layouts`.
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
"""A name that may hold placeholders."""

WeightLayoutName = Annotated[str, AfterValidator(_one_of(WEIGHT_LAYOUTS))]

TensorLayoutName = Annotated[str, AfterValidator(_one_of(TENSOR_LAYOUTS))]

Declared = Annotated[Deviations, BeforeValidator(_declared)]


class _Section(BaseModel):
    """A TOML table: an unknown key is refused, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Native(_Section):
    """A weight of a source: its name and layout."""

    name: Pattern
    layout: WeightLayoutName


class NativeInput(_Section):
    """An input of a source: its name and layout."""

    name: Pattern
    layout: TensorLayoutName = "same"


class Option(_Section):
    """A configuration key of a source whose words are not ours.

    Attributes:
        key: of the source's configuration.
        values: the source's word to our value.
        absent: the source's word where our configuration does not have the field.
    """

    key: str
    values: dict[str, Any] = {}
    absent: str | None = None

    @property
    def words(self) -> dict[str, Any]:
        """Every word of the source to our value; None: the field is absent."""
        return {**self.values, **({} if self.absent is None else {self.absent: None})}


class NoMask(_Section):
    """What the source's configuration says where there is no mask."""

    key: str
    value: str


class MaskSource(_Section):
    """Where the key mask comes from: a stored one, or ids, or nowhere."""

    stored: str
    ids: str
    none: NoMask


class Output(_Section):
    """The activation that an output of a source is."""

    tap: Pattern
    layout: TensorLayoutName = "same"
    required: bool = False


class InputGradient(_Section):
    """The inputs whose gradients sum up to a source's gradient."""

    sum_of: list[str]
    layout: TensorLayoutName = "same"


class Gradients(_Section):
    """Where a source's file keeps gradients: what their names begin with, and those of inputs."""

    under: Pattern = ""
    inputs: dict[Pattern, InputGradient] = {}


class Positions(_Section):
    """Where a file keeps the position table of a source that has no such parameter."""

    output: str | None = None


class RunEntry(_Section):
    """One of the runs that a file holds."""

    label: str
    fields: dict[str, Any] = {}
    outputs: dict[Pattern, Output] = {}
    gradients: dict[Pattern, Native] = {}
    only: bool = False


class Ignored(_Section):
    """Why a tensor that is no parameter can be left out.

    Attributes:
        reason: in words.
        holds: what it must hold for that to be true, ``positions`` or ``zeros``; empty: whatever it likes.
    """

    reason: str
    holds: str = ""


def _ignored(value: Any) -> Any:
    return {"reason": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class CheckpointTable(_Section):
    """What a table says about files of weights, beyond the names and layouts of parameters.

    Attributes:
        prefixes: how names may begin: those of the table begin with the first one, files may have another in
            its place.
        older: the end of a name = another end that it may have instead, as older versions wrote it.
        ignored: a tensor that is no parameter, or a pattern with ``*`` = why it can be left out, or ``{
            reason, holds }``.
        tied: a tensor that is a copy of another one, where it is in the file = the other's name there.
        positions: where the file keeps the table of fixed positions, if it does; the specification computes
            it otherwise.
        carried: a parameter of the whole model that this part does not have, or a tensor of a head that the
            family does not have, by a name that begins with ``heads.`` = where a file may keep it
            nevertheless: other kinds of file may have it too.
        requires: a key of the configuration = the values that it may have; it may be missing.
        equal: a key of the configuration = another one, which must have the same value.
        defaults: a key of the configuration = its value where it is missing.
        counts: a key of the configuration = another one, whose entries are counted where the first is
            missing.
        sizes: a key of the configuration = a tensor and the number of its axis, ``name:0``, whose length it
            is where it is missing.
        writes: a key of a configuration that is written = its value.
    """

    prefixes: list[str] = []
    older: dict[str, str] = {}
    ignored: dict[str, Annotated[Ignored, BeforeValidator(_ignored)]] = {}
    tied: dict[str, str] = {}
    positions: Native | None = None
    carried: dict[Pattern, Native] = {}
    requires: dict[str, Annotated[list[Any], BeforeValidator(_listed)]] = {}
    equal: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    counts: dict[str, str] = {}
    sizes: dict[str, str] = {}
    writes: dict[str, Any] = {}


class PartTable(_Section):
    """What a table says about one part of the model; the module's docstring explains each field."""

    name: str = ""
    kind: str = ""
    like: str = ""
    without: list[str] = []
    fields: dict[str, str] = {}
    options: dict[Pattern, Option] = {}
    constants: dict[str, Any] = {}
    weights: dict[Pattern, Native] = {}
    positions: Positions = Positions()
    inputs: dict[Pattern, NativeInput] = {}
    mask: MaskSource | None = None
    outputs: dict[Pattern, Output] = {}
    gradients: Gradients = Gradients()
    unchecked: dict[str, str] = {}
    checkpoint: CheckpointTable = CheckpointTable()
    runs: list[RunEntry] = []

    @model_validator(mode="after")
    def _gradients_have_a_place(self) -> PartTable:
        if self.runs and "under" not in self.gradients.model_fields_set:
            raise ValueError("'gradients.under' is missing but must be text, for there are runs")
        return self


class TrainingTable(_Section):
    """What a table says about training; the module's docstring explains each field."""

    constants: dict[str, Any] = {}
    fields: dict[str, str] = {}
    deviations: Declared = {}
    float32_positions: bool = False


class Table(_Section):
    """How a published source names and lays out what the family has."""

    source: str
    variant: str
    parts: dict[Pattern, PartTable] = Field(min_length=1)
    part_key: str | None = None
    deviations: Declared = {}
    training: TrainingTable | None = None
    like: str = ""
    words: str = ""
