"""What the table of a source says: the tables of ``spec/sources`` as data classes.

A table is one TOML file for a published source or the format of its checkpoints. At the top: ``source``, its name; ``variant``, the member of the family
that gives every configuration field that the source does not state; ``like``, another table, for the same configuration
in another kind of file: what a part does not state is as there; ``words``, another table, in whose words the configuration is though
the parts are others; ``part_key``, the key of the source's configuration
that tells which part was run, where there are several; ``deviations``, a list of
``{ name, value, reason }``, where the source's framework could not do what it says (:mod:`concord.spec.deviations`); ``training``, how
the source trains: ``constants``, field of a recipe (:class:`concord.spec.training.recipe.Recipe`) = value; ``fields``, field = the source's key, ``key.0`` for
the first entry of a list, where the source has it; ``deviations``, those of the optimizer; ``float32_positions``, whether the
position table is computed in float32 and files do not hold it. Below ``[parts.<part of the model>]``:

==============  =====================================================================================================
``kind``        how the value of ``part_key`` begins for this part
``fields``      configuration field = the source's key; each must be there
``options``     configuration field = ``{ key, values, absent }``: the source's word to ours, where the source has the key;
                ``absent``, which may be left out: its word where our configuration does not have the field
``constants``   configuration field = value
``weights``     canonical parameter = ``{ name, layout }``
``positions``   ``output``: where a file keeps the position table of a source that has no such parameter
``inputs``      canonical input = ``{ name, layout }``
``mask``        ``stored``, a pattern of an input with the mask itself; ``ids``, one that it follows from; ``none = { key, value }``,
                what the source's configuration says where there is no mask
``outputs``     the source's output = ``{ tap, layout, required }``
``gradients``   ``under``: a prefix of all their names; ``inputs``: the source's input = ``{ sum_of, layout }``
``unchecked``   the source's output, or a prefix that ends in ``/`` = why it is not checked
``checkpoint``  what files of weights have besides (:class:`CheckpointTable`); a published source's files of tensors have nothing of it
``like``        another part above: what this one does not state is as there, but for the weights in the list ``without`` and for runs;
                what it states in ``checkpoint.ignored`` is ignored besides what is there
``runs``        a list of ``{ label, fields, outputs, gradients, only }``: what was run on the same weights and inputs;
                ``gradients`` replaces the names of some weights' gradients; ``only``: the run checks its own
                outputs and nothing else, and exists where the file has them; a format of checkpoints has none
==============  =====================================================================================================

Names may hold the placeholders of :mod:`concord.spec.sources.names`; layouts are those of :mod:`concord.spec.sources.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from concord.spec.deviations import Deviations


@dataclass(frozen=True)
class Native:
    """A tensor of a source: its name and layout."""

    name: str
    layout: str


@dataclass(frozen=True)
class Option:
    """A configuration key of a source whose words are not ours: ``values`` maps its word to our value, None: the field is absent."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class MaskSource:
    """Where the key mask comes from: a stored one, or ids, or nowhere if key ``none_key`` says ``none_value``."""

    stored: str
    ids: str
    none_key: str
    none_value: str


@dataclass(frozen=True)
class Output:
    """The tap that an output of a source is."""

    tap: str
    layout: str
    required: bool


@dataclass(frozen=True)
class InputGradient:
    """The inputs whose gradients sum up to a source's gradient."""

    sum_of: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class RunEntry:
    """One of the runs that a file holds."""

    label: str
    fields: Mapping[str, Any]
    outputs: Mapping[str, Output]
    gradients: Mapping[str, Native]
    only: bool


@dataclass(frozen=True)
class Ignored:
    """Why a tensor that is no parameter can be left out, and what it must hold for that to be true (:data:`concord.porting.holds.HOLDS`); empty: only its name says so."""

    reason: str
    holds: str = ""


@dataclass(frozen=True)
class CheckpointTable:
    """What a table says about files of weights, beyond the names and layouts of parameters.

    Attributes:
        prefixes: how names may begin: those of the table begin with the first one, files may have another in its place.
        older: the end of a name = another end that it may have instead, as older versions wrote it.
        ignored: a tensor that is no parameter, or a pattern with ``*`` = why it can be left out, or ``{ reason, holds }``.
        tied: a tensor that is a copy of another one, where it is in the file = the other's name there.
        positions: where the file keeps the table of fixed positions, if it does; the specification computes it otherwise.
        carried: a parameter of the whole model that this part does not have, or a tensor of a head that the family does not have, by a name
            that begins with ``heads.`` = where a file may keep it nevertheless: other kinds of file may have it too.
        requires: a key of the configuration = the values that it may have; it may be missing.
        equal: a key of the configuration = another one, which must have the same value.
        defaults: a key of the configuration = its value where it is missing.
        counts: a key of the configuration = another one, whose entries are counted where the first is missing.
        sizes: a key of the configuration = a tensor and the number of its axis, ``name:0``, whose length it is where it is missing.
        writes: a key of a configuration that is written = its value.
    """

    prefixes: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, Ignored] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    positions: Native | None = None
    carried: Mapping[str, Native] = field(default_factory=dict)
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartTable:
    """What a table says about one part of the model; the module's docstring explains each field."""

    name: str
    kind: str
    fields: Mapping[str, str]
    options: Mapping[str, Option]
    constants: Mapping[str, Any]
    weights: Mapping[str, Native]
    position_output: str | None
    inputs: Mapping[str, Native]
    mask: MaskSource | None
    outputs: Mapping[str, Output]
    gradients_under: str
    input_gradients: Mapping[str, InputGradient]
    unchecked: Mapping[str, str]
    checkpoint: CheckpointTable
    runs: tuple[RunEntry, ...]


@dataclass(frozen=True)
class TrainingTable:
    """What a table says about training; the module's docstring explains each field."""

    constants: Mapping[str, Any]
    fields: Mapping[str, str]
    deviations: Deviations
    float32_positions: bool


@dataclass(frozen=True)
class Table:
    """How a published source names and lays out what the family has."""

    source: str
    variant: str
    part_key: str | None
    parts: Mapping[str, PartTable]
    deviations: Deviations
    training: TrainingTable | None
    like: str = ""
    words: str = ""
